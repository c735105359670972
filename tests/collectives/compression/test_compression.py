"""What all compressions promise: same bits on all ranks, exact bytes, nothing lost, nothing
swallowed, resumable."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import Measured, bits, measured, on_ranks
from small_buckets import ALL, REMEMBERING, SHAPES, Shape, bucket, error_of, joined, numbers, sent
from torch import Tensor

from dure.cli.flags import parse_flags
from dure.collectives import Group
from dure.collectives.compression import (
    COMPRESSIONS,
    Cast,
    Compression,
    NoCompression,
    OneBit,
    PowerSGD,
    TopK,
    parse,
)
from dure.collectives.compression.gathered import carrier
from dure.contracts.world import RankContext
from dure.record.checkpoint import tree_from_bytes, tree_to_bytes
from dure.run.registry import _plain, _typed

CALLS = 3


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(
    ranks=st.integers(1, 4),
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    algorithm=st.sampled_from(["one_shot", "ring", "native", "tree"]),
)
def test_all_ranks_hold_the_same_bits_in_every_run_after_the_bytes_of_the_formula(
    ranks: int, shapes: list[Shape], dtype: torch.dtype, algorithm: Any
) -> None:
    def program(context: RankContext) -> list[list[tuple[Measured, bytes]]]:
        rank, group = context.group.rank, context.group

        def run(compression: Compression) -> list[Measured]:
            compressor = compression.compressor(bucket(0, 0, shapes, dtype), seed=5)
            results = []
            for call in range(CALLS):
                tensors = bucket(rank, call, shapes, dtype)
                call_it = measured(
                    group, lambda tensors=tensors: compressor.all_reduce(tensors, group, algorithm)
                )
                results.append(Measured(bits(joined(tensors)), call_it.sent, call_it.messages))
            return results

        pairs = [(run(compression), run(compression)) for compression in ALL]
        return [[(one, two.value) for one, two in zip(*pair, strict=True)] for pair in pairs]

    per_rank = on_ranks(ranks, program)
    like = bucket(0, 0, shapes, dtype)
    for position, compression in enumerate(ALL):
        for call in range(CALLS):
            for rank in range(ranks):
                (value, nbytes, _), again = per_rank[rank][position][call]
                assert value == per_rank[0][position][call][0].value == again, compression
                assert nbytes == compression.bytes_sent(like, ranks, rank, algorithm, call), (
                    compression
                )


@pytest.mark.parametrize("compression", REMEMBERING, ids=str)
def test_what_was_not_sent_is_in_the_ranks_errors(compression: Compression) -> None:
    def program(context: RankContext) -> tuple[Tensor, Tensor, Tensor]:
        compressor = compression.compressor(bucket(0, 0), seed=1)
        given = arrived = torch.zeros(())
        for call in range(5):
            mine = bucket(context.group.rank, call)
            given = given + joined(mine)
            arrived = arrived + sent(compressor, mine, context.group)
        return given, arrived, error_of(compressor)

    per_rank = on_ranks(3, program)
    given = sum(given for given, _, _ in per_rank)
    errors = sum(error for _, _, error in per_rank)
    assert float((given - per_rank[0][1] - errors).abs().max()) < 1e-13


@pytest.mark.parametrize("compression", REMEMBERING, ids=str)
def test_on_one_rank_what_was_given_less_what_was_sent_is_the_error(
    compression: Compression,
) -> None:
    compressor = compression.compressor(bucket(0, 0), seed=1)
    calls = [bucket(0, call) for call in range(20)]
    difference = sum(joined(call) for call in calls) - sum(sent(compressor, call) for call in calls)
    assert float((difference - error_of(compressor)).abs().max()) < 1e-14 * 20
    assert float(error_of(compressor).abs().max()) > 0


@pytest.mark.parametrize("compression", ALL, ids=str)
def test_a_restored_compressor_goes_on_with_the_same_bits(compression: Compression) -> None:
    calls = [bucket(0, call, dtype=torch.float32) for call in range(5)]
    compressor = compression.compressor(calls[0], seed=2)
    for call in calls[:3]:
        sent(compressor, call)
    written = tree_to_bytes(compressor.state())
    expected = [sent(compressor, call) for call in calls[3:]]
    other = compression.compressor(calls[0], seed=2)
    sent(other, calls[4])
    other.restore(tree_from_bytes(written))
    assert all(
        torch.equal(sent(other, call), one) for call, one in zip(calls[3:], expected, strict=True)
    )


@pytest.mark.parametrize("compression", REMEMBERING, ids=str)
def test_a_state_of_other_tensors_is_refused(compression: Compression) -> None:
    state = compression.compressor([torch.ones(4, 4)], 0).state()
    with pytest.raises(
        ValueError, match="this state does not belong to a compressor of 12 numbers"
    ):
        compression.compressor([torch.ones(4, 3)], 0).restore(state)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_on_one_rank_arrives_on_all_and_leaves_the_errors_as_they_were(
    bad: float,
) -> None:
    def program(context: RankContext) -> list[tuple[bool, bool]]:
        answers = []
        for compression in ALL:
            compressor = compression.compressor(bucket(0, 0), seed=1)
            sent(compressor, bucket(context.group.rank, 0), context.group)
            before = compressor.state()
            tensors = bucket(context.group.rank, 1)
            if context.group.rank == 1:
                tensors[4][2, 3] = bad
            swallowed = bool(sent(compressor, tensors, context.group).isfinite().all())
            after = compressor.state()
            before.pop("calls", None), after.pop("calls", None)
            kept = tree_to_bytes(before) == tree_to_bytes(after)
            answers.append((swallowed, kept))
        return answers

    for answers in on_ranks(2, program):
        assert answers == [(False, True)] * len(ALL)


@pytest.mark.parametrize("compression", [c for c in ALL if c.name != "power-sgd"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_message_decodes_to_what_a_lone_rank_sums(
    compression: Compression, dtype: torch.dtype
) -> None:
    tensors = bucket(3, 1, dtype=dtype)
    payload = compression.encode(tensors, 9, 0, 0)
    decoded = compression.decode(payload, tensors)
    assert payload.dtype == torch.uint8
    assert payload.shape == (compression.payload_bytes(tensors),)
    assert [one.shape for one in decoded] == [one.shape for one in tensors]
    assert torch.equal(joined(decoded), sent(compression.compressor(tensors, 9), tensors))


@pytest.mark.parametrize("compression", [c for c in ALL if c.name != "power-sgd"], ids=str)
def test_a_message_of_another_length_is_refused(compression: Compression) -> None:
    tensors = bucket(0, 0)
    with pytest.raises(ValueError, match="bytes were expected for these shapes"):
        compression.decode(compression.encode(tensors)[1:], tensors)


@pytest.mark.parametrize("compression", ALL, ids=str)
def test_it_is_the_same_whether_tensors_lie_together_apart_or_transposed(
    compression: Compression,
) -> None:
    tensors = bucket(0, 0, dtype=torch.float32)
    flat = joined(tensors)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    together = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
    strided = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in tensors]
    results = []
    for each in (tensors, together, strided):
        compression.compressor(each, 4).all_reduce(each, Group())
        results.append(joined(each))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[0], flat)


def test_auto_gathers_by_the_backend_where_the_backend_is_made_for_it() -> None:
    def program(context: RankContext) -> tuple[list[str], bool]:
        tensors = bucket(context.group.rank, 0)
        groups = [context.group, Group(dist.new_group(backend="dure"))]
        carriers = [carrier("auto", group, torch.empty(9, dtype=torch.uint8)) for group in groups]
        sums = []
        for group in groups:
            copies = [tensor.clone() for tensor in tensors]
            OneBit().compressor(tensors, 0).all_reduce(copies, group, "auto")
            sums.append(joined(copies))
        return carriers, torch.equal(*sums)

    assert on_ranks(2, program) == [(["one_shot", "native"], True)] * 2


def test_a_group_of_torch_will_do_and_a_call_may_run_beside_the_program() -> None:
    def program(context: RankContext) -> list[Tensor]:
        results = []
        for compression in ALL:
            tensors = bucket(context.group.rank, 0)
            results.append(sent(compression.compressor(tensors, 3), tensors, dist.group.WORLD))
            compressor = compression.compressor(tensors, 3)
            work = partial(compressor.all_reduce, tensors, context.group)
            context.group.perform(str(compression), work, tensors[0], async_op=True).wait()
            results.append(joined(tensors))
        return results

    first, second = on_ranks(2, program)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(first[::2], first[1::2], strict=True))


FEATURES, TARGETS, ROWS = 5, 4, 12


def trained(compression: Compression, group: Group) -> Tensor:
    """The weights of a linear model after 6 steps of gradient descent whose gradients come through
    the compression."""
    inputs, targets = numbers((ROWS, FEATURES), 1), numbers((ROWS, TARGETS), 2)
    weights = numbers((TARGETS, FEATURES), 3), numbers((TARGETS,), 4)
    compressor = compression.compressor(weights, seed=0)
    mine = torch.arange(ROWS).tensor_split(group.size)[group.rank]
    for _ in range(6):
        error = inputs[mine] @ weights[0].t() + weights[1] - targets[mine]
        gradients = [error.t() @ inputs[mine] / ROWS, error.sum(0) / ROWS]
        compressor.all_reduce(gradients, group)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.sub_(gradient, alpha=0.3)
    return joined(weights)


LOSSLESS: list[Compression] = [NoCompression(), TopK(1.0), PowerSGD(4, 0), PowerSGD(99, 0, 2)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_lost_means_the_path_of_one_worker(ranks: int) -> None:
    per_rank = on_ranks(
        ranks, lambda context: [trained(compression, context.group) for compression in LOSSLESS]
    )
    alone = trained(NoCompression(), Group())
    for results in per_rank:
        assert all(float((result - alone).abs().max()) < 1e-12 for result in results)


@given(
    st.sampled_from(ALL)
    | st.builds(TopK, st.floats(1e-6, 1.0))
    | st.builds(PowerSGD, st.integers(1, 9))
)
def test_the_text_of_a_compression_names_it(compression: Compression) -> None:
    assert parse(str(compression)) == compression
    assert _typed(_plain(compression), Compression) == compression


@pytest.mark.parametrize(
    ("text", "compression"),
    [
        ("none", NoCompression()),
        ("cast:float16", Cast("float16")),
        ("float16", Cast("float16")),
        (" bfloat16", Cast("bfloat16")),
        ("top-k:0.5", TopK(0.5)),
        ("power-sgd:4:0:100", PowerSGD(4, 0, 100)),
    ],
)
def test_a_text_names_a_compression(text: str, compression: Compression) -> None:
    assert parse(text) == compression


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("topk", "there is no compression 'topk', did you mean 'top-k'?"),
        ("top-k:a", "the compression 'top-k:a': 'a' is not a number; write top-k:RATIO"),
        ("top-k:0", "top-k: ratio is 0.0, but it has to be in (0, 1]"),
        ("top-k:nan", "top-k: ratio is nan, but it has to be in (0, 1]"),
        ("none:1", "has too many values: write none"),
        ("cast:float8", "cast: the dtype has to be bfloat16 or float16, not 'float8'"),
        ("qsgd:0", "qsgd: levels is 0, but it has to be in [1, 32767]"),
        ("qsgd:1:12", "qsgd: the bucket has to be a positive multiple of 8, not 12"),
        ("power-sgd:0", "power-sgd: rank is 0, but it has to be 1 or more"),
        ("power-sgd:1.5", "'1.5' is not an integer"),
        ("power-sgd:1:-1", "power-sgd: min_compression is -1.0, but it has to be 0 or more"),
        ("power-sgd:1:0:-1", "power-sgd: start_after is -1, but it has to be 0 or more"),
    ],
)
def test_a_text_that_names_none_is_refused_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        parse(text)
    assert complaint in str(caught.value)


def test_every_compression_has_its_defaults() -> None:
    for name, kind in COMPRESSIONS.items():
        assert parse(name) == kind()


@dataclass(frozen=True)
class Options:
    """Of a system.

    Args:
        compression: how gradients travel.
    """

    compression: Compression = field(default_factory=NoCompression)


def test_a_field_is_a_flag() -> None:
    assert parse_flags("dure", {"options": Options}, [])["options"] == Options()
    given = parse_flags("dure", {"options": Options}, ["--compression", "power-sgd:3"])
    assert given["options"] == Options(PowerSGD(3))
    with pytest.raises(ValueError, match="there is no compression 'gzip'"):
        parse_flags("dure", {"options": Options}, ["--compression", "gzip"])


@pytest.mark.parametrize(
    ("like", "complaint"),
    [
        ([], "a bucket needs at least one tensor"),
        (
            [torch.ones(2, dtype=torch.int32)],
            r"only floating-point numbers are compressed, not torch\.int32",
        ),
        ([torch.ones(2), torch.ones(2).double()], "a bucket has one dtype and device"),
        ([torch.ones(1).expand(4)], "an expanded tensor cannot hold the result"),
    ],
)
@pytest.mark.parametrize("compression", [NoCompression(), TopK(), PowerSGD()], ids=str)
def test_what_cannot_be_a_bucket_is_refused(
    compression: Compression, like: list[Tensor], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        compression.compressor(like, 0)


@pytest.mark.parametrize("compression", ALL, ids=str)
def test_other_tensors_than_it_was_made_for_are_refused(compression: Compression) -> None:
    compressor = compression.compressor(bucket(0, 0), 0)
    with pytest.raises(ValueError, match="the compressor was made for shapes"):
        compressor.all_reduce(bucket(0, 0, SHAPES[:2]), Group())
    with pytest.raises(
        ValueError, match=r"the compressor was made for torch\.float64 on cpu, not torch\.float32"
    ):
        compressor.all_reduce(bucket(0, 0, dtype=torch.float32), Group())


@pytest.mark.parametrize("compression", [NoCompression(), Cast(), PowerSGD()], ids=str)
def test_the_bytes_of_a_choice_not_yet_made_are_not_known(compression: Compression) -> None:
    with pytest.raises(ValueError, match="what 'auto' sends depends on its choice"):
        compression.bytes_sent([torch.ones(9, 9)], 2, 0, "auto")
