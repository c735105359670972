"""Calls in words, whatever numbers a rank has posted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.collectives.shared_memory.calls import (
    ALL_REDUCE,
    NUMBER_OF,
    CollectiveCall,
    check_reducible,
    mismatch,
)
from dure.errors import CallError, MismatchError

NUMBERS = st.integers(-(2**62), 2**62)
GOOD = CollectiveCall(ALL_REDUCE, NUMBER_OF[torch.float32], 0, -1, 7)


@settings(max_examples=50, deadline=None)
@given(st.integers(-3, 20), st.integers(-3, 90), st.integers(-3, 20), NUMBERS, NUMBERS, NUMBERS)
def test_a_corrupt_header_is_a_mismatch_that_names_who_posted_it(
    kind: int, dtype: int, op: int, root: int, count: int, extra: int
) -> None:
    bad = CollectiveCall(kind, dtype, op, root, count, extra)
    error = mismatch(4, [GOOD, bad, GOOD], (5, 6, 7))
    assert isinstance(error, MismatchError)
    assert "ranks 5, 7 called all_reduce(sum, 7 float32); rank 6 called" in str(error)


def test_what_is_no_operation_and_no_dtype_is_said() -> None:
    assert str(CollectiveCall(ALL_REDUCE, 999, 55, -1, 7)) == (
        "all_reduce(no operation (55), 7 elements of no dtype (999))"
    )
    assert str(CollectiveCall(77)) == "no call (77)"
    assert str(CollectiveCall(0)) == "nothing"


def test_a_wrong_call_is_a_wrong_argument_and_an_error_of_torch_distributed() -> None:
    with pytest.raises(CallError) as caught:
        check_reducible(torch.int64, 7)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)
