"""Collectives that reduce: all_reduce, reduce, reduce_scatter; every operation on every dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import DURE, Ranks, close, on_ranks, raises, same, values
from torch import Tensor
from torch.distributed import ReduceOp

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
BITWISE = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
ARITHMETIC = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


def on_gloo(ranks: Ranks, dtype: torch.dtype) -> bool:
    """gloo does not know these dtypes at all."""
    return ranks.backend == "gloo" and dtype in (torch.int16, torch.bool)


def folded(parts: list[Tensor], step: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The parts reduced in order of rank, halves in float32 and rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = step(total, part.to(wide))
    return total.to(dtype)


def equal(ranks: Ranks, actual: Tensor, expected: Tensor, what: object) -> None:
    """The same bits; gloo adds in an order of its own."""
    exact = ranks.backend != "gloo" or not (actual.is_floating_point() or actual.is_complex())
    if actual.dtype in HALVES and ranks.backend == "gloo":
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
    else:
        (same if exact else close)(actual, expected, what)


@on_ranks()
def test_all_reduce_reduces_numbers_of_every_dtype_by_every_operation(ranks: Ranks) -> None:
    for dtype in (*INTEGERS, *FLOATS):
        if on_gloo(ranks, dtype):
            continue
        for op, step in ARITHMETIC.items():
            tensor = values(ranks.rank, 57, dtype=dtype)
            dist.all_reduce(tensor, op, ranks.group)
            equal(
                ranks,
                tensor,
                folded([values(r, 57, dtype=dtype) for r in ranks.all], step),
                (dtype, op),
            )


@on_ranks()
def test_all_reduce_combines_the_bits_of_integers(ranks: Ranks) -> None:
    for dtype in INTEGERS:
        if on_gloo(ranks, dtype):
            continue
        for op, step in BITWISE.items():
            tensor = values(ranks.rank, 41, dtype=dtype)
            dist.all_reduce(tensor, op, ranks.group)
            same(tensor, folded([values(r, 41, dtype=dtype) for r in ranks.all], step), (dtype, op))


@on_ranks(1, 2, 3, backends=DURE)
def test_booleans_reduce_as_bits_and_as_truth(ranks: Ranks) -> None:
    parts = [values(r, 33, dtype=torch.bool) for r in ranks.all]
    for op, step in {
        **BITWISE,
        ReduceOp.MIN: torch.logical_and,
        ReduceOp.MAX: torch.logical_or,
        ReduceOp.SUM: torch.logical_or,
        ReduceOp.PRODUCT: torch.logical_and,
    }.items():
        tensor = parts[ranks.rank].clone()
        dist.all_reduce(tensor, op, ranks.group)
        same(tensor, folded(parts, step), op)


@on_ranks()
def test_complex_numbers_are_summed(ranks: Ranks) -> None:
    for dtype in COMPLEX:
        parts = [values(r, 7, 3, dtype=dtype) for r in ranks.all]
        tensor = parts[ranks.rank].clone()
        dist.all_reduce(tensor, group=ranks.group)
        equal(ranks, tensor, folded(parts, torch.add), dtype)


@on_ranks(2, 3)
def test_the_product_of_complex_numbers_is_refused(ranks: Ranks) -> None:
    with raises((ValueError, RuntimeError), "complex"):
        dist.all_reduce(torch.ones(3, dtype=torch.complex64), ReduceOp.PRODUCT, ranks.group)


@on_ranks(backends=DURE)
def test_the_average_is_the_sum_over_the_number_of_ranks(ranks: Ranks) -> None:
    for dtype in FLOATS:
        parts = [values(r, 57, dtype=dtype) for r in ranks.all]
        tensor = parts[ranks.rank].clone()
        dist.all_reduce(tensor, ReduceOp.AVG, ranks.group)
        wide = torch.float32 if dtype in HALVES else dtype
        close(
            tensor,
            (folded([part.to(wide) for part in parts], torch.add) / ranks.size).to(dtype),
            dtype,
        )


@on_ranks(2, 3, backends=DURE)
def test_the_average_of_integers_is_refused(ranks: Ranks) -> None:
    for dtype in (torch.int32, torch.uint8):
        with raises((ValueError, RuntimeError), "(?i)av(g|erage)"):
            dist.all_reduce(torch.ones(3, dtype=dtype), ReduceOp.AVG, ranks.group)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=ranks.group)
    same(tensor, torch.full((3,), float(ranks.size)))


@on_ranks(2, 3)
def test_bits_of_floating_point_numbers_are_not_combined(ranks: Ranks) -> None:
    with raises((ValueError, RuntimeError)):
        dist.all_reduce(torch.ones(3), ReduceOp.BAND, ranks.group)


@on_ranks(2, 3, 4, backends=DURE)
def test_a_nan_of_any_rank_survives_minimum_and_maximum(ranks: Ranks) -> None:
    for dtype in FLOATS:
        for op in (ReduceOp.MIN, ReduceOp.MAX):
            for bad in ranks.all:
                tensor = torch.arange(40, dtype=dtype)
                if ranks.rank == bad:
                    tensor[bad :: ranks.size] = math.nan
                dist.all_reduce(tensor, op, ranks.group)
                expected = torch.arange(40, dtype=dtype)
                expected[bad :: ranks.size] = math.nan
                same(tensor, expected, (dtype, op, bad))


@on_ranks(2, 4)
def test_infinities_are_numbers(ranks: Ranks) -> None:
    tensor = torch.tensor([math.inf, -math.inf, math.inf if ranks.rank % 2 else -math.inf])
    dist.all_reduce(tensor, group=ranks.group)
    same(tensor, torch.tensor([math.inf, -math.inf, math.nan]))


@on_ranks(3, 4, backends=DURE)
def test_halves_are_rounded_once(ranks: Ranks) -> None:
    for dtype in HALVES:
        step = (
            torch.finfo(dtype).eps / 2
        )  # lost if it is added to 1 in halves, but two of them are not
        tensor = torch.full((9,), 1.0 if ranks.rank == 0 else step, dtype=dtype)
        dist.all_reduce(tensor, group=ranks.group)
        exact = torch.full((9,), 1.0 + (ranks.size - 1) * step, dtype=torch.float32)
        same(tensor, exact.to(dtype), dtype)


@on_ranks(3, 4, backends=DURE)
def test_sums_are_formed_in_order_of_rank(ranks: Ranks) -> None:
    parts = [torch.full((1_000,), value) for value in (1e8, 1.0, -1e8, 1.0)[: ranks.size]]
    tensor = parts[ranks.rank].clone()
    dist.all_reduce(tensor, group=ranks.group)
    same(tensor, folded(parts, torch.add))
    for n in (1, 1_000, 100_000):
        parts = [values(r, n) for r in ranks.all]
        tensor = parts[ranks.rank].clone()
        dist.all_reduce(tensor, group=ranks.group)
        same(tensor, folded(parts, torch.add), n)


@on_ranks()
def test_integers_wrap_around(ranks: Ranks) -> None:
    tensor = torch.full((5,), 200, dtype=torch.uint8)
    dist.all_reduce(tensor, group=ranks.group)
    same(tensor, torch.full((5,), 200 * ranks.size % 256, dtype=torch.uint8))


@on_ranks()
def test_sizes_from_nothing_to_megabytes(ranks: Ranks) -> None:
    for n in (0, 1, 2, 3, 5, 63, 64, 65, 1_023, 4_097, 262_145, 2_500_000):
        tensor = torch.full((n,), float(ranks.rank + 1))
        if n:
            tensor[-1] = 0.5
        dist.all_reduce(tensor, group=ranks.group)
        expected = torch.full((n,), ranks.size * (ranks.size + 1) / 2)
        if n:
            expected[-1] = ranks.size / 2
        same(tensor, expected, n)


@on_ranks(2, 3, 8)
def test_a_tensor_of_sixteen_megabytes_of_float64(ranks: Ranks) -> None:
    n = 2_000_003
    tensor = torch.arange(n, dtype=torch.float64) * (ranks.rank + 1)
    dist.all_reduce(tensor, group=ranks.group)
    same(tensor, torch.arange(n, dtype=torch.float64) * (ranks.size * (ranks.size + 1) // 2))


@on_ranks()
def test_a_scalar_is_reduced(ranks: Ranks) -> None:
    tensor = torch.tensor(float(ranks.rank))
    dist.all_reduce(tensor, group=ranks.group)
    same(tensor, torch.tensor(float(sum(ranks.all))))


@on_ranks(1, 2, 3, backends=DURE)
def test_a_tensor_with_gaps_is_reduced_in_its_place(ranks: Ranks) -> None:
    columns = torch.zeros(6, 8)
    views = {
        "columns": columns[:, ::2],
        "transposed": torch.zeros(5, 7).t(),
        "narrowed": torch.zeros(10, 10)[2:5, 3:9],
        "permuted": torch.zeros(2, 3, 4).permute(2, 0, 1),
        "channels last": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    for name, view in views.items():
        part = values(ranks.rank, *view.shape)
        view.copy_(part)
        dist.all_reduce(view, group=ranks.group)
        close(view, sum(values(r, *view.shape) for r in ranks.all), name)  # type: ignore[arg-type]
    same(columns[:, 1::2], torch.zeros(6, 4), "what lies between the columns")


@on_ranks(2, 3)
def test_a_part_of_a_larger_tensor_is_reduced_and_its_surroundings_stay(ranks: Ranks) -> None:
    whole = torch.full((100,), -1.0)
    whole[13:57] = 1.0
    dist.all_reduce(whole[13:57], group=ranks.group)
    expected = torch.full((100,), -1.0)
    expected[13:57] = float(ranks.size)
    same(whole, expected)


@on_ranks()
def test_reduce_gives_the_root_the_result(ranks: Ranks) -> None:
    for root in ranks.all:
        for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.uint8):
            parts = [values(r, 4, 9, dtype=dtype, seed=root) for r in ranks.all]
            for op, step in ARITHMETIC.items():
                tensor = parts[ranks.rank].clone()
                dist.reduce(tensor, op=op, group=ranks.group, group_dst=root)
                if ranks.rank == root:
                    equal(ranks, tensor, folded(parts, step), (root, dtype, op))


@on_ranks(2, 3, backends=DURE)
def test_reduce_leaves_what_the_others_brought(ranks: Ranks) -> None:
    tensor = values(ranks.rank, 2_000)
    dist.reduce(tensor, group=ranks.group, group_dst=0)
    if ranks.rank != 0:
        same(tensor, values(ranks.rank, 2_000))


@on_ranks(2, 3, backends=DURE)
def test_reduce_takes_and_fills_tensors_with_gaps(ranks: Ranks) -> None:
    whole = torch.zeros(6, 8)
    whole[:, ::2] = values(ranks.rank, 6, 4)
    dist.reduce(whole[:, ::2], group=ranks.group, group_dst=1)
    if ranks.rank == 1:
        close(whole[:, ::2], sum(values(r, 6, 4) for r in ranks.all))  # type: ignore[arg-type]
        same(whole[:, 1::2], torch.zeros(6, 4))


@on_ranks()
def test_reduce_scatter_gives_every_rank_its_part_of_the_result(ranks: Ranks) -> None:
    for dtype in (torch.float32, torch.int32, torch.float16, torch.float64):
        for op, step in ARITHMETIC.items():
            brought = [
                [values(r, 5, 2, dtype=dtype, seed=part) for part in ranks.all] for r in ranks.all
            ]
            output = torch.empty(5, 2, dtype=dtype)
            dist.reduce_scatter(output, brought[ranks.rank], op, ranks.group)
            equal(
                ranks,
                output,
                folded([brought[r][ranks.rank] for r in ranks.all], step),
                (dtype, op),
            )


@on_ranks(backends=DURE)
def test_reduce_scatter_takes_parts_of_different_sizes(ranks: Ranks) -> None:
    brought = [[values(r, 3 * part, 2, seed=part) for part in ranks.all] for r in ranks.all]
    output = torch.empty(3 * ranks.rank, 2)
    dist.reduce_scatter(output, brought[ranks.rank], group=ranks.group)
    same(output, folded([brought[r][ranks.rank] for r in ranks.all], torch.add))


@on_ranks()
def test_reduce_scatter_tensor_divides_the_first_dimension(ranks: Ranks) -> None:
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        for rows in (1, 3, 5_000):
            parts = [values(r, ranks.size * rows, 4, dtype=dtype) for r in ranks.all]
            output = torch.empty(rows, 4, dtype=dtype)
            dist.reduce_scatter_tensor(output, parts[ranks.rank].clone(), group=ranks.group)
            expected = folded(parts, torch.add)[ranks.rank * rows : (ranks.rank + 1) * rows]
            equal(ranks, output, expected, (dtype, rows))


@on_ranks(2, 3, backends=DURE)
def test_reduce_scatter_tensor_averages(ranks: Ranks) -> None:
    parts = [values(r, ranks.size * 11) for r in ranks.all]
    output = torch.empty(11)
    dist.reduce_scatter_tensor(output, parts[ranks.rank].clone(), ReduceOp.AVG, ranks.group)
    close(output, (folded(parts, torch.add) / ranks.size).chunk(ranks.size)[ranks.rank])


@on_ranks(2, 3, backends=DURE)
def test_reduce_scatter_tensor_takes_a_stack_too(ranks: Ranks) -> None:
    output = torch.empty(4, 3)
    dist.reduce_scatter_tensor(
        output, torch.ones(ranks.size, 4, 3) * (ranks.rank + 1), group=ranks.group
    )
    same(output, torch.full((4, 3), ranks.size * (ranks.size + 1) / 2))


@on_ranks(2, 3, backends=DURE)
def test_reduce_scatter_tensor_may_write_into_its_own_input(ranks: Ranks) -> None:
    parts = [values(r, ranks.size * 700) for r in ranks.all]
    tensor = parts[ranks.rank].clone()
    output = tensor[ranks.rank * 700 : (ranks.rank + 1) * 700]
    dist.reduce_scatter_tensor(output, tensor, group=ranks.group)
    same(output, folded(parts, torch.add).chunk(ranks.size)[ranks.rank])


@on_ranks(2, 3)
def test_what_is_brought_to_reduce_scatter_stays_as_it_was(ranks: Ranks) -> None:
    brought = values(ranks.rank, ranks.size * 50)
    output = torch.empty(50)
    dist.reduce_scatter_tensor(output, brought, group=ranks.group)
    same(brought, values(ranks.rank, ranks.size * 50))


@on_ranks(2, backends=DURE)
def test_a_sparse_tensor_is_refused_where_it_makes_no_sense(ranks: Ranks) -> None:
    for refused in (
        lambda x: dist.all_reduce_coalesced([x], group=ranks.group),
        lambda x: dist.broadcast(x, group_src=0, group=ranks.group),
        lambda x: dist.reduce(x, group_dst=0, group=ranks.group),
    ):
        with raises((ValueError, RuntimeError), "(?i)sparse"):
            refused(torch.eye(3).to_sparse())
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=ranks.group)
    same(tensor, torch.full((3,), 2.0))


@on_ranks(2, 3)
def test_a_list_of_tensors_is_reduced_at_once(ranks: Ranks) -> None:
    tensors = [torch.full((n,), float(ranks.rank)) for n in (1, 10, 0, 100)]
    dist.all_reduce_coalesced(tensors, group=ranks.group)
    for tensor in tensors:
        same(tensor, torch.full_like(tensor, sum(ranks.all)))


@on_ranks(2, 3, 4, 8)
def test_many_small_reductions_after_one_another(ranks: Ranks) -> None:
    for number in range(1_000 if ranks.size < 8 and ranks.backend != "gloo" else 200):
        tensor = torch.tensor([float(number), float(ranks.rank)])
        dist.all_reduce(tensor, group=ranks.group)
        same(tensor, torch.tensor([float(number * ranks.size), float(sum(ranks.all))]), number)


@on_ranks(2, backends=DURE)
def test_a_dtype_that_cannot_be_summed_is_refused_by_name(ranks: Ranks) -> None:
    with raises((ValueError, RuntimeError, TypeError), "float8_e4m3fn"):
        dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn), group=ranks.group)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=ranks.group)
    same(tensor, torch.full((3,), 2.0))
