"""Tensors in files: the same values, in memory only for as long as they are used."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dure.memory import mapped as mapping
from dure.memory.mapped import (
    LEAST,
    Disk,
    DiskError,
    is_mapped,
    kind_of,
    mapped,
    release_pages,
    releasing_used_pages,
)

ROWS = 512
"""Of a square matrix of a mebibyte."""


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a mapped tensor's file that this process has in memory."""
    begin = f"{tensor.untyped_storage().data_ptr():x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(begin) for line in lines)
    found = next(line for line in lines if line.startswith("Rss:"))
    return int(found.split()[1]) * 1024


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(ROWS, 2 * ROWS), nn.ReLU(), nn.Linear(2 * ROWS, ROWS))


def test_what_is_made_inside_has_the_same_bits_and_lies_in_files() -> None:
    right = network()
    with mapped(Disk()):
        found = network()
        twin = copy.deepcopy(found)
        twin(torch.ones(3, ROWS)).sum().backward()
    for one in (found, twin):
        for mine, other in zip(one.parameters(), right.parameters(), strict=True):
            assert torch.equal(mine, other)
            assert is_mapped(mine) == (mine.nbytes >= LEAST)
    gradient = next(twin.parameters()).grad
    assert gradient is not None
    assert is_mapped(gradient)
    # What is computed with them outside lies in memory.
    assert not is_mapped(next(found.parameters()) * 2)


def test_a_file_goes_with_its_last_tensor() -> None:
    gc.collect()  # what an earlier test has left
    before = len(mapping._segments)
    with mapped(Disk()):
        whole = torch.ones(ROWS, ROWS)
        row = whole[3]
    del whole
    gc.collect()
    assert len(mapping._segments) == before + 1
    assert row.sum() == ROWS
    del row
    gc.collect()
    assert len(mapping._segments) == before


@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=3), odd=st.booleans())
def test_a_tensor_has_no_more_memory_than_elements(shape: list[int], odd: bool) -> None:
    right = torch.arange(torch.Size(shape).numel(), dtype=torch.int16 if odd else torch.float64)
    right = right.view(shape).transpose(0, -1)
    found = Disk().place(right)
    assert torch.equal(found, right)
    assert found.stride() == right.stride()
    assert found.untyped_storage().nbytes() == max(1, right.nbytes)
    assert torch.equal(Disk().zeros(shape, torch.int16), torch.zeros(shape, dtype=torch.int16))


def test_pages_leave_and_values_stay() -> None:
    with mapped(Disk()):
        one = torch.full((ROWS, ROWS), 3.0)
        other = torch.full((ROWS, ROWS), 4.0)
    one += 1
    assert torch.equal(one, other)
    assert resident(one) == resident(other) == one.nbytes
    release_pages([one, torch.ones(2)])
    assert resident(one) == 0
    assert resident(other) == other.nbytes
    release_pages([other])
    assert resident(other) == 0
    assert torch.equal(one, other)


def test_what_is_used_leaves_a_window_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "WINDOW", 3 * LEAST)
    with mapped(Disk()):
        matrices = [torch.eye(ROWS) for _ in range(8)]
        assert sum(map(resident, matrices)) < 3 * LEAST, "also what was only made"
    vector = torch.arange(float(ROWS))
    most = 0
    with releasing_used_pages():
        for matrix in matrices:
            vector = matrix @ vector
            most = max(most, sum(map(resident, matrices)))
    assert torch.equal(vector, torch.arange(float(ROWS)))
    assert 0 < most <= 3 * LEAST
    assert sum(map(resident, matrices)) == 0


def test_a_folder_in_memory_is_refused(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or kind_of(memory) != "tmpfs":
        pytest.skip("there is no folder in memory")
    with pytest.raises(DiskError, match="is in memory: give a folder on a disk"):
        Disk(memory)
    with pytest.raises(DiskError, match="there is no folder"):
        Disk(tmp_path / "none")


def test_a_disk_that_is_full_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapping.os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"0\.00105 GB do not fit into .*: No space left"):
        Disk().zeros((ROWS, ROWS), torch.float32)
