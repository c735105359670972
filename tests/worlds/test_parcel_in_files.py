"""What a rank gives back: large parcels lie on a disk, and so do tensors that lie in files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dure.memory.mapped import DiskError
from dure.record.disk_tensors import DiskTensors
from dure.record.weights import tensors_in, weights_to_bytes
from dure.worlds.processes import parcel


def lies_in(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def there(descriptor: int) -> Any:
    try:
        return parcel.unpack(descriptor)
    finally:
        os.close(descriptor)


def test_a_large_parcel_lies_on_a_disk_and_a_small_one_in_memory() -> None:
    content = {"a": torch.arange(50_000.0), "b": [1, "two"]}
    small, large = parcel.pack(content), parcel.pack(content, memory=100_000)
    assert ["memfd" in lies_in(one) for one in (small, large)] == [True, False]
    for found in map(there, (small, large)):
        assert torch.equal(found["a"], content["a"])  # type: ignore[arg-type]
        assert found["b"] == content["b"]


def test_tensors_that_lie_in_a_file_are_tensors_where_they_arrive(tmp_path: Path) -> None:
    tensors = {"large": torch.arange(50_000.0), "small": torch.ones(3)}
    (tmp_path / "file").write_bytes(weights_to_bytes(tensors))
    found = there(parcel.pack(DiskTensors(tensors_in(tmp_path / "file")), memory=1))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    # They are the receiver's own.
    found["large"].zero_()


def test_without_a_disk_it_lies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise DiskError("none is a folder on a disk")

    monkeypatch.setattr(parcel, "Disk", nothing)
    descriptor = parcel.pack([1], memory=0)
    assert "memfd" in lies_in(descriptor)
    assert there(descriptor) == [1]
