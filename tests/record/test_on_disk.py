"""Tensors that lie in files: what is written is read, and only what is asked for."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import Tensor

from dure.record import disk_tensors
from dure.record.disk_tensors import (
    DiskTensor,
    DiskTensors,
    OpenFile,
    elements,
    forms_of,
    in_memory,
    leaves_of,
    put,
    run_of,
)
from dure.record.weights import DTYPES, TensorFile, tensors_in, weights_to_bytes

KINDS = [dtype for dtype in [*DTYPES, torch.complex128] if "float8" not in str(dtype)]
TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(KINDS),
    st.integers(0, 99),
)


def written(tensors: dict[str, Tensor], folder: str | Path) -> dict[str, DiskTensor]:
    path = Path(folder) / "tensors.safetensors"
    path.write_bytes(weights_to_bytes(tensors))
    return tensors_in(path)


def equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


@given(st.dictionaries(st.text(), TENSORS, max_size=4))
def test_what_is_written_is_read_in_each_way(tensors: dict[str, Tensor]) -> None:
    with TemporaryDirectory() as folder:
        leaves = written(tensors, folder)
        assert forms_of(leaves_of(leaves)) == [
            form for name in leaves for form in forms_of({name: tensors[name]})
        ]
        mapped = DiskTensors(leaves)
        assert mapped.keys() == tensors.keys()
        assert len(mapped) == len(tensors)
        for name, tensor in tensors.items():
            assert equal(leaves[name].tensor(), tensor)
            assert equal(mapped[name], tensor)
            assert leaves[name].nbytes == tensor.nbytes
            assert leaves[name].dim() == tensor.dim()
            half = tensor.numel() // 2
            assert equal(elements(leaves[name], half, tensor.numel()), tensor.reshape(-1)[half:])
        # A file of what lies in a file has the same bytes.
        assert bytes(TensorFile(mapped)) == bytes(TensorFile(leaves)) == weights_to_bytes(tensors)


def empty(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> DiskTensor:
    return DiskTensor(OpenFile(os.open(path, os.O_RDWR | os.O_CREAT)), 4096, dtype, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_runs_lie_where_they_were_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(disk_tensors, "PIECE", 48)
    values = torch.randn(7, 9).to(dtype)
    leaf = empty(tmp_path / "file", dtype, (7, 9))
    memory = torch.zeros(7, 9, dtype=dtype)
    for start, stop in [(40, 63), (0, 5), (5, 40)]:
        for place in (leaf, memory):
            put(run_of(place, start, stop), 0, values.view(-1)[start:stop])
    assert equal(in_memory(leaf), values)
    assert equal(in_memory(memory), values)
    assert max(map(len, leaf.pieces())) <= 48
    assert b"".join(leaf.pieces()) == bytes(TensorFile({"": values}))[-values.nbytes :]


def test_who_changes_a_mapped_tensor_changes_no_file(tmp_path: Path) -> None:
    leaves = written({"a": torch.arange(5.0)}, tmp_path)
    DiskTensors(leaves)["a"].zero_()
    assert leaves["a"].tensor().tolist() == [0, 1, 2, 3, 4]


def test_in_another_process_they_are_tensors(tmp_path: Path) -> None:
    here = DiskTensors(written({"a": torch.arange(5.0)}, tmp_path))
    there = pickle.loads(pickle.dumps(here))
    assert type(there) is dict
    assert torch.equal(there["a"], torch.arange(5.0))


def test_a_file_that_was_removed_is_read_as_long_as_it_is_known(tmp_path: Path) -> None:
    leaves = written({"a": torch.arange(5.0)}, tmp_path)
    (tmp_path / "tensors.safetensors").unlink()
    assert leaves["a"].tensor().tolist() == [0, 1, 2, 3, 4]


def test_what_is_no_such_file_or_ends_too_early_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tensors.safetensors"
    with pytest.raises(OSError, match="tensors"):
        tensors_in(path)
    whole = weights_to_bytes({"a": torch.arange(5.0)})
    for damaged in (b"", b"\x00" * 9, whole[:-1], whole + b"\x00", b"[" * 99):
        path.write_bytes(damaged)
        with pytest.raises((SafetensorError, ValueError)):
            tensors_in(path)
    path.write_bytes(whole)
    leaf = tensors_in(path)["a"]
    path.write_bytes(whole[:-1])
    with pytest.raises(OSError, match="ends before"):
        leaf.tensor()
