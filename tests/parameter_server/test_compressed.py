"""Compressed pushes: the rule, what is left out and comes later, the bytes, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from histories import History, careless
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.compression import (
    QSGD,
    Cast,
    Compression,
    NoCompression,
    OneBit,
    PowerSGD,
    Sign,
    TopK,
)
from dure.contracts.fresh_model import seeded_model
from dure.data.batches import Batches
from dure.parameter_server.compressed import PushCoding, pieces_of
from dure.parameter_server.keys import KeyRange
from dure.parameter_server.layout import ShardLayout, ShardLocation
from dure.parameter_server.members import WorkerMembers
from dure.parameter_server.messages import Push, server
from dure.parameter_server.optimizer import OptimizerRecipe
from dure.parameter_server.shard import Shard, Terms
from dure.parameter_server.worker import WorkerProtocol
from small import check_all, largest_difference, same_bits, small_task

REMEMBERING: list[Compression] = [TopK(0.2), OneBit(), Sign()]
CODECS: list[Compression] = [*REMEMBERING, QSGD(), Cast()]
ADAM = partial(torch.optim.Adam, lr=0.01)


def simulated(task: dure.Task | None = None, rounds: int = 2, **fields: Any) -> dure.Run:
    strategy = dure.ParameterServer(**{"batch_size": 8, "servers": 2, "workers": 2, **fields})
    return dure.train(task or small_task(), strategy, dure.Simulated(), dure.Stop(rounds=rounds))


# The rule


def largest(vector: Tensor, columns: Tensor) -> Tensor:
    """A fifth of the numbers."""
    k = math.ceil(0.2 * len(vector))
    kept = torch.zeros_like(vector)
    places = vector.abs().topk(k).indices
    kept[places] = vector[places]
    return kept


def means(vector: Tensor, columns: Tensor) -> Tensor:
    """The mean of a column's numbers that are at least 0, or that of the others."""
    out = torch.empty_like(vector)
    for column in columns.unique():
        for chosen in (vector >= 0, vector < 0):
            there = (columns == column) & chosen
            if there.any():
                out[there] = vector[there].mean()
    return out


def columns_of(model: nn.Module) -> Tensor:
    """For each key the number of its column: a row of a weight, or a bias."""
    numbers: list[Tensor] = []
    for parameter in model.parameters():
        rows = len(parameter) if parameter.dim() > 1 else 1
        first = int(numbers[-1][-1]) + 1 if numbers else 0
        own = torch.arange(first, first + rows).repeat_interleave(parameter.numel() // rows)
        numbers.append(own)
    return torch.cat(numbers)


def by_hand(sends: Callable[[Tensor, Tensor], Tensor], workers: int, servers: int) -> Tensor:
    """The weights after ten steps."""
    task = small_task()
    model = seeded_model(task, 0)
    shards = dure.ParameterServer(servers=servers, workers=workers).plan.shards(model)
    assert len(shards) == servers
    columns = columns_of(model)
    batches = Batches(len(task.train), 8, 0)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    errors = torch.zeros(workers, len(weights), dtype=torch.float64)
    for step in range(10):
        nn.utils.vector_to_parameters(weights, model.parameters())
        batch = batches.at(step)
        total = torch.zeros_like(weights)
        for worker, part in enumerate(batch.tensor_split(workers)):
            gradient = torch.zeros_like(weights)
            if len(part):
                inputs, targets = task.train.batch(part)
                loss = F.cross_entropy(model(inputs), targets)
                found = torch.autograd.grad(loss, list(model.parameters()))
                gradient = torch.cat([each.reshape(-1) for each in found])
            corrected = len(part) / len(batch) * gradient + errors[worker]
            pieces = [slice(keys.start, keys.stop) for keys in shards]
            sent = torch.cat([sends(corrected[piece], columns[piece]) for piece in pieces])
            errors[worker] = corrected - sent
            total += sent
        weights = weights - 0.3 * total
    return weights


@pytest.mark.parametrize(("compression", "sends"), [(TopK(0.2), largest), (OneBit(), means)])
@pytest.mark.parametrize(("workers", "servers"), [(1, 3), (3, 4)])
def test_it_keeps_to_the_rule(
    compression: Compression, sends: Callable[..., Tensor], workers: int, servers: int
) -> None:
    run = simulated(period=5, compression=compression, workers=workers, servers=servers)
    weights = torch.cat([each.reshape(-1) for each in run.model.state_dict().values()])
    assert float((weights - by_hand(sends, workers, servers)).abs().max()) < 1e-12


def some(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Counts the examples of two classes, of which batches have more or fewer."""
    counts = targets > 0
    return F.cross_entropy(outputs[counts], targets[counts], reduction="sum"), counts.sum()


def test_synchronous_workers_walk_the_path_of_data_parallel_with_that_compression() -> None:
    task = small_task(loss=some)
    fields: dict[str, Any] = {"batch_size": 8, "compression": TopK(0.1)}
    ranks = dure.DataParallel(bucket_bytes=1 << 20, **fields)
    expected = dure.train(task, ranks, dure.Processes(2), dure.Stop(epochs=2))
    run = simulated(task, servers=1, **fields)
    assert largest_difference(run, expected) < 1e-12
    assert largest_difference(run, simulated(task, servers=1)) > 1e-3


@pytest.mark.parametrize("staleness", [0, 1, None])
def test_without_compression_and_with_one_that_leaves_nothing_out_it_is_as_before(
    staleness: int | None,
) -> None:
    run = simulated(staleness=staleness)
    assert same_bits(run, simulated(staleness=staleness, compression=NoCompression()))
    whole = simulated(staleness=staleness, compression=TopK(1.0))
    assert largest_difference(run, whole) < 1e-12
    one = {"workers": 1, "staleness": staleness}
    assert same_bits(simulated(**one), simulated(**one, compression=TopK(1.0)))


def test_numbers_of_32_bits_are_what_casts_of_them_are_up_to_rounding() -> None:
    def gradient(compression: Compression) -> Tensor:
        vector = torch.linspace(-3, 5, 50)
        coding = PushCoding(compression, [nn.Parameter(torch.empty(50))])
        keys = KeyRange(0, 0, 50)
        message = coding.compressors(0, 0, [keys])[0].encode(vector, 0.25, 0)
        return coding.sum_of(keys, [message])

    expected = torch.linspace(-3, 5, 50) * 0.25
    assert torch.equal(gradient(TopK(1.0)), expected)
    assert torch.equal(gradient(Cast("float16")), expected.half().float())


@given(st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_a_range_is_cut_between_rows_and_else_within_one(
    extents: list[list[int]], data: st.DataObject
) -> None:
    shapes = [torch.Size(each) for each in extents]
    total = sum(shape.numel() for shape in shapes)
    cut = data.draw(st.integers(0, total))
    columns = columns_of(nn.ParameterList([torch.empty(shape) for shape in shapes]))
    for start, stop in ((0, cut), (cut, total)):
        first = start
        for piece in pieces_of(shapes, start, stop):
            last = first + piece.numel()
            if len(piece) > 1:
                rows = columns[first:last].view(piece[0], -1)
                assert len(rows.unique()) == piece[0] == len(rows.unique(dim=0))
            elif last - first > 1:
                assert len(columns[first:last].unique()) == 1
            first = last
        assert first == stop


# What is left out, and comes later


@given(
    codec=st.sampled_from(REMEMBERING),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    weights=st.lists(st.sampled_from([0.0, 0.125, 0.3, 1.0]), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_what_was_sent_and_what_was_not_are_all_gradients(
    codec: Compression, dtype: torch.dtype, weights: list[float], seed: int
) -> None:
    parameter = nn.Parameter(torch.empty(5, 7, dtype=dtype))
    keys = KeyRange(0, 3, 30)
    (compressor,) = PushCoding(codec, [parameter]).compressors(0, 0, [keys])
    bucket = compressor.codec.bucket
    drawn = torch.Generator().manual_seed(seed)
    expected, sent = bucket.zeros(), bucket.zeros()
    for clock, weight in enumerate(weights):
        gradient = torch.randn(27, generator=drawn).to(dtype)
        expected += gradient.to(bucket.work) * weight
        compressor.codec.add(compressor.encode(gradient, weight, clock), sent, 1)
    assert compressor.unsent is not None
    assert compressor.unsent.dtype == bucket.work
    atol = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.allclose(sent + compressor.unsent, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("codec", REMEMBERING)
def test_a_gradient_that_is_not_finite_leaves_no_trace_in_what_was_left_out(
    codec: Compression,
) -> None:
    coding = PushCoding(codec, [nn.Parameter(torch.empty(20))])
    (compressor,) = coding.compressors(0, 0, [KeyRange(0, 0, 20)])
    compressor.encode(torch.linspace(-1, 2, 20), 1.0, 0)
    assert compressor.unsent is not None
    before = compressor.unsent.clone()
    message = compressor.encode(torch.full((20,), math.nan), 1.0, 1)
    assert not coding.sum_of(KeyRange(0, 0, 20), [message]).isfinite().any() or codec == TopK(0.2)
    assert torch.equal(compressor.unsent, before)


def test_rounding_at_random_is_another_for_each_worker_shard_and_push() -> None:
    coding = PushCoding(QSGD(), [nn.Parameter(torch.empty(40))])
    shards = [KeyRange(0, 0, 20), KeyRange(0, 20, 40)]
    gradient = torch.linspace(-1, 2, 20)

    def messages() -> list[Tensor]:
        return [
            compressor.encode(gradient, 1.0, clock)
            for worker in range(2)
            for compressor in coding.compressors(5, worker, shards)
            for clock in range(2)
        ]

    first, again = messages(), messages()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert len({bytes(one.numpy()) for one in first}) == 8


# Messages that get lost, come twice or late; deaths


@given(codec=st.sampled_from(CODECS), seed=st.integers(0, 10_000), replicas=st.integers(0, 1))
@settings(max_examples=15, deadline=None)
def test_lost_and_repeated_messages_change_no_bit(
    codec: Compression, seed: int, replicas: int
) -> None:
    kept = History(compression=codec, replicas=replicas).run()
    history = History(compression=codec, replicas=replicas, fate=careless(Random(seed))).run()
    assert torch.equal(history.weights, kept.weights)
    for who, one in history.workers.items():
        own = kept.workers[who].own
        assert all(map(torch.equal, one.own.unsent, own.unsent))


@given(
    codec=st.sampled_from(REMEMBERING),
    staleness=st.sampled_from([0, 1, None]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=20, deadline=None)
def test_the_servers_have_all_gradients_but_for_what_workers_have_not_sent(
    codec: Compression, staleness: int | None, seed: int
) -> None:
    history = History(compression=codec, staleness=staleness, fate=careless(Random(seed))).run()
    unsent = sum(torch.cat(one.own.unsent) for one in history.workers.values())
    moved = (1 - history.weights) / 0.1
    assert torch.allclose(moved, history.weighted - unsent, rtol=0, atol=1e-12)


@pytest.mark.parametrize("codec", REMEMBERING)
def test_a_worker_sees_its_own_pushes_as_the_servers_have_them(codec: Compression) -> None:
    fields: dict[str, Any] = {"groups": ((0,),), "staleness": None, "compression": codec}
    late = History(fate=careless(Random(3)), **fields).run()
    assert torch.allclose(late.weights, History(**fields).run().weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("at", [0.5, 3.1, 6.7])
def test_a_server_that_dies_and_has_a_copy_changes_no_bit(at: float) -> None:
    whole = History(compression=TopK(0.3), replicas=1, servers=3).run()
    history = History(compression=TopK(0.3), replicas=1, servers=3)
    history.until(at)
    history.network.kill(server(1))
    assert torch.equal(history.run().weights, whole.weights)


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_others_go_on_when_a_worker_dies_with_what_it_had_not_sent(staleness: int) -> None:
    history = History(compression=OneBit(), staleness=staleness)
    history.until(3.2)
    history.network.kill("worker 1")
    history.run()
    assert history.weights.isfinite().all()
    least = [shard.contains(0, shard.keys.start) for shard in history.owners]
    assert least == [10] * len(history.owners)


def test_the_same_bytes_are_said_again() -> None:
    coding = PushCoding(TopK(0.2), [nn.Parameter(torch.empty(10))])
    layout = ShardLayout(0, (ShardLocation(0, None),), (WorkerMembers.of([0]),))
    side = WorkerProtocol(
        0, layout, [(0, 0, 10)], compressors=coding.compressors(0, 0, [KeyRange(0, 0, 10)])
    )
    [(_, first)] = side.push([torch.arange(10.0)], 1.0, 0.0)
    [unsent] = side.unsent
    [again] = [one for _, one in side.tick(5.0) if isinstance(one, Push)]
    assert isinstance(first, Push)
    assert torch.equal(again.gradient, first.gradient)
    assert torch.equal(side.unsent[0], unsent)


def test_a_push_that_is_no_message_of_the_codec_is_refused() -> None:
    start = nn.Parameter(torch.ones(10))
    recipe = OptimizerRecipe.of(torch.optim.SGD([start], lr=0.1), [[start]])
    coding = PushCoding(TopK(0.2), [start])
    layout = ShardLayout(0, (ShardLocation(0, None),), (WorkerMembers.of([0]),))

    def push(message: Tensor, encoded: int | None, coding: PushCoding | None = coding) -> None:
        shard = Shard(0, KeyRange(0, 0, 10), torch.ones(10), Terms(recipe, coding=coding))
        one = Push(0, 0, 0, 0, 0, 0, message, weight=1.0, version=0, encoded=encoded)
        shard.push(one, layout)

    push(coding.compressors(0, 0, [KeyRange(0, 0, 10)])[0].encode(torch.ones(10), 1.0, 0), 10)
    with pytest.raises(
        ValueError, match="does not use the same compression as the run of the shard"
    ):
        push(torch.ones(10), None)
    with pytest.raises(
        ValueError, match="does not use the same compression as the run of the shard"
    ):
        push(torch.zeros(16, dtype=torch.uint8), 10, None)
    with pytest.raises(ValueError, match=r"has to have 16 bytes of top-k:0\.2, not"):
        push(torch.zeros(15, dtype=torch.uint8), 10)
    with pytest.raises(ValueError, match="places are not ascending"):
        push(torch.zeros(16, dtype=torch.uint8), 10)


# Bytes


def nbytes(compression: Compression, columns: Tensor) -> int:
    """Of a message about keys with these columns, in float64, by the page on compression."""
    n = len(columns)
    if isinstance(compression, TopK):
        return math.ceil(compression.ratio * n) * (8 + 4)
    if isinstance(compression, OneBit):
        lengths = columns.unique(return_counts=True)[1].tolist()
        return sum(math.ceil(length / 8) + 2 * 8 for length in lengths)
    if isinstance(compression, QSGD):
        return math.ceil(n * 4 / 8) + 8 * math.ceil(n / 512)
    return 2 * n


@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("compression", [TopK(0.05), OneBit(), QSGD(), Cast()])
def test_it_sends_the_bytes_of_the_formula(compression: Compression, staleness: int | None) -> None:
    run = simulated(servers=3, compression=compression, staleness=staleness)
    columns = columns_of(run.model)
    facts = run.summary["facts"][0]["parameter_server"]
    each = [nbytes(compression, columns[start:stop]) for _, start, stop in facts["shards"]]
    assert facts["push_bytes"] == each
    workers = [line for line in run.summary["per_worker"] if line["name"].startswith("worker")]
    assert sum(line["bytes_sent"] for line in workers) == 2 * 6 * 2 * sum(each)
    # Weights come back as they are.
    assert sum(line["bytes_received"] for line in workers) == 2 * 6 * 2 * 8 * 215
    servers = [line for line in run.summary["per_worker"] if line["name"].startswith("server")]
    assert [line["bytes_received"] for line in servers] == [2 * 6 * 2 * size for size in each]


def test_a_replica_sends_the_bytes_of_the_formula_for_each_push() -> None:
    strategy = dure.Downpour(replicas=1, servers=2, batch_size=8, push_every=3, compression=Sign())
    run = dure.train(small_task(), strategy, dure.Simulated(), dure.Stop(rounds=2))
    # Three weights with their biases: 108, 107 keys a server, the second weight in two.
    each = sum(run.summary["facts"][0]["parameter_server"]["push_bytes"])
    assert run.summary["per_worker"][-1]["bytes_sent"] == 2 * 3 * each
    assert run.summary["per_worker"][-1]["bytes_received"] == 2 * 6 * 8 * 215


# Runs that are interrupted


@pytest.mark.parametrize(
    "strategy",
    [
        dure.ParameterServer(2, 3, batch_size=9, compression=TopK(0.1)),
        dure.ParameterServer(2, 3, batch_size=9, staleness=None, compression=QSGD()),
        dure.ParameterServer(2, 3, batch_size=9, staleness=2, compression=OneBit()),
        dure.Downpour(3, servers=2, batch_size=3, push_every=2, compression=Sign()),
    ],
    ids=lambda strategy: strategy.label,
)
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(
    strategy: dure.Strategy, tmp_path: Path
) -> None:
    task = small_task(optimizer=ADAM)
    whole = dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=3))
    dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=1), out=tmp_path / "run")
    again = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=3))
    assert same_bits(whole, again)


# What is refused


class Ranked(Compression):
    name = "ranked"


@pytest.mark.parametrize("compression", [PowerSGD(2), Ranked()])
@pytest.mark.parametrize("system", [dure.ParameterServer, dure.Downpour])
def test_what_only_ranks_together_can_compress_is_refused_by_name(
    system: Any, compression: Compression
) -> None:
    with pytest.raises(
        ValueError, match=f"compression is {compression}, which cannot encode a push"
    ):
        check_all(system(compression=compression), small_task(), None)


def with_table() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(24, 3))


def test_tables_are_refused_by_name() -> None:
    task = small_task(model=with_table)
    with pytest.raises(ValueError, match=r"compression is sign, but 0\.weight is sparse"):
        check_all(dure.ParameterServer(compression=Sign()), task, None)
    with pytest.raises(ValueError, match=r"0\.weight is a sparse embedding"):
        check_all(dure.Downpour(compression=Sign()), task, None)
