"""Runs with differential privacy of clients: what they compute, spend, tell and refuse."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.contracts.stop import Stop
from dure.federated.algorithms.scaffold import ControlVariates
from dure.privacy.accountant import Releases, epsilon
from dure.privacy.ledger import FILE
from small import largest_difference, network, same_bits, small_task

CLIENTS = 10
TASK = small_task(n=40)


def strategy(kind: type[Any] = dure.FedAvg, **changes: Any) -> Any:
    given = {"clients": CLIENTS, "fraction": 0.5, "privacy": "user-level:0.3:1.2"}
    return kind(**{**given, **changes})


def run(strategy: Any, task: dure.Task = TASK, rounds: int = 3, **more: Any) -> dure.Run:
    return dure.train(task, strategy, dure.Simulated(), Stop(rounds=rounds), **more)


def told(run: dure.Run, name: str = "epsilon") -> list[float | None]:
    return [step.numbers[name] for step in run.history.steps if step.numbers is not None]


@pytest.mark.parametrize("kind", [dure.FedAvg, dure.FedAdam, dure.FedProx, dure.Scaffold])
def test_without_noise_and_bound_it_is_the_system_itself(kind: type[Any]) -> None:
    # Four examples each, so that all weigh alike, and all are in every round.
    plain = run(kind(clients=CLIENTS))
    private = run(strategy(kind, fraction=1.0, privacy="user-level:inf:0"))
    assert largest_difference(plain, private) < 1e-12
    # Without noise there is no bound, and that is what is told.
    assert told(private) == [None] * 3
    assert private.summary["facts"][0]["promises"][0]["epsilon"] is None


def test_epsilon_is_told_after_each_round_and_in_words() -> None:
    done = run(strategy())
    expected = [epsilon([Releases(0.5, 1.2, times)], 1e-5) for times in (1, 2, 3)]
    assert told(done) == expected
    (promise,) = done.summary["facts"][0]["promises"]
    assert promise["epsilon"] == expected[-1]
    for words in ("any client", "coin of its own", "one client contributes"):
        assert words in promise["said"]
    assert "coins user-level:0.3:1.2" in done.summary["label"]


def test_the_same_seed_has_the_same_bits_and_another_has_others() -> None:
    assert same_bits(run(strategy()), run(strategy()))
    assert not same_bits(run(strategy()), run(strategy(), seed=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy": "user-level:0.3:1.2:server:layers"},
        {"privacy": "user-level:0.3:1.2:server:adaptive"},
        {"privacy": "user-level:0.3:1.2:server:flat:8"},
        {"privacy": "user-level:0.3:1.2:local"},
    ],
)
def test_a_run_goes_on_to_the_bit_and_its_ledger_is_not_reset(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    whole = run(strategy(**changes), rounds=4)
    folder = tmp_path / "run"
    run(strategy(**changes), rounds=2, out=folder, checkpoint_every=1)
    early = tmp_path / "early"
    shutil.copytree(folder, early)
    on = dure.resume(folder, task=TASK, stop=Stop(rounds=4))
    assert same_bits(whole, on)
    lines = (folder / FILE).read_text().splitlines()
    assert told(on) == told(whole)
    # A checkpoint of an older copy, beside the ledger of the newer: what is spent stays spent.
    (early / FILE).write_text("\n".join(lines) + "\n")
    again = dure.resume(early, task=TASK, stop=Stop(rounds=4))
    assert same_bits(whole, again)
    assert (early / FILE).read_text().splitlines() == lines
    # From the first round that is done again on, all that was ever spent is told.
    assert told(again)[-1] == told(whole)[-1]
    assert told(again)[2] == told(whole)[-1]


def test_a_budget_ends_the_run_before_it_tells_more(tmp_path: Path) -> None:
    budget = epsilon([Releases(0.5, 1.2, 4)], 1e-5) * 1.01
    folder = tmp_path / "run"
    done = run(strategy(epsilon=budget), rounds=50, out=folder)
    assert done.summary["ended"] == "epsilon"
    assert done.summary["steps"] == 4
    assert (told(done)[-1] or math.inf) <= budget
    # It does not go on, however often it is asked to.
    again = dure.resume(folder, task=TASK, stop=Stop(rounds=60))
    assert again.summary["ended"] == "epsilon"
    assert again.summary["steps"] == 4
    assert len((folder / FILE).read_text().splitlines()) == 4


def test_the_noise_for_an_epsilon_is_chosen_and_written_down(tmp_path: Path) -> None:
    # All are in every round: the account is then quick.
    asked = strategy(fraction=1.0, privacy="user-level:0.3", epsilon=6.0)
    done = run(asked, rounds=4, out=tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    text = config["strategy"]["privacy"]
    assert text.startswith("user-level:0.3:")
    noise = float(text.split(":")[2])
    assert text in done.summary["label"]
    assert done.summary["ended"] == "rounds"
    assert 5.99 < epsilon([Releases(1.0, noise, 4)], 1e-5) <= 6.0
    assert told(done)[-1] == epsilon([Releases(1.0, noise, 4)], 1e-5)
    # More rounds than it was chosen for do not fit.
    more = dure.resume(tmp_path / "run", task=TASK, stop=Stop(rounds=9))
    assert (more.summary["ended"], more.summary["steps"]) == ("epsilon", 4)


def test_a_round_of_nobody_is_noise_and_counts() -> None:
    # One in a thousand takes part: by this seed these rounds have nobody.
    done = run(strategy(fraction=1e-3, privacy="user-level:0.1:1"), rounds=2)
    assert [step.samples for step in done.history.steps] == [0, 0]
    assert done.history.steps[-1].loss is None
    # The denominator qW is fixed, so the noise is as large as it always is.
    deviation = 0.1 / (1e-3 * CLIENTS) * math.sqrt(2)
    moved = torch.cat([tensor.flatten() for tensor in done.model.state_dict().values()])
    assert float(moved.std()) == pytest.approx(deviation, rel=0.25)
    assert (told(done)[-1] or 0) > 0


def test_one_large_client_moves_the_model_no_more_than_a_small_one() -> None:
    # Plain means follow whoever has most: here a client has almost all of the data.
    def moved(privacy: str) -> float:
        done = run(dure.FedAvg(clients=4, partition="quantity-skew:0.1", privacy=privacy), rounds=1)
        weights = torch.cat([tensor.flatten() for tensor in done.model.state_dict().values()])
        start = torch.cat(
            [tensor.flatten() for tensor in seeded_model(TASK, 0).state_dict().values()]
        )
        return float((weights - start).norm())

    # S · (all four) / (qW) = S at the most.
    assert moved("user-level:0.01:0") <= 0.01 * (1 + 1e-9)
    assert moved("user-level:0.01:0:server:layers:20") <= 0.01 * (1 + 1e-9)


@pytest.mark.parametrize(
    "other",
    [
        strategy(dure.FedPer, held_out=0.0),
        strategy(dure.Ditto, held_out=0.0),
        strategy(dure.FedSGD),
        strategy(dure.Scaffold, privacy="user-level:0.3:1.2:server:layers"),
        strategy(dure.PerFedAvg, held_out=0.0, fine_tune=0),
    ],
    ids=lambda one: one.name,
)
def test_other_systems_with_rounds_keep_the_same_account(other: Any) -> None:
    done = run(other, rounds=2)
    assert told(done)[-1] == epsilon([Releases(0.5, 1.2, 2)], 1e-5)


def test_controls_of_scaffold_are_released_with_the_denominator_of_the_weights() -> None:
    # A clip so small that only noise is left: the control's deviation is z S / N, and that of the
    # weights z S / (qN).
    seen: list[float] = []
    absorb = ControlVariates.absorb

    def look(self: ControlVariates, extra: list[torch.Tensor], updates: float) -> None:
        absorb(self, extra, updates)
        seen.append(float(self.control[0].std()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlVariates, "absorb", look)
        run(strategy(dure.Scaffold, privacy="user-level:1e-3:1000"), rounds=1)
    assert seen[0] == pytest.approx(1.0 / CLIENTS, rel=0.25)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


class Counting(nn.Module):
    """A model that moves a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("table", torch.tensor([1.0, -math.inf], dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen + 1
        return self.inner(inputs)


def test_statistics_of_batch_norm_have_noise_and_counters_stay() -> None:
    done = run(strategy(privacy="user-level:0.3:30"), replace(TASK, model=normed), rounds=2)
    state = done.model.state_dict()
    assert float(state["1.running_mean"].std()) > 0.5
    assert float(state["1.running_var"].min()) == 0  # noise went below, a variance does not
    assert int(state["1.num_batches_tracked"]) == 0


def test_a_model_that_moves_another_buffer_is_refused_update_by_update() -> None:
    with pytest.warns(UserWarning, match="not a statistic of batch norm"):
        done = run(strategy(fraction=1.0), replace(TASK, model=Counting), rounds=1)
    assert done.summary["numbers"]["refused"] == CLIENTS
    # What nobody may move stays what it was.
    assert done.model.state_dict()["table"].tolist() == [1.0, -math.inf]


def test_adaptive_clipping_follows_and_is_told() -> None:
    done = run(strategy(fraction=1.0, privacy="user-level:50:0.5:server:adaptive"), rounds=4)
    bounds = told(done, "clip")
    assert all(now is not None for now in bounds)
    # Far above all updates, it falls by the largest step each time.
    assert bounds[-1] == pytest.approx(50 * math.exp(-0.4), rel=0.1)
    # The count has its noise within the same account.
    assert told(done)[-1] == epsilon([Releases(1.0, 0.5, 4)], 1e-5)


def test_local_noise_is_in_what_is_sent_and_each_client_has_its_account() -> None:
    done = run(strategy(privacy="user-level:0.3:2:local"), rounds=4)
    turns = dict(done.summary["facts"][0]["turns"])
    most = max(turns.values())
    assert told(done)[-1] == epsilon([Releases(1.0, 2.0, most)], 1e-5, "replace")
    # A loss is measured without noise, and is not told.
    assert [step.loss for step in done.history.steps] == [None] * 4
    (promise,) = done.summary["facts"][0]["promises"]
    assert "the server" in promise["against"]
    assert "no amplification" in promise["said"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (strategy(dure.FedAsync, fraction=0.1), "fed-async has none: use fed-avg"),
        (strategy(dure.FedBuff), "fed-buff has none"),
        (strategy(selection="uniform:1.3"), "leave it out, or write coins"),
        (strategy(selection="weighted"), "leave it out, or write coins"),
        (strategy(selection="poisson"), "leave it out, or write coins"),
        (strategy(aggregate="median"), "the rule median"),
        (strategy(dure.ByzantineGD), "the rule geometric-median-of-means"),
        (strategy(privacy="user-level:1:1:distributed"), "write secure-aggregation/ before it"),
        (strategy(privacy="user-level:inf:1"), "give a clip"),
        (strategy(privacy="user-level:1:1:local:adaptive"), "use flat or layers"),
        (strategy(epsilon=0.0), "it has to be greater than 0"),
        (strategy(epsilon=0.1), "one round alone costs"),
        (strategy(delta=0.0), "delta is 0.0"),
        (strategy(delta=0.1), "would allow publishing one"),
        (dure.FedAvg(epsilon=8.0), "add --privacy user-level"),
    ],
)
def test_what_would_break_the_promise_is_refused_by_name(other: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        run(other)


def test_noise_cannot_be_chosen_for_a_run_of_unknown_length() -> None:
    chosen = strategy(privacy="user-level:1", epsilon=8.0)
    with pytest.raises(ValueError, match="give --rounds"):
        dure.train(TASK, chosen, dure.Simulated(), Stop(epochs=3))


def test_a_client_that_is_a_key_is_called_so() -> None:
    task = small_task(n=40)
    done = run(
        dure.FedAvg(clients=None, partition="natural-key", privacy="user-level:1:2"),
        task,
        rounds=1,
    )
    (promise,) = done.summary["facts"][0]["promises"]
    assert promise["unit"] == "client (all examples of one key)"
    # All are in every round: nothing is amplified, and it says so.
    assert "no amplification" in promise["sampling"]
