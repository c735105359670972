"""Clients whose training is not finite: they are refused and counted, and the others count on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.errors import TooFewClientsError
from dure.federated.server.combining import MOST_EMPTY_MODELS
from small import examples, same_bits, small_task, weights_of

KEYED: dict[str, Any] = {"clients": None, "partition": "natural-key"}

SYSTEMS = [
    dure.FedAvg(**KEYED),
    dure.FedAvg(**KEYED, aggregate="median"),
    dure.FedAvg(**KEYED, aggregate="clipped:1/mean"),
    dure.FedAvg(**KEYED, aggregate="centred-clipping:1"),
    dure.FedAvg(**KEYED, aggregate="geometric-median"),
    dure.FedProx(**KEYED),
    dure.FedAdam(**KEYED),
    dure.FedSGD(**KEYED),
    dure.ByzantineGD(**KEYED, groups=2),
    dure.Scaffold(**KEYED),
    dure.FedAsync(**KEYED, fraction=1.0),
    dure.FedBuff(**KEYED, fraction=1.0, buffer=2),
    dure.FedPer(**KEYED),
    dure.Ditto(**KEYED),
    dure.PerFedAvg(**KEYED),
]
LABELS = [f"{system.name} {system.aggregate}" for system in SYSTEMS]

pytestmark = pytest.mark.filterwarnings("ignore:round")


def task_of(value: float, owner: str = "owner 2", **changes: Any) -> dure.Task:
    """All inputs of an owner are this number."""
    data = examples()
    inputs = data.inputs.clone()
    assert data.keys is not None
    inputs[[key == owner for key in data.keys]] = value
    return small_task(train=dure.Examples(inputs, data.targets, data.keys), **changes)


@pytest.mark.parametrize("system", SYSTEMS, ids=LABELS)
@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_one_client_that_is_not_finite_does_not_end_a_run(system: Any, engine: Any) -> None:
    world = dure.Simulated(engine=engine, devices="lognormal:1")
    run = dure.train(task_of(float("nan")), system, world, dure.Stop(rounds=6))
    assert weights_of(run).isfinite().all()
    (facts,) = run.summary["facts"]
    ((client, times),) = facts["refused_clients"]
    assert (client, times) == (2, sum(facts["refusals"].values()))
    assert set(facts["refusals"]) == {"its first loss is not finite"}
    assert 2 not in dict(facts["turns"])
    assert run.summary["numbers"]["refused"] <= 1
    assert torch.tensor([step.loss for step in run.history.steps if step.loss]).isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_others_count_as_if_they_were_alone(value: float) -> None:
    broken = task_of(value)
    data = examples()
    assert data.keys is not None
    left = torch.tensor([at for at, key in enumerate(data.keys) if key != "owner 2"])
    others = dure.Examples(*data.batch(left), [data.keys[at] for at in left.tolist()])
    for system in (dure.FedAvg(**KEYED), dure.Scaffold(**KEYED), dure.Ditto(**KEYED)):
        world = dure.Simulated(engine="loop")
        one = dure.train(broken, system, world, dure.Stop(rounds=3))
        other = dure.train(small_task(train=others), system, world, dure.Stop(rounds=3))
        if not isinstance(system, dure.Scaffold):  # whose server knows how many clients there are
            assert same_bits(one, other)
        first, second = one.history.steps[0], other.history.steps[0]
        assert (first.loss, first.samples) == (second.loss, second.samples)


@pytest.mark.parametrize("system", SYSTEMS, ids=LABELS)
def test_a_client_that_recovers_has_kept_nothing_of_it(system: Any) -> None:
    ill = True

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(outputs, targets)
        return value * float("nan") if ill and outputs.requires_grad else value

    def recovers(event: dict[str, Any]) -> None:
        nonlocal ill
        ill = ill and event["step"] < 3

    run = dure.train(
        small_task(loss=loss),
        system,
        dure.Simulated(engine="loop"),
        dure.Stop(rounds=9),
        on_progress=recovers,
        evaluate_every=1,
    )
    assert weights_of(run).isfinite().all()
    (facts,) = run.summary["facts"]
    assert len(facts["turns"]) == 3, "all count in the end"
    refused = sum(facts["refusals"].values())
    assert refused == sum(dict(facts["refused_clients"]).values())


def test_where_all_are_refused_the_model_stays_and_the_end_says_so() -> None:
    broken = small_task(loss=lambda outputs, targets: outputs.sum() * float("nan"), test=None)
    with pytest.warns(UserWarning, match="no update counts, so the model does not") as told:
        run = dure.train(broken, dure.FedAvg(clients=3), stop=dure.Stop(rounds=4))
    texts = [str(warning.message) for warning in told]
    end = [text for text in texts if "no update counted in the last 4 rounds" in text]
    assert len(end) == 1
    assert "the model is the initial one; most were rejected for this reason: its first" in end[0]
    untrained = seeded_model(broken, 0).state_dict()
    assert all(torch.equal(w, untrained[name]) for name, w in run.model.state_dict().items())
    assert [step.numbers["refused"] for step in run.history.steps if step.numbers] == [3] * 4
    assert [step.loss for step in run.history.steps] == [None] * 4
    assert run.summary["train_loss"] is None


def test_a_run_that_ends_in_vain_says_since_when() -> None:
    ill = False

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets) * (float("nan") if ill else 1.0)

    def falls_ill(event: dict[str, Any]) -> None:
        nonlocal ill
        ill = event["step"] >= 2

    with pytest.warns(UserWarning, match="in the last 3 rounds, so the model is that of round 2"):
        dure.train(
            small_task(loss=loss, test=None),
            dure.FedAvg(clients=3),
            dure.Simulated(engine="loop"),
            dure.Stop(rounds=5),
            on_progress=falls_ill,
            evaluate_every=1,
        )


def test_where_all_are_refused_for_long_the_run_gives_up() -> None:
    broken = small_task(loss=lambda outputs, targets: outputs.sum() * float("nan"), test=None)
    with pytest.raises(TooFewClientsError, match="its first loss is not finite"):
        dure.train(broken, dure.FedSGD(clients=1), stop=dure.Stop(rounds=2 * MOST_EMPTY_MODELS))


def test_a_run_whose_clients_are_all_well_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = dure.train(small_task(), dure.FedAvg(**KEYED), stop=dure.Stop(rounds=2))
    assert run.summary["facts"][0]["refused_clients"] == []


def test_a_rule_counts_those_that_are_refused_among_its_broken_ones() -> None:
    """krum:1 needs 5 updates a round; of 5 one is refused, and it goes on."""
    data = examples()
    keys = [str(number % 5) for number in range(len(data))]
    inputs = data.inputs.clone()
    inputs[4] = float("nan")
    task = small_task(train=dure.Examples(inputs, data.targets, keys))
    run = dure.train(task, dure.FedAvg(**KEYED, aggregate="krum:1"), stop=dure.Stop(rounds=3))
    assert [step.numbers["updates"] for step in run.history.steps if step.numbers] == [4, 4, 4]


def test_a_liar_knows_nothing_of_a_client_that_has_no_update() -> None:
    data = examples()
    keys = [str(number % 6) for number in range(len(data))]
    inputs = data.inputs.clone()
    inputs[[5, 11]] = float("nan")
    task = small_task(train=dure.Examples(inputs, data.targets, keys))
    for attack in ("sign-flip:1", "alie", "inner-product", "mimic", "gaussian:1"):
        world = dure.Simulated(attack=attack, attackers=2)
        run = dure.train(task, dure.FedAvg(**KEYED), world, dure.Stop(rounds=2))
        assert weights_of(run).isfinite().all()
        (facts,) = run.summary["facts"]
        assert facts["refused_clients"] == [[5, 2]]
        norms = [norm for _, client, _, norm, _ in facts["updates"] if client != 5]
        assert len(norms) == 10
        assert None not in norms
