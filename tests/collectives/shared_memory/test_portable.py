"""The cores agree: what the C core computes is, bit for bit, what the core in torch computes, and
torch itself."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import built, groups, on_every, random_bits, same_bits
from torch import Tensor

from dure.collectives.shared_memory import SharedMemoryGroup, empty_shared, native
from dure.collectives.shared_memory.calls import AVG, MAX, MIN, NUMBER_OF, OPERATIONS, SENSIBLE, SUM
from dure.collectives.shared_memory.portable import reduced

CORE = Path(native.__file__).parent / "core"
COMPILER = shutil.which("gcc")
FLAGS = ["-std=c11", "-O3", "-fwrapv", "-ffp-contract=off"]
HALVES = (torch.float16, torch.bfloat16)
WHAT = sorted(SENSIBLE, key=lambda what: (NUMBER_OF[what[0]], what[1]))
NAMES = [f"{OPERATIONS[op]} of {str(dtype).removeprefix('torch.')}" for dtype, op in WHAT]
BORDERS = (64, 4096, native.SLOT_BYTES, native.STAGE_BYTES, 2 * native.STAGE_BYTES)
"""Bytes at which something changes: a line, a tile, a slot, a window, two of them."""

on_every_reduction = pytest.mark.parametrize(("dtype", "op"), WHAT, ids=NAMES)
lengths = st.one_of(
    st.integers(0, 300),
    st.tuples(st.sampled_from(BORDERS), st.integers(-65, 65)).map(lambda pair: max(0, sum(pair))),
)
"""Bytes of a tensor, near what the cores treat differently."""


def results(
    core: str,
    size: int,
    call: Callable[[SharedMemoryGroup, Tensor], Tensor],
    given: Sequence[Tensor],
) -> list[Tensor]:
    """What the call makes of each rank's tensor, of which it gets a copy."""
    with groups(size, core) as ranks:  # type: ignore[arg-type]
        return on_every(ranks, lambda group: call(group, given[group.rank()].clone()))


def agree(
    size: int, call: Callable[[SharedMemoryGroup, Tensor], Tensor], given: Sequence[Tensor]
) -> list[Tensor]:
    """The results of both cores, which have to be the same."""
    of_c, of_torch = (results(core, size, call, given) for core in ("c", "torch"))
    for ours, theirs in zip(of_c, of_torch, strict=True):
        same_bits(ours, theirs)
    return of_c


def all_reduced(op: int) -> Callable[[SharedMemoryGroup, Tensor], Tensor]:
    def call(group: SharedMemoryGroup, tensor: Tensor) -> Tensor:
        group.all_reduce(tensor, op)
        return tensor

    return call


@built
@on_every_reduction
def test_all_reduce_is_the_same_in_both_cores_and_the_fold_in_order(
    dtype: torch.dtype, op: int
) -> None:
    for size, n in ((2, 1000), (3, 777), (4, 40_000)):
        given = [random_bits(n, dtype, 10 * size + rank) for rank in range(size)]
        for result in agree(size, all_reduced(op), given):
            same_bits(result, reduced(given, op))


@built
@pytest.mark.parametrize("op", [MIN, MAX])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_which_of_two_zeros_is_taken_does_not_depend_on_where_they_stand(
    dtype: torch.dtype, op: int
) -> None:
    given = [torch.zeros(39, dtype=dtype), -torch.zeros(39, dtype=dtype)]
    for result in agree(2, all_reduced(op), given):
        same_bits(result, reduced(given, op))
        assert len(set(result.signbit().tolist())) == 1


@built
@settings(max_examples=30)
@given(st.sampled_from(WHAT), st.integers(1, 5), lengths, st.integers(0, 1000))
def test_all_reduce_of_any_length_is_the_same(
    what: tuple[torch.dtype, int], size: int, nbytes: int, seed: int
) -> None:
    dtype, op = what
    given = [random_bits(nbytes // dtype.itemsize, dtype, seed + rank) for rank in range(size)]
    for result in agree(size, all_reduced(op), given):
        same_bits(result, reduced(given, op))


@built
@settings(max_examples=15)
@given(st.integers(2, 4), lengths, st.integers(0, 15), st.integers(0, 1000))
def test_all_reduce_of_shared_tensors_is_the_same(
    size: int, nbytes: int, which: int, seed: int
) -> None:
    """which: a bit for each rank whose tensor is shared."""
    given = [random_bits(nbytes // 4, torch.float32, seed + rank) for rank in range(size)]

    def call(group: SharedMemoryGroup, tensor: Tensor) -> Tensor:
        if which >> group.rank() & 1:
            tensor = empty_shared(tensor.numel(), dtype=tensor.dtype).copy_(tensor)
        group.all_reduce(tensor)
        return tensor.clone()

    for result in agree(size, call, given):
        same_bits(result, reduced(given, SUM))


@built
@settings(max_examples=15)
@given(st.sampled_from(WHAT), st.integers(2, 4), lengths, st.integers(0, 1000))
def test_reduce_and_reduce_scatter_are_the_same(
    what: tuple[torch.dtype, int], size: int, nbytes: int, seed: int
) -> None:
    dtype, op = what
    n = nbytes // dtype.itemsize // size
    given = [random_bits(n * size, dtype, seed + rank) for rank in range(size)]
    options = torch.distributed.ReduceOptions()
    options.rootRank, options.reduceOp = (
        size - 1,
        getattr(torch.distributed.ReduceOp, OPERATIONS[op].upper()),
    )
    scattering = torch.distributed.ReduceScatterOptions()
    scattering.reduceOp = options.reduceOp

    def call(group: SharedMemoryGroup, tensor: Tensor) -> Tensor:
        out = tensor.new_empty(n)
        group.reduce_scatter_single(out, tensor, scattering).wait()
        group.reduce([tensor], options).wait()
        return torch.cat([out, tensor])

    whole = reduced(given, op)
    for rank, result in enumerate(agree(size, call, given)):
        same_bits(result[:n], whole[n * rank : n * (rank + 1)])
        same_bits(result[n:], whole if rank == size - 1 else given[rank])


@built
@settings(max_examples=15)
@given(st.integers(2, 4), lengths, st.integers(0, 1000))
def test_copies_are_the_same(size: int, nbytes: int, seed: int) -> None:
    n = nbytes // 2 // size
    given = [random_bits(n * size, torch.bfloat16, seed + rank) for rank in range(size)]
    options = torch.distributed.BroadcastOptions()
    options.rootRank = size - 1

    def call(group: SharedMemoryGroup, tensor: Tensor) -> Tensor:
        swapped, gathered = torch.empty_like(tensor), tensor.new_empty(n * size * size)
        group.all_to_all_single(swapped, tensor, [], []).wait()
        group.all_gather_single(gathered, tensor).wait()
        group.broadcast([tensor], options).wait()
        return torch.cat([swapped, gathered, tensor])

    for rank, result in enumerate(agree(size, call, given)):
        parts = [tensor[n * rank : n * (rank + 1)] for tensor in given]
        same_bits(result, torch.cat([*parts, *given, given[-1]]))


@built
def test_megabytes_that_take_many_windows_of_both_cores_are_the_same() -> None:
    given = [random_bits((9 << 20) // 4 + 3, torch.float32, rank) for rank in range(2)]
    for result in agree(2, all_reduced(SUM), given):
        same_bits(result, reduced(given, SUM))


# The kernels alone.


class Kernel(Protocol):
    def __call__(self, given: Sequence[Tensor], op: int, out: Tensor | None = None) -> Tensor: ...


def reducer(library: ctypes.CDLL) -> Kernel:
    """`core_reduce` of a library, as a function of tensors, into `out` and into a second place."""

    def call(given: Sequence[Tensor], op: int, out: Tensor | None = None) -> Tensor:
        outs = [torch.empty_like(given[0]) if out is None else out, torch.empty_like(given[0])]
        to = (ctypes.c_void_p * 2)(*(out.data_ptr() for out in outs))
        sources = (ctypes.c_void_p * len(given))(*(tensor.data_ptr() for tensor in given))
        count = ctypes.c_uint64(given[0].numel())
        library.core_reduce(to, 2, sources, len(given), count, NUMBER_OF[given[0].dtype], op)
        same_bits(outs[1], outs[0])
        return outs[0]

    return call


FEATURES = {
    "plain": [],
    "avx2": ["avx2", "fma", "f16c"],
    "avx512": ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"],
}


def kernels_here() -> list[str]:
    """The kernels that were installed, and those for other instructions that this processor has."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    others = [
        name
        for name, needed in FEATURES.items()
        if flags.issuperset(needed) and name != native.instructions()
    ]
    return ["as installed", *(others if COMPILER else [])]


@pytest.fixture(scope="module", params=kernels_here())
def core_reduce(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    if request.param == "as installed":
        installed = native.library()
        if installed is None:
            pytest.skip("the C core is not built here")
        return reducer(ctypes.CDLL(installed._name))
    folder = tmp_path_factory.mktemp("kernels")
    has = " || ".join(["0", *(f'!strcmp(name, "{flag}")' for flag in FEATURES[request.param])])
    (folder / "pretend.h").write_text(
        f"#include <string.h>\nstatic int pretend(const char *name) {{ return {has}; }}\n"
        "#define __builtin_cpu_supports(name) pretend(name)\n"
    )
    library = folder / "kernels.so"
    command = [
        COMPILER,
        *FLAGS,
        "-shared",
        "-fPIC",
        "-include",
        folder / "pretend.h",
        CORE / "kernels.c",
    ]
    subprocess.run([*command, "-o", library], check=True, capture_output=True, text=True)
    kernels = ctypes.CDLL(str(library))
    kernels.core_instructions.restype = ctypes.c_char_p
    assert kernels.core_instructions() == f"with_{request.param}".encode()
    return reducer(kernels)


@on_every_reduction
def test_kernels_compute_what_torch_does(core_reduce: Kernel, dtype: torch.dtype, op: int) -> None:
    for ranks in (1, 2, 3, 5):
        for n in (1, 15, 10_000):
            given = [random_bits(n, dtype, 100 * ranks + rank) for rank in range(ranks)]
            same_bits(core_reduce(given, op), reduced(given, op))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_survives_and_meets_every_kind_of_other(
    core_reduce: Kernel, dtype: torch.dtype
) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    same_bits(core_reduce([every], SUM), every)
    for seed in range(4):
        other = random_bits(1 << 16, dtype, seed)
        sums = every.float() + other.float()
        same_bits(core_reduce([every, other], SUM), sums.to(dtype))
        same_bits(core_reduce([every, other], AVG), (sums / 2).to(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_summed_in_float32_and_rounded_once(
    core_reduce: Kernel, dtype: torch.dtype
) -> None:
    given = [random_bits(5000, dtype, rank) for rank in range(6)]
    sums = reduce(torch.add, [tensor.float() for tensor in given])
    same_bits(core_reduce(given, SUM), sums.to(dtype))
    one, tiny = (
        torch.ones(3, dtype=dtype),
        torch.full((3,), torch.finfo(dtype).eps / 4, dtype=dtype),
    )
    assert (core_reduce([one, *[tiny] * 16], SUM) > 1).all(), "each alone would be rounded away"


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_source_may_be_where_the_result_goes(
    core_reduce: Kernel, dtype: torch.dtype, place: int
) -> None:
    given = [random_bits(5000, dtype, rank) for rank in range(3)]
    expected = reduced(given, SUM)
    core_reduce(given, SUM, given[place])
    same_bits(given[place], expected)
