"""A shelf: large tensors lie on a disk, where there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dure.memory import spill_store as shelves
from dure.memory.mapped import Disk, DiskError
from dure.memory.spill_store import IN_MEMORY, SpillStore, spilled_copy
from dure.record.disk_tensors import DiskTensor, form_of, in_memory


def test_large_tensors_lie_on_the_disk_and_small_ones_in_memory(tmp_path: Path) -> None:
    shelf = SpillStore(tmp_path, least=100)
    values = [
        torch.arange(50.0),
        torch.arange(3.0),
        torch.arange(99, dtype=torch.float64).view(9, 11),
    ]
    leaves = [spilled_copy(one, shelf) for one in values]
    assert [isinstance(leaf, DiskTensor) for leaf in leaves] == [True, False, True]
    assert all(torch.equal(in_memory(leaf), one) for leaf, one in zip(leaves, values, strict=True))
    # Files without names: nothing is left behind.
    assert not list(tmp_path.iterdir())
    assert in_memory(shelf.place(form_of("", torch.float32, (64,)))).count_nonzero() == 0
    assert not isinstance(spilled_copy(values[0], IN_MEMORY), DiskTensor)


def test_a_folder_that_is_none_is_passed_over_and_without_a_disk_all_lies_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = SpillStore(tmp_path / "nowhere", least=1)
    assert isinstance(spilled_copy(torch.ones(4), elsewhere), DiskTensor)

    def nothing(folder: Path | None) -> Disk:
        raise DiskError("none is a folder on a disk")

    monkeypatch.setattr(shelves, "Disk", nothing)
    assert torch.equal(
        in_memory(spilled_copy(torch.ones(4), SpillStore(tmp_path, least=1))), torch.ones(4)
    )


def test_where_the_disk_is_full_memory_has_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = SpillStore(tmp_path, least=1)
    before = spilled_copy(torch.ones(4), shelf)

    def full(descriptor: int, at: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    later = spilled_copy(torch.full((4,), 2.0), shelf)
    assert isinstance(before, DiskTensor)
    assert torch.equal(in_memory(before), torch.ones(4))
    assert not isinstance(later, DiskTensor)
    assert torch.equal(later, torch.full((4,), 2.0))
