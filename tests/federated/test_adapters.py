"""Adapters in a federation: the merge is the mean of B A, and each client has its own rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dure
from dure.contracts.fresh_model import seeded_model
from dure.contracts.strategy import Strategy
from dure.errors import TooFewUpdatesError
from dure.federated.adapters import AdapterRounds, MergedRounds, places_of, with_adapter
from dure.federated.aggregate.low_rank import (
    LowRank,
    mean_matrix,
    split,
    stacked,
    svd_of_matrix,
    svd_of_product,
)
from dure.federated.algorithm import Algorithm
from dure.federated.engines.job import ClientJob, JobResult
from dure.federated.engines.loop import LoopEngine
from dure.protocol.messages import Assignment, Update
from dure.tasks.task_summary import differences, trains_of
from dure.tensors.flat import FlatParameters
from small import examples, same_bits, small_task

TWO = dure.Stop(rounds=2)
FED_AVG = partial(dure.FedAvg, clients=4, batch_size=8, local_epochs=2)


def adapted(**settings: Any) -> dure.Task:
    return small_task(n=60, adapter=dure.LoRA(**{"rank": 2, "alpha": 4.0, **settings}))


def trained(task: dure.Task, strategy: Strategy, engine: str = "auto", rounds: int = 2) -> dure.Run:
    return dure.train(task, strategy, dure.Simulated(engine=engine), dure.Stop(rounds=rounds))


def products(run: dure.Run) -> list[Tensor]:
    """B A of each layer."""
    state = run.model.state_dict()
    names = [name for name in state if "lora_B" in name]
    return [state[name] @ state[name.replace("lora_B", "lora_A")] for name in names]


# The mean, and its best approximation


@st.composite
def some_updates(draw: st.DrawFn) -> tuple[list[LowRank], list[float], int]:
    """Updates of unlike ranks and scalings, their weights, and the rank of the approximation."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    outputs, inputs = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    ranks = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    updates = [
        LowRank(normal(outputs, rank), normal(rank, inputs), draw(st.floats(0.1, 10)))
        for rank in ranks
    ]
    weights = [draw(st.floats(0.5, 100)) for _ in ranks]
    return updates, weights, draw(st.integers(1, 6))


@given(some_updates())
def test_stacked_factors_are_the_mean_update(case: tuple[list[LowRank], list[float], int]) -> None:
    updates, weights, _ = case
    total = sum(weights)
    mean = sum(
        (weight / total * one.matrix() for one, weight in zip(updates, weights, strict=True)),
        start=torch.zeros(1, dtype=torch.float64),
    )
    error = 1e-12 * max(1.0, float(mean.abs().max()))
    assert (stacked(updates, weights).matrix() - mean).abs().max() <= error
    assert (mean_matrix(updates, weights) - mean).abs().max() <= error


@given(some_updates())
def test_split_is_the_best_approximation_of_the_rank(
    case: tuple[list[LowRank], list[float], int],
) -> None:
    """As near as the SVD of the full matrix: the error is the norm of the values left out."""
    updates, weights, rank = case
    full = mean_matrix(updates, weights)
    u, values, v = torch.linalg.svd(full, full_matrices=False)
    best = u[:, :rank] @ torch.diag(values[:rank]) @ v[:rank]
    like = LowRank(
        torch.ones(full.shape[0], rank, dtype=torch.float64),
        torch.ones(rank, full.shape[1], dtype=torch.float64),
        0.7,
    )
    scale = max(1.0, float(values[0]))
    for triples in (svd_of_product(stacked(updates, weights)), svd_of_matrix(full)):
        found = split(triples, like, row_norm=0.5, rounding=torch.finfo(torch.float64).eps)
        assert found.b.shape == like.b.shape
        assert found.a.shape == like.a.shape
        error = torch.linalg.matrix_norm(full - found.matrix())
        least = torch.linalg.vector_norm(values[rank:])
        assert abs(float(error - least)) <= 1e-10 * scale
        # Equal values have no order of their vectors; without them the approximation is unique.
        apart = rank >= len(values) or values[rank - 1] - values[rank] > 1e-3 * scale
        if apart:
            assert (found.matrix() - best).abs().max() <= 1e-10 * scale


def test_a_direction_without_a_value_stays_trainable() -> None:
    """B is zero there, and A is as before, whatever the rounding."""
    like = LowRank(torch.ones(4, 3).double(), torch.arange(15.0).reshape(3, 5).double(), 2.0)
    one = LowRank(torch.ones(4, 1).double(), torch.ones(1, 5).double())
    found = split(svd_of_product(one), like, 0.5, 1e-16)
    assert (found.matrix() - one.matrix()).abs().max() < 1e-14
    assert not found.b[:, 1:].any()
    assert torch.equal(found.a[1:], like.a[1:])
    zero = split(svd_of_product(LowRank(0 * one.b, one.a)), like, 0.5, 1e-16)
    assert not zero.b.any()
    assert torch.equal(zero.a, like.a)


# Rounds


def server_of(**settings: Any) -> tuple[AdapterRounds, list[Tensor]]:
    task = adapted(**settings)
    model = seeded_model(task, 0)
    algorithm = with_adapter(Algorithm(), task, model)
    assert isinstance(algorithm, AdapterRounds)
    return algorithm, FlatParameters(model).copy()


def update_of(client: int, delta: list[Tensor], examples: int) -> Update:
    return Update(
        ticket=client,
        client=client,
        round=0,
        examples=examples,
        samples=examples,
        loss=0.0,
        delta=delta,
        buffers=(),
    )


def matrices(algorithm: AdapterRounds, weights: list[Tensor], rank: int) -> list[Tensor]:
    """s·B A of each layer, of the first columns and rows."""
    found = []
    for places in algorithm.places:
        assert places.a is not None
        b, a = places.b.of(weights)[:, :rank], places.a.of(weights)[:rank]
        found.append(places.scaling * (b @ a))
    return found


@pytest.mark.parametrize("merge", ["stack", "svd"])
@pytest.mark.parametrize("rank", [3, (1, 2, 3)], ids=str)
def test_the_servers_step_is_the_best_approximation_of_the_mean(merge: str, rank: Any) -> None:
    """Of what each client sent within its rank, weighed by examples."""
    algorithm, weights = server_of(rank=rank, merge=merge)
    generator = torch.Generator().manual_seed(1)
    sent = [
        [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in weights]
        for _ in range(3)
    ]
    updates = [update_of(k, delta, 10 * (k + 1)) for k, delta in enumerate(sent)]
    shares = [10 / 60, 20 / 60, 30 / 60]
    mean = [
        sum(p * d for p, d in zip(shares, each, strict=True)) for each in zip(*sent, strict=True)
    ]
    new = list(algorithm.step([w.clone() for w in weights], mean, updates))  # type: ignore[arg-type]
    clients = [
        matrices(algorithm, [w + d for w, d in zip(weights, delta, strict=True)], own)
        for delta, own in zip(sent, [3, 3, 3] if rank == 3 else rank, strict=True)
    ]
    for layer, found in enumerate(matrices(algorithm, new, 3)):
        full = sum(p * one[layer] for p, one in zip(shares, clients, strict=True))
        u, values, v = torch.linalg.svd(full, full_matrices=False)
        best = u[:, :3] @ torch.diag(values[:3]) @ v[:3]
        assert (found - best).abs().max() <= 1e-12 * max(1.0, float(values[0]))


def test_stack_and_svd_are_one_run() -> None:
    one, other = (
        products(trained(adapted(merge=merge, rank=(1, 2, 4)), FED_AVG(), rounds=3))
        for merge in ("stack", "svd")
    )
    assert max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) < 1e-12


def test_the_mean_of_the_factors_is_another_model() -> None:
    one, other = (
        products(trained(adapted(merge=merge), FED_AVG())) for merge in ("stack", "factors")
    )
    assert max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) > 1e-4


def test_one_client_of_full_rank_gets_its_own_update_back() -> None:
    """The merge of a single client is another pair of factors of the same product."""
    alone = partial(dure.FedAvg, clients=1, batch_size=8)
    merged = products(trained(adapted(), alone(), rounds=1))
    plain = products(trained(adapted(merge="factors"), alone(), rounds=1))
    assert max(float((a - b).abs().max()) for a, b in zip(merged, plain, strict=True)) < 1e-14


def test_frozen_a_is_common_and_its_mean_is_exact() -> None:
    """The rule of the merge does not matter, and A is as it was drawn."""
    runs = [
        trained(adapted(freeze_a=True, merge=merge), FED_AVG()) for merge in ("stack", "factors")
    ]
    assert same_bits(*runs)
    drawn = seeded_model(adapted(freeze_a=True), 0).state_dict()
    state = runs[0].model.state_dict()
    assert all(torch.equal(state[name], drawn[name]) for name in state if "lora_A" in name)
    assert any(state[name].any() for name in state if "lora_B" in name)


# Unlike ranks


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("freeze_a", [False, True])
def test_a_client_trains_as_one_of_its_own_rank(rslora: bool, freeze_a: bool) -> None:
    """With PEFT's scaling of that rank, and by an optimizer that is not linear in the gradient."""
    settings: dict[str, Any] = {"alpha": 8.0, "rslora": rslora, "freeze_a": freeze_a}
    settings |= {"merge": "factors"}
    adam = partial(torch.optim.AdamW, lr=0.01)
    several = replace(adapted(rank=(2, 5), **settings), optimizer=adam)
    single = replace(adapted(rank=2, **settings), optimizer=adam)
    wide = seeded_model(several, 0)
    algorithm, weights = server_of(rank=(2, 5), **settings)
    # A server's model whose B is not zero.
    generator = torch.Generator().manual_seed(2)
    for places in algorithm.places:
        places.b.of(weights).normal_(generator=generator)
    asked = Assignment(0, 0, 0, 0, weights, [one.clone() for one in wide.buffers()], 0)
    narrow = seeded_model(single, 0)
    FlatParameters(wide).load(weights)
    taken = run_client(algorithm, several, asked)
    # The same client, alone with PEFT's own layers of rank 2.
    s, s_i = algorithm.places[0].scaling, places_of(narrow)[0].scaling
    own = dict(narrow.named_parameters())
    with torch.no_grad():
        for name, value in wide.named_parameters():
            if "lora_B" in name:
                own[name].copy_(value[:, :2] * (s / s_i))
            elif "lora_A" in name:
                own[name].copy_(value[:2])
    flat = FlatParameters(narrow)
    before = flat.copy()
    inputs, targets = single.train.batch(torch.arange(16))
    optimizer = adam([one for one in narrow.parameters() if one.requires_grad])
    for _ in range(3):
        optimizer.zero_grad()
        single.loss(narrow(inputs), targets).backward()
        optimizer.step()
    assert not torch.equal(before[0], flat.buffers[0])
    for mine, theirs in zip(algorithm.places, places_of(narrow), strict=True):
        b = mine.b.of(taken)
        assert (b[:, :2] * (s / s_i) - theirs.b.of(flat.buffers)).abs().max() < 1e-12
        assert not b[:, 2:].any()
        if mine.a is not None and theirs.a is not None:
            a = mine.a.of(taken)
            assert (a[:2] - theirs.a.of(flat.buffers)).abs().max() < 1e-12
            assert not a[2:].any()


def run_client(algorithm: AdapterRounds, task: dure.Task, asked: Assignment) -> list[Tensor]:
    """The weights that client 0 sends after three steps on the first 16 examples."""
    job = ClientJob(0, 0, torch.arange(16), asked.weights, asked.buffers, 0, 3)
    engine = LoopEngine(
        task=task, model=seeded_model(task, 0), examples=task.train, batch_size=None, seed=0
    )
    jobs = algorithm.jobs(job, asked, None)
    results = list(engine.train(jobs))
    delta, _, _ = algorithm.answer(jobs, results, asked, None)
    sent = algorithm.sent_buffers(results[0], asked)
    assert all(torch.equal(one, other) for one, other in zip(sent, asked.buffers, strict=True))
    return [w + d for w, d in zip(asked.weights, delta, strict=True)]


@pytest.mark.parametrize("settings", [{}, {"freeze_a": True}, {"merge": "factors"}], ids=str)
def test_engines_train_unlike_ranks_alike(settings: dict[str, Any]) -> None:
    task = adapted(rank=(1, 2, 4), **settings)
    assert same_bits(trained(task, FED_AVG()), trained(task, FED_AVG(), "loop-processes"))


def test_the_servers_model_has_whole_masks() -> None:
    run = trained(adapted(rank=(1, 4)), FED_AVG())
    masks = [value for name, value in run.model.state_dict().items() if name.endswith("mask")]
    assert masks
    assert all(bool((mask == 1).all()) for mask in masks)


def test_noise_beyond_a_rank_is_not_sent() -> None:
    """DP-SGD adds noise to every gradient, and a client of rank 1 has none beyond it."""
    algorithm, weights = server_of(rank=(1, 3))
    asked = Assignment(0, 0, 0, 0, weights, [torch.ones(3).double()] * 3, 0)
    job = ClientJob(0, 0, torch.arange(2), weights, asked.buffers, 0, 1)
    jobs = algorithm.jobs(job, asked, None)
    noise = [torch.ones_like(w) for w in weights]
    result = JobResult(noise, asked.buffers, 1, 0.0)
    delta, _, _ = algorithm.answer(jobs, [result], asked, None)
    sent = [w + d for w, d in zip(weights, delta, strict=True)]
    for places in algorithm.places:
        assert places.a is not None
        assert not places.b.of(sent)[:, 1:].any()
        assert not places.a.of(sent)[1:].any()
        assert places.b.of(sent)[:, 0].all()


# Refusals, and what goes with sums


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (FED_AVG(privacy="secure-aggregation"), "secure-aggregation shows the server only sums"),
        (FED_AVG(privacy=dure.UserLevel(1.0, 1.1)), "user-level privacy releases only noised"),
        (FED_AVG(aggregate="median"), "the rule median"),
        (FED_AVG(server_lr=0.5), "the server optimizer of fed-avg"),
        (dure.FedAdam(clients=4), "the server optimizer of fed-adam"),
        (dure.FedBuff(clients=4, buffer=2), "fed-buff combines updates of different times"),
        (dure.Scaffold(clients=4), "scaffold sends or keeps more"),
        (dure.Ditto(clients=4), "ditto sends or keeps more"),
    ],
    ids=str,
)
def test_products_of_single_clients_are_refused_by_name(strategy: Strategy, reason: str) -> None:
    with pytest.raises(ValueError, match=f"merge='stack'.*{reason}") as told:
        trained(adapted(), strategy)
    assert "\n" not in str(told.value)
    assert "freeze_a=True" in str(told.value)
    assert "merge='factors'" in str(told.value)


@pytest.mark.parametrize("settings", [{"freeze_a": True}, {"merge": "factors"}], ids=str)
@pytest.mark.parametrize("rank", [2, (1, 2)], ids=str)
def test_sums_take_a_frozen_a_and_factors(settings: dict[str, Any], rank: Any) -> None:
    secure = FED_AVG(privacy=dure.SecureAggregation(minimum=2))
    run = trained(adapted(rank=rank, **settings), secure)
    assert run.summary["steps"] == 2
    trained(adapted(rank=rank, **settings), FED_AVG(privacy=dure.UserLevel(1.0, 1.1)))


def test_algorithms_of_one_rank_refuse_several() -> None:
    with pytest.raises(ValueError, match=r"LoRA\(rank=\(1, 2\)\): scaffold .*: give one rank"):
        trained(adapted(rank=(1, 2), merge="factors"), dure.Scaffold(clients=4))
    assert trained(adapted(merge="factors"), dure.Scaffold(clients=4)).summary["steps"] == 2


def test_ranks_have_one_rank() -> None:
    with pytest.raises(ValueError, match="a rank for each client of a federation: give one rank"):
        dure.train(adapted(rank=(1, 2)), dure.SingleWorker(8), stop=dure.Stop(steps=1))


def test_factors_that_overflow_are_no_model() -> None:
    algorithm, weights = server_of(merge="svd")
    huge = [torch.full_like(w, 1e200) for w in weights]
    assert isinstance(algorithm, MergedRounds)
    with pytest.raises(TooFewUpdatesError, match="too large to multiply"):
        algorithm.step(weights, huge, [update_of(0, huge, 1)])


# Run folders


def test_a_run_goes_on_with_its_adapter(tmp_path: Any) -> None:
    """The folder has the adapter, and a resumed run is the whole run, bit for bit."""
    task = adapted(rank=(1, 2, 4))
    whole = trained(task, FED_AVG(), rounds=4)
    begun = dure.train(task, FED_AVG(), stop=TWO, out=tmp_path / "run", checkpoint_every=1, seed=0)
    assert begun.summary["steps"] == 2
    plain = replace(task, adapter=None)
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=4))
    assert same_bits(whole, resumed)
    read = dure.load_run(tmp_path / "run", task.new_model)
    assert same_bits(read, resumed)
    with pytest.raises(dure.errors.RunFolderError, match="cannot load"):
        dure.load_run(tmp_path / "run", plain.new_model)


def test_other_trained_parameters_take_their_mean() -> None:
    """With one client the merged run differs from the plain run in its factors alone."""
    alone = partial(dure.FedAvg, clients=1, batch_size=8)
    runs = [
        trained(adapted(train="bias", merge=merge), alone(), rounds=1)
        for merge in ("stack", "factors")
    ]
    one, other = (run.model.state_dict() for run in runs)
    drawn = seeded_model(adapted(train="bias"), 0).state_dict()
    for name in one:
        if "bias" in name:
            assert torch.equal(one[name], other[name])
            assert not torch.equal(one[name], drawn[name])
        elif "lora" not in name:
            assert torch.equal(one[name], drawn[name])


# Over a network


def test_sites_of_unlike_ranks_train_over_a_network(tmp_path: Path) -> None:
    """Each site makes the adapter itself, under the run's seed; only factors and masks travel."""
    adapter = dure.LoRA((1, 3), alpha=4.0)
    sites: list[Thread] = []

    def hears(event: dict[str, Any]) -> None:
        for number in range(2) if "serving" in event else ():
            task = small_task(train=examples(12, seed=10 + number), test=None, adapter=adapter)
            how = {"state": tmp_path / f"site {number}", "name": f"site {number}"}
            sites.append(Thread(target=dure.join, args=(event["serving"], task), kwargs=how))
            sites[-1].start()

    run = dure.serve(
        small_task(train=None, test=examples(20), adapter=adapter),
        dure.FedAvg(clients=2, batch_size=4),
        TWO,
        out=tmp_path / "run",
        port=0,
        access="open",
        on_progress=hears,
    )
    for site in sites:
        site.join()
    drawn = seeded_model(adapted(rank=(1, 3)), 0).state_dict()
    for name, value in run.model.state_dict().items():
        if "lora_B" in name:
            assert value.any()
        elif not name.endswith("lora_A.default.weight"):
            assert torch.equal(value, drawn[name])
    assert run.summary["steps"] == 2


def test_a_site_with_another_adapter_is_refused_by_name() -> None:
    """A client compares its task with the server's before it sends anything."""
    ours, theirs = (
        trains_of(task, seeded_model(task, 0)) for task in (adapted(), adapted(alpha=5.0))
    )
    (told,) = differences(theirs, ours)
    assert "adapter is " in told
    assert "lora:2:.*:5" in told
