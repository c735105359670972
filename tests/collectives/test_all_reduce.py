"""Every all-reduce: the result, the same bits on every rank, and exactly the bytes and messages of
its formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import Measured, bits, measured, on_ranks, tensor_of, values
from torch import Tensor

from dure.collectives import Group, all_reduce
from dure.collectives.algorithms.table import ALL_REDUCES
from dure.collectives.all_reduce import ALGORITHMS, Algorithm
from dure.contracts.world import RankContext

ROUNDED_ONCE = ("master", "one_shot")
INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]


class Case(NamedTuple):
    algorithm: Algorithm
    n: int
    dtype: torch.dtype
    op: str


LENGTHS = st.integers(0, 40) | st.integers(1_000, 3_000)
OWN = st.sampled_from([name for name in ALL_REDUCES if name != "native"])
CASES = (
    st.builds(
        Case,
        OWN,
        LENGTHS,
        st.sampled_from(FLOATS),
        st.sampled_from(["sum", "avg", "min", "max", "product"]),
    )
    | st.builds(
        Case,
        OWN,
        LENGTHS,
        st.sampled_from(INTEGERS),
        st.sampled_from(["sum", "min", "max", "product"]),
    )
    | st.builds(
        Case, OWN, LENGTHS, st.just(torch.bool), st.sampled_from(["sum", "min", "max", "product"])
    )
    | st.builds(
        Case, OWN, LENGTHS, st.sampled_from(COMPLEX), st.sampled_from(["sum", "avg", "product"])
    )
    | st.builds(
        Case,
        st.just("native"),
        LENGTHS,
        st.sampled_from([torch.float32, torch.float64, torch.int32, torch.int64]),
        st.sampled_from(["sum", "min", "max", "product"]),
    )
    | st.builds(Case, st.just("native"), LENGTHS, st.just(torch.float64), st.just("avg"))
    | st.builds(
        Case, st.just("native"), LENGTHS, st.just(torch.bool), st.sampled_from(["sum", "min"])
    )
)


def reduce_many(cases: list[Case]) -> Callable[[RankContext], list[tuple[Measured, bytes]]]:
    """Every case measured, and done once more."""

    def program(context: RankContext) -> list[tuple[Measured, bytes]]:
        def once(case: Case) -> bytes:
            tensor = values(case.n, context.group.rank, case.dtype)
            return bits(all_reduce(tensor, context.group, case.algorithm, case.op))

        return [(measured(context.group, partial(once, case)), once(case)) for case in cases]

    return program


def exactly(case: Case, ranks: int) -> Tensor:
    """The result in the dtype of integers, or in double precision."""
    wide = {torch.uint64: torch.int64}.get(case.dtype, case.dtype)
    wide = (
        torch.complex128
        if case.dtype.is_complex
        else torch.float64
        if case.dtype.is_floating_point
        else wide
    )
    parts = [values(case.n, rank, case.dtype).to(wide) for rank in range(ranks)]
    if case.dtype in (torch.uint16, torch.uint32):
        parts = [part.to(torch.int64) for part in parts]
    stacked = torch.stack(parts)
    if case.dtype == torch.bool:
        return stacked.any(0) if case.op in ("sum", "max") else stacked.all(0)
    if case.op in ("min", "max"):
        return stacked.amin(0) if case.op == "min" else stacked.amax(0)
    if case.op == "product":
        return stacked.prod(0, dtype=stacked.dtype).to(
            case.dtype if not case.dtype.is_floating_point else wide
        )
    total = stacked.sum(0, dtype=stacked.dtype)
    return total / ranks if case.op == "avg" else total


def bound(case: Case, ranks: int, exact: Tensor) -> Tensor:
    """How far a result in floating point may lie from the exact one."""
    half = case.dtype in (torch.float16, torch.bfloat16)
    unit = torch.finfo(case.dtype).eps / 2
    parts = torch.stack([values(case.n, rank, case.dtype) for rank in range(ranks)])
    size = parts.to(torch.complex128 if case.dtype.is_complex else torch.float64).abs()
    smallest = ranks * torch.finfo(case.dtype).tiny * unit * 2
    if case.op in ("min", "max"):
        return torch.zeros(case.n, dtype=torch.float64)
    if case.op == "product":
        return 4 * ranks * unit * size.prod(0) + smallest * (1 + size.amax(0)) ** ranks
    scale = size.sum(0) / (ranks if case.op == "avg" else 1)
    if (
        half
        and case.algorithm in ROUNDED_ONCE
        and not (case.op == "avg" and case.dtype == torch.float16)
    ):
        return unit * exact.abs() + (ranks + 1) * 2**-24 * scale * (1 + unit) + smallest
    return (ranks + 1) * unit * scale * (1 + 2 * ranks * unit) + smallest


def check(case: Case, ranks: int, result: Tensor) -> None:
    exact = exactly(case, ranks)
    if case.dtype.is_floating_point or case.dtype.is_complex:
        assert result.dtype == case.dtype
        error = (result.to(exact.dtype) - exact).abs()
        assert bool((error <= bound(case, ranks, exact)).all()), case
    else:
        assert bits(result) == bits(exact.to(case.dtype)), case


@settings(max_examples=7, deadline=None, suppress_health_check=list(HealthCheck))
@given(ranks=st.integers(1, 8), cases=st.lists(CASES, min_size=6, max_size=16))
def test_the_result_on_every_rank_with_the_bytes_and_messages_of_the_formula(
    ranks: int, cases: list[Case]
) -> None:
    per_rank = on_ranks(ranks, reduce_many(cases))
    for position, case in enumerate(cases):
        check(case, ranks, tensor_of(per_rank[0][position][0].value, case.dtype))
        module = ALL_REDUCES[case.algorithm]
        for rank in range(ranks):
            (value, sent, messages), again = per_rank[rank][position]
            assert value == per_rank[0][position][0].value, "all ranks hold the same bits"
            assert again == value, "and every run gives them"
            assert sent == module.elements_sent(case.n, ranks, rank) * case.dtype.itemsize, case
            assert messages == module.messages_sent(case.n, ranks, rank), case


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_algorithm_sums_integers_alike_on_every_number_of_ranks(ranks: int) -> None:
    def program(context: RankContext) -> list[Tensor]:
        return [
            all_reduce(values(101, context.group.rank, torch.int64), context.group, name)
            for name in ALGORITHMS
        ]  # type: ignore[call-overload]

    expected = torch.stack([values(101, rank, torch.int64) for rank in range(ranks)]).sum(0)
    for results in on_ranks(ranks, program):
        assert all(torch.equal(result, expected) for result in results)


@given(n=st.integers(0, 1_000), size=st.integers(1, 9))
def test_what_all_ranks_send_together(n: int, size: int) -> None:
    def total(name: str) -> int:
        return sum(ALL_REDUCES[name].elements_sent(n, size, rank) for rank in range(size))

    for name in ("ring", "one_shot", "hierarchical", "master", "tree"):
        assert total(name) == 2 * (size - 1) * n, name
    power = 1 << (size.bit_length() - 1)
    assert total("halving_doubling") == 2 * (power - 1) * n + 2 * (size - power) * n
    if n % size == 0:
        assert all(
            ALL_REDUCES["ring"].elements_sent(n, size, rank) == 2 * (size - 1) * n // size
            for rank in range(size)
        )


@pytest.mark.parametrize(("size", "expected"), [(1, 0), (2, 2), (3, 4), (8, 6)])
def test_transfers_behind_each_other(size: int, expected: int) -> None:
    assert ALL_REDUCES["tree"].rounds(size) == expected
    assert ALL_REDUCES["halving_doubling"].rounds(size) == expected
    assert ALL_REDUCES["ring"].rounds(size) == ALL_REDUCES["master"].rounds(size) == 2 * (size - 1)
    assert (
        ALL_REDUCES["one_shot"].rounds(size)
        == ALL_REDUCES["hierarchical"].rounds(size)
        == min(2, 2 * (size - 1))
    )


def test_one_shot_has_the_bits_of_the_master_because_both_add_in_order_of_rank() -> None:
    def program(context: RankContext) -> tuple[Tensor, Tensor]:
        mine = values(1_000, context.group.rank, torch.bfloat16)
        return all_reduce(mine.clone(), context.group, "one_shot"), all_reduce(
            mine, context.group, "master"
        )

    one_shot, master = on_ranks(4, program)[3]
    assert torch.equal(one_shot, master)


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
def test_an_average_of_float16_does_not_overflow_on_the_way(algorithm: Algorithm) -> None:
    def program(context: RankContext) -> Tensor:
        return all_reduce(
            torch.full((9,), 40_000.0, dtype=torch.float16), context.group, algorithm, "avg"
        )

    assert on_ranks(4, program)[0].eq(40_000).all()


@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_of_any_rank_is_the_minimum_and_the_maximum(op: str) -> None:
    def program(context: RankContext) -> list[Tensor]:
        tensors = []
        for name in ALL_REDUCES:
            tensor = torch.arange(12.0)
            tensor[context.group.rank * 4] = math.nan
            tensors.append(all_reduce(tensor, context.group, name, op))  # type: ignore[call-overload]
        return tensors

    for name, result in zip(ALL_REDUCES, on_ranks(3, program)[1], strict=True):
        if name != "native":
            assert result.isnan().nonzero().flatten().tolist() == [0, 4, 8], name


def test_a_tensor_that_is_not_contiguous_is_reduced_in_its_place() -> None:
    def program(context: RankContext) -> list[Tensor]:
        bases = []
        for name in ALL_REDUCES:
            base = torch.zeros(4, 6)
            all_reduce(base[:, ::2].add_(context.group.rank + 1), context.group, name)  # type: ignore[call-overload]
            bases.append(base)
        return bases

    first, second = on_ranks(2, program)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert one[:, ::2].eq(3).all()
        assert one[:, 1::2].eq(0).all()


def test_a_conjugate_that_is_not_yet_computed_is_reduced() -> None:
    def program(context: RankContext) -> Tensor:
        return all_reduce(torch.full((3,), 1 + 2j).conj(), context.group)

    assert on_ranks(2, program)[0].resolve_conj().eq(2 - 4j).all()


def test_a_parameter_that_needs_a_gradient_is_reduced_in_place() -> None:
    def program(context: RankContext) -> tuple[bool, list[float]]:
        weight = torch.nn.Parameter(torch.ones(3))
        all_reduce(weight, context.group, "tree")
        return weight.requires_grad, weight.tolist()

    assert on_ranks(2, program)[1] == (True, [2.0, 2.0, 2.0])


def test_a_process_group_of_torch_is_a_group_too_and_a_part_of_the_ranks_may_be_one() -> None:
    def program(context: RankContext) -> tuple[list[float], list[float]]:
        everybody = all_reduce(torch.ones(2), dist.group.WORLD)
        odd = dist.new_group([1, 3])
        part = torch.full((3,), float(context.group.rank))
        if context.group.rank % 2:
            all_reduce(part, odd, "halving_doubling", dist.ReduceOp.SUM)
        return everybody.tolist(), part.tolist()

    assert on_ranks(4, program) == [([4.0] * 2, [value] * 3) for value in (0.0, 4.0, 2.0, 4.0)]


def test_one_rank_has_the_sum_already_and_sends_nothing() -> None:
    group = Group()
    for name in ALGORITHMS:
        assert all_reduce(torch.ones(3), group, name).tolist() == [1, 1, 1]  # type: ignore[call-overload]
        assert all_reduce(torch.ones(3), group, name, "avg", async_op=True).wait().tolist() == [
            1,
            1,
            1,
        ]  # type: ignore[call-overload]
    assert group.meter.counters.bytes_sent == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            {"algorithm": "rings"},
            "there is no all-reduce 'rings'; choose one of ring, master, one_shot",
        ),
        ({"op": "mean"}, "there is no operation 'mean'; choose one of sum, avg, min, max, product"),
        ({"op": dist.ReduceOp.BXOR}, "there is no operation"),
        (
            {"tensor": torch.ones(2, dtype=torch.int32), "op": "avg"},
            "the average of torch.int32 is not of that dtype",
        ),
        ({"tensor": torch.ones(2, dtype=torch.bool), "op": "avg"}, "the average of torch.bool"),
        (
            {"tensor": torch.ones(2, dtype=torch.complex64), "op": "min"},
            "torch.complex64 have no order",
        ),
        (
            {"tensor": torch.ones(2).to(torch.float8_e5m2)},
            "tensors of torch.float8_e5m2 cannot be reduced",
        ),
        ({"tensor": torch.ones(1).expand(4)}, "an expanded tensor cannot hold the result"),
        ({"tensor": torch.eye(2).to_sparse()}, "only dense tensors can be sent"),
        ({"hosts": [[0, 1]]}, "each of the ranks 0 to 0 needs exactly one"),
        ({"group": "everybody"}, "not in the group, or the group is invalid: 'everybody'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_travels(
    arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        all_reduce(**{"tensor": torch.ones(3), **arguments})
    assert "\n" not in str(caught.value)
