"""What an operation does to two parts, and to all of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dure.collectives.operation import OPS, Reduction, reduction

UNSIGNED = {torch.uint16: 2**16, torch.uint32: 2**32, torch.uint64: 2**64}


@pytest.mark.parametrize("dtype", UNSIGNED)
@given(one=st.integers(0, 2**64 - 1), other=st.integers(0, 2**64 - 1))
def test_unsigned_integers_wrap_around_and_are_ordered_as_such(
    dtype: torch.dtype, one: int, other: int
) -> None:
    modulus = UNSIGNED[dtype]
    one, other = one % modulus, other % modulus
    expected = {"sum": (one + other) % modulus, "product": one * other % modulus}
    expected |= {"min": min(one, other), "max": max(one, other)}
    for op, value in expected.items():
        out = torch.tensor([one], dtype=dtype)
        Reduction(op).combine(out, torch.tensor([other], dtype=dtype), out)  # type: ignore[arg-type]
        assert out.tolist() == [value]


def test_bool_is_or_and_and() -> None:
    one, other, out = (
        torch.tensor([0, 0, 1, 1]).bool(),
        torch.tensor([0, 1, 0, 1]).bool(),
        torch.empty(4).bool(),
    )
    either, both = [0, 1, 1, 1], [0, 0, 0, 1]
    for op, expected in {"sum": either, "max": either, "product": both, "min": both}.items():
        Reduction(op).combine(one, other, out)  # type: ignore[arg-type]
        assert out.int().tolist() == expected


@given(count=st.integers(1, 6), mine=st.integers(0, 5), in_place=st.booleans())
def test_a_fold_adds_all_parts_in_order_and_keeps_its_own(
    count: int, mine: int, in_place: bool
) -> None:
    mine %= count
    parts = [torch.tensor([1.0 + rank, 2.0**-rank]) for rank in range(count)]
    expected = torch.stack(parts).sum(0) / count
    out = parts[mine] if in_place else torch.empty(2)
    own = parts[mine].clone()
    Reduction("avg", count).fold(parts, mine, out)
    assert torch.allclose(out, expected)
    assert in_place or torch.equal(parts[mine], own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fold_of_halves_is_rounded_once(dtype: torch.dtype) -> None:
    small = torch.finfo(dtype).eps / 4  # alone, each of these is lost beside 1
    parts = [torch.tensor([1.0], dtype=dtype)] + [
        torch.tensor([small], dtype=dtype) for _ in range(8)
    ]
    out = torch.empty(1, dtype=dtype)
    Reduction().fold(parts, 0, out)
    assert out.item() == 1 + 8 * small


def test_an_average_of_float16_is_divided_first_and_needs_no_end() -> None:
    part = torch.tensor([6.0], dtype=torch.float16)
    rest = Reduction("avg", 3).begin(part)
    assert (part.item(), rest.op) == (2.0, "sum")
    part = torch.tensor([6.0])
    assert Reduction("avg", 3).begin(part) == Reduction("avg", 3)
    assert part.item() == 6.0


def test_operations_have_torchs_names_too() -> None:
    members = [
        dist.ReduceOp.SUM,
        dist.ReduceOp.AVG,
        dist.ReduceOp.MIN,
        dist.ReduceOp.MAX,
        dist.ReduceOp.PRODUCT,
    ]
    assert tuple(reduction(member, torch.float32, 2).op for member in members) == OPS
    assert reduction(dist.ReduceOp(dist.ReduceOp.MAX), torch.float32, 2).op == "max"
