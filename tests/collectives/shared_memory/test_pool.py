"""The shared pool: memory is lent once at a time, comes back with the last tensor, and leaves no
trace."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.collectives.shared_memory import empty_shared, pool
from dure.collectives.shared_memory.pool import SharedMapping, SharedMemoryPool, open_of

PAGE = os.sysconf("SC_PAGE_SIZE")

sizes = st.one_of(st.integers(0, 3 * PAGE), st.sampled_from([PAGE - 1, PAGE, PAGE + 1, 40 * PAGE]))


def small_pool(pages: int) -> SharedMemoryPool:
    """A pool that can be used up."""
    made = SharedMemoryPool()
    made.nbytes = pages * PAGE
    made._free = [(0, made.nbytes)]
    return made


def in_child(body: Callable[[], object]) -> int:
    """The exit status of a forked child that plays the body; 1 if it raised."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child does not end")


@settings(max_examples=60)
@given(st.lists(st.one_of(sizes, st.integers(-20, -1)), max_size=60))
def test_what_is_lent_never_overlaps_and_comes_back_as_one_piece(steps: list[int]) -> None:
    """A step: so many bytes are asked for, or the block at that place from the end is given
    back."""
    own = small_pool(10_000)
    lent: list[tuple[int, int]] = []
    for step in steps:
        if step < 0 and lent:
            own.release(*lent.pop(step % len(lent)))
        elif step >= 0:
            lent.append((own.allocate(step), step))
        spans = sorted(
            [(at, at + max(1, length)) for at, length in lent]
            + [(at, at + n) for at, n in own._free]
        )
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert all(at % PAGE == 0 for at, _ in lent)
    for block in lent:
        own.release(*block)
    assert own._free == [(0, own.nbytes)]


def test_a_pool_that_is_used_up_says_so_and_lends_again_what_comes_back() -> None:
    own = small_pool(4)
    blocks = [own.allocate(PAGE) for _ in range(4)]
    with pytest.raises(MemoryError, match="no 1 bytes left of"):
        own.allocate(1)
    own.release(blocks[1], PAGE)
    own.release(blocks[2], PAGE)
    with pytest.raises(MemoryError):
        own.allocate(2 * PAGE + 1)
    assert own.allocate(2 * PAGE) == blocks[1]


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ((), ()),
        ((0,), (0,)),
        ((3,), (3,)),
        ((2, 3), (2, 3)),
        (([2, 3],), (2, 3)),
        ((2, 0, 5), (2, 0, 5)),
    ],
)
def test_shapes_are_those_of_torch_empty(given: tuple[int, ...], shape: tuple[int, ...]) -> None:
    tensor = empty_shared(*given)
    assert tensor.shape == torch.Size(shape)
    assert tensor.is_contiguous()
    assert tensor.dtype is torch.get_default_dtype()
    assert not tensor.requires_grad
    tensor.fill_(2)
    assert float(tensor.sum()) == 2 * tensor.numel()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex128]
)
def test_dtypes_are_those_of_torch_empty(dtype: torch.dtype) -> None:
    tensor = empty_shared(5, dtype=dtype)
    assert tensor.dtype is dtype
    assert torch.equal(tensor.copy_(torch.arange(5)), torch.arange(5).to(dtype))


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, -1\]"):
        empty_shared(2, -1)


def test_memory_comes_back_with_the_last_tensor_that_uses_it() -> None:
    gc.collect()
    free = list(pool.pool()._free)
    tensor = empty_shared(3, 1000)
    address = tensor.data_ptr()
    views = [
        tensor.view(-1)[5:],
        tensor.t(),
        tensor.detach(),
        tensor.view(torch.int32),
        torch.nn.Parameter(tensor),
    ]
    tensor.fill_(1)
    del tensor
    while views:
        assert pool.pool()._free != free, "a view is left"
        assert empty_shared(1000).data_ptr() != address
        views.pop()
    assert pool.pool()._free == free
    assert empty_shared(3, 1000).data_ptr() == address


def test_memory_that_a_graph_or_a_numpy_array_uses_stays() -> None:
    tensor = empty_shared(1000).fill_(3).requires_grad_()
    array, product = tensor.detach().numpy(), (tensor * tensor).sum()
    del tensor
    others = [empty_shared(1000).fill_(7) for _ in range(3)]
    product.backward()
    assert (array == 3).all()
    assert len(others) == 3


def test_a_copy_lies_elsewhere() -> None:
    tensor = empty_shared(10).fill_(1)
    for other in (tensor.clone(), copy.deepcopy(tensor)):
        other.fill_(2)
        assert pool.pool().offset(other.data_ptr(), other.nbytes) is None
    assert tensor.eq(1).all()


def test_large_memory_goes_back_to_the_machine() -> None:
    def resident() -> int:
        return os.fstat(pool.pool().descriptor).st_blocks * 512

    tensor = empty_shared(64 << 20, dtype=torch.uint8).fill_(1)
    full = resident()
    assert full >= 64 << 20
    del tensor
    assert resident() <= full - (64 << 20)


def test_another_mapping_of_the_pool_sees_the_same_bytes() -> None:
    tensor = empty_shared(1000, dtype=torch.uint8)
    own = pool.pool()
    descriptor = open_of(os.getpid(), own.descriptor)
    other = SharedMapping(descriptor, own.nbytes)
    os.close(descriptor)
    offset = own.offset(tensor.data_ptr(), tensor.nbytes)
    assert offset is not None
    other.tensor()[offset : offset + 1000].copy_(torch.arange(1000) % 256)
    assert torch.equal(tensor, (torch.arange(1000) % 256).to(torch.uint8))


def test_what_a_forked_child_drops_stays_its_parents() -> None:
    kept = [empty_shared(1000).fill_(index) for index in range(5)]
    free = list(pool.pool()._free)

    def body() -> None:
        kept.clear()
        mine = [empty_shared(1000).fill_(9) for _ in range(10)]
        assert all(tensor.eq(9).all() for tensor in mine)

    assert in_child(body) == 0
    assert pool.pool()._free == free
    assert all(tensor.eq(index).all() for index, tensor in enumerate(kept))


def test_a_forked_child_shares_the_tensors_it_was_forked_with() -> None:
    tensor = empty_shared(4).zero_()
    assert in_child(lambda: tensor.fill_(5)) == 0
    assert tensor.eq(5).all()


def test_the_pool_has_no_name_in_the_file_system() -> None:
    tensor = empty_shared(1000)
    link = os.readlink(f"/proc/self/fd/{pool.pool().descriptor}")
    assert link.startswith("/memfd:dure-pool")
    assert not [path for path in Path("/dev/shm").iterdir() if "dure" in path.name]
    del tensor
