"""Tensors in safetensors files are read where they are touched, and what is damaged is said."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.errors import DataError
from dure.memory.mapped import is_mapped, release_pages
from dure.memory.weight_files import digest_of, stored_in
from dure.record.weights import DTYPES, weights_to_bytes

dtypes = st.sampled_from([*DTYPES, torch.complex128])
shapes = st.lists(st.integers(0, 4), max_size=3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(dtypes, shapes), max_size=5), st.integers(0, 9), st.integers(0, 3))
def test_every_tensor_comes_back_and_what_is_written_stays_out_of_the_file(
    tmp_path_factory, kinds, seed, shift
):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"t.{number}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for number, (dtype, shape) in enumerate(kinds)
    }
    content = weights_to_bytes(tensors)
    # Spaces after the header put elements where those of their size do not begin.
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length] + b" " * shift
    file = tmp_path_factory.mktemp("files") / "some.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    before = file.read_bytes()
    stored = stored_in(file)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = stored[name].read()
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert (stored[name].values, stored[name].shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8)) if read.ndim else True
        assert torch.equal(read.to(torch.complex128), tensor.to(torch.complex128))
        read.zero_()
    assert file.read_bytes() == before


def test_a_view_is_read_by_pages_and_keeps_what_is_written(tmp_path: Path) -> None:
    file = tmp_path / "large.safetensors"
    large = torch.arange(1 << 22, dtype=torch.float32).view(1 << 12, 1 << 10)
    file.write_bytes(weights_to_bytes({"large": large}))
    view = stored_in(file)["large"].read()
    assert is_mapped(view)
    assert _resident(view) == 0
    assert torch.equal(view[100:104], large[100:104])
    # The system reads a little around what is touched.
    assert 0 < _resident(view) <= 1 << 22
    view[100:104] += 1
    release_pages([view])
    assert torch.equal(view[100:104], large[100:104] + 1)
    assert torch.equal(view[104:], large[104:])
    assert torch.equal(stored_in(file)["large"].read(), large)


def _resident(tensor: torch.Tensor) -> int:
    """Bytes of a mapping that are in memory for this process."""
    address = tensor.data_ptr() - tensor.data_ptr() % mmap.PAGESIZE
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(int(one.split()[1]) * 1024 for one in lines if one.startswith("Rss:"))
    raise AssertionError("there is no such mapping")


def test_folders_and_indexes_stand_for_the_same_tensors(tmp_path: Path) -> None:
    first, second = {"a": torch.ones(2)}, {"b": torch.zeros(3), "c": torch.ones(())}
    (tmp_path / "m-1.safetensors").write_bytes(weights_to_bytes(first))
    (tmp_path / "m-2.safetensors").write_bytes(weights_to_bytes(second))
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert [*stored_in(tmp_path)] == [*stored_in(index)] == ["a", "b"]
    assert digest_of(tmp_path) == digest_of(index) != digest_of(tmp_path / "m-1.safetensors")
    run = tmp_path / "run"
    for step in ("00000002", "00000010"):
        (run / "checkpoint" / step).mkdir(parents=True)
        value = torch.full((1,), float(step))
        file = run / "checkpoint" / step / "model.safetensors"
        file.write_bytes(weights_to_bytes({"w": value}))
    # The newest checkpoint, until there is the trained model.
    assert float(stored_in(run)["w"].read()) == 10
    (run / "model.safetensors").write_bytes(weights_to_bytes({"w": torch.full((1,), 11.0)}))
    assert float(stored_in(run)["w"].read()) == 11


@pytest.mark.parametrize(
    ("files", "asked", "complaint"),
    [
        ({}, "gone.safetensors", "cannot read the weights .*gone.safetensors: No such file"),
        ({"a.safetensors": b"x"}, "a.safetensors", "is not a safetensors file, or is damaged"),
        ({"pytorch_model.bin": b""}, "pytorch_model.bin", "is a pickle, which could run code"),
        ({"pytorch_model.bin": b""}, ".", "no weights in safetensors files; pytorch_model.bin is"),
        ({}, ".", "has no weights in safetensors files"),
        (
            {"a.safetensors": b"", "b.safetensors": b""},
            ".",
            "several files of weights: name one of a.safetensors, b.safetensors",
        ),
        ({"m.safetensors.index.json": b"{}"}, ".", "is not an index .*: it has no weight_map"),
        (
            {"m.safetensors.index.json": b'{"weight_map": {"a": "../a.safetensors"}}'},
            ".",
            "a is in '../a.safetensors', which is not a file name",
        ),
        (
            {
                "m.safetensors.index.json": b'{"weight_map": {"b": "a.safetensors"}}',
                "a.safetensors": weights_to_bytes({"a": torch.ones(1)}),
            },
            "m.safetensors.index.json",
            "names b, which .*a.safetensors does not contain",
        ),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, files, asked, complaint) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        stored_in(tmp_path / asked)
