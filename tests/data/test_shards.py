"""Shards on a disk give what their files hold, in every format, in windows and beside them."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import dure
from dure.data.shards import windows
from dure.data.shards.windows import WindowCache
from dure.errors import DataError

SIZES = (7, 1, 12)
ROWS = sum(SIZES)
INPUTS = torch.arange(ROWS * 6, dtype=torch.float32).view(ROWS, 2, 3) / 7
TARGETS = torch.arange(ROWS) % 3


def pieces(sizes: tuple[int, ...] = SIZES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(INPUTS.split(sizes), TARGETS.split(sizes), strict=True))


def safetensors(folder: Path) -> None:
    for number, (inputs, targets) in enumerate(pieces()):
        columns = {"inputs": inputs.contiguous(), "targets": targets.contiguous()}
        save_file(columns, folder / f"{number}.safetensors", {"made": "here"})


def npy(folder: Path) -> None:
    for number, (inputs, targets) in enumerate(pieces()):
        numpy.save(folder / f"{number}.inputs.npy", inputs.numpy())
        numpy.save(folder / f"{number}.targets.npy", targets.numpy())


def _tables() -> list[Any]:
    pa = pytest.importorskip("pyarrow")
    return [
        pa.table(
            {
                "inputs": pa.array(inputs.tolist(), pa.list_(pa.list_(pa.float32(), 3))),
                "targets": targets.numpy(),
                "name": ["somebody"] * len(targets),
            }
        )
        for inputs, targets in pieces()
    ]


def arrow_file(folder: Path) -> None:
    import pyarrow as pa

    for number, table in enumerate(_tables()):
        with pa.ipc.new_file(str(folder / f"{number}.arrow"), table.schema) as file:
            file.write_table(table, max_chunksize=5)


def arrow_stream(folder: Path) -> None:
    import pyarrow as pa

    for number, table in enumerate(_tables()):
        with pa.ipc.new_stream(str(folder / f"{number}.arrow"), table.schema) as file:
            file.write_table(table, max_chunksize=5)


def parquet(folder: Path) -> None:
    tables = _tables()
    from pyarrow import parquet as writer

    for number, table in enumerate(tables):
        writer.write_table(table, folder / f"{number}.parquet", row_group_size=4)


FORMATS: dict[str, Callable[[Path], None]] = {
    one.__name__: one for one in (safetensors, npy, arrow_file, arrow_stream, parquet)
}


@pytest.fixture(params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param.startswith(("arrow", "parquet")):
        pytest.importorskip("pyarrow")
    FORMATS[request.param](tmp_path)
    return tmp_path


def check(shards: dure.Shards, indices: torch.Tensor) -> None:
    inputs, targets = shards.batch(indices)
    assert torch.equal(inputs, INPUTS[indices])
    assert inputs.dtype == INPUTS.dtype
    assert torch.equal(targets, TARGETS[indices])


def test_every_format_gives_its_rows(folder):
    shards = dure.Shards(folder, window=6)
    shards = pickle.loads(pickle.dumps(shards))
    assert len(shards) == ROWS
    assert torch.equal(shards.labels(), TARGETS)
    for indices in ([0], [19], list(range(ROWS)), [6, 7, 8], [3, 19, 3, 8], []):
        check(shards, torch.tensor(indices, dtype=torch.int64))
    for epoch in range(2):
        order = shards.order()(0, epoch, 0)
        assert sorted(order.tolist()) == list(range(ROWS))
        for batch in order.split(3):
            check(shards, batch)
        # Beside the plan: from first to last, as in an evaluation.
        check(shards, torch.arange(5, 15))
    assert shards.to(torch.float32) is shards
    assert shards.to(torch.float64).batch(torch.tensor([2]))[0].dtype == torch.float64


@given(st.integers(1, 25), st.integers(1, 6), st.randoms(use_true_random=False))
def test_windows_give_right_rows_whatever_is_asked_for_when(made, window, batch, random):
    shards = made(window)
    for epoch in range(2):
        order = shards.order()(1, epoch, 0)
        batches = list(order.split(batch))
        # Loaders come a little out of turn, and somebody looks at something else.
        for first in range(0, len(batches), 3):
            some = batches[first : first + 3]
            random.shuffle(some)
            for one in some:
                check(shards, one)
        check(shards, torch.tensor([random.randrange(ROWS)]))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    safetensors(folder)
    return lambda window: dure.Shards(folder, window=window)


def test_a_part_is_visited_whole_and_nothing_else_is_read(made):
    shards = made(4)
    part = torch.tensor([0, 2, 13, 14, 15, 16, 17])
    order = shards.order(part)(0, 0, 2)
    assert sorted(order.tolist()) == list(range(len(part)))
    for batch in part[order].split(2):
        check(shards, batch)


def test_each_block_is_read_once_an_epoch_and_few_windows_stay(made, monkeypatch):
    read: list[int] = []
    begun = windows._Window.__init__

    def count(self, blocks, *rest):
        read.extend(blocks.tolist())
        begun(self, blocks, *rest)

    monkeypatch.setattr(windows._Window, "__init__", count)
    shards = made(4)
    kept: WindowCache = shards._windows
    for epoch in range(3):
        read.clear()
        for batch in shards.order()(0, epoch, 0).split(3):
            check(shards, batch)
            assert len(kept._kept) <= windows.KEPT
        assert sorted(read) == list(range(len(shards.arrangement().blocks)))


def test_columns_are_named_and_have_a_structure(tmp_path):
    inputs = {"a": INPUTS[:4].contiguous(), "b": TARGETS[:4].contiguous()}
    save_file({**inputs, "y": torch.ones(4)}, tmp_path / "0.safetensors")
    shards = dure.Shards(tmp_path, inputs={"one": "a", "two": "b"}, targets=("y", "b"))
    given, (first, second) = shards.batch(torch.tensor([3, 1]))
    assert torch.equal(given["one"], INPUTS[[3, 1]])
    assert torch.equal(given["two"], second)
    assert torch.equal(first, torch.ones(2))
    assert shards.labels() is None
    assert dure.Shards(tmp_path, "a", "y").labels() is None


def test_a_dtype_that_numpy_has_not_is_read(tmp_path):
    save_file({"inputs": INPUTS.bfloat16(), "targets": TARGETS}, tmp_path / "0.safetensors")
    inputs, _ = dure.Shards(tmp_path).batch(torch.tensor([4, 2]))
    assert torch.equal(inputs, INPUTS.bfloat16()[[4, 2]])


def _write(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)


def _header(told: dict[str, Any]) -> bytes:
    text = json.dumps(told).encode()
    return len(text).to_bytes(8, "little") + text


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "no shards": ({}, "no shards"),
    "two kinds": ({"a.safetensors": b"", "a.inputs.npy": b""}, "of one kind"),
    "no header": ({"a.safetensors": b"\xff" * 20}, "not a safetensors file"),
    "not a JSON": ({"a.safetensors": (2).to_bytes(8, "little") + b"xx"}, "not a safetensors file"),
    "does not describe a tensor": (
        {"a.safetensors": _header({"inputs": {"dtype": "F32"}})},
        "does not describe a tensor",
    ),
    "no column": ({"a.safetensors": _header({"x": ONE}) + b"\0" * 8}, "no column inputs, targets"),
    "too short": (
        {"a.safetensors": _header({"inputs": ONE, "targets": ONE})},
        "the number of bytes of",
    ),
    "no row": (
        {
            "a.safetensors": _header({"inputs": {**ONE, "shape": [], "data_offsets": [0, 4]}})
            + b"\0" * 4
        },
        "single number",
    ),
    "not an npy": ({"a.inputs.npy": b"nothing of it", "a.targets.npy": b""}, "not an npy file"),
    "no name": ({"inputs.npy": b""}, "NAME.COLUMN.npy"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_refused_by_name(what, tmp_path):
    files, message = BROKEN[what]
    for name, content in files.items():
        _write(tmp_path, name, content)
    with pytest.raises(DataError, match=message):
        dure.Shards(tmp_path)


def test_what_does_not_fit_together_is_refused(tmp_path):
    numpy.save(tmp_path / "0.inputs.npy", numpy.zeros((3, 2)))
    numpy.save(tmp_path / "0.targets.npy", numpy.zeros(4))
    with pytest.raises(DataError, match="different lengths"):
        dure.Shards(tmp_path)
    numpy.save(tmp_path / "0.targets.npy", numpy.zeros(3))
    numpy.save(tmp_path / "1.inputs.npy", numpy.zeros((3, 5)))
    numpy.save(tmp_path / "1.targets.npy", numpy.zeros(3))
    with pytest.raises(DataError, match=r"shape \[5\].*shape \[2\]"):
        dure.Shards(tmp_path)
    for array, message in [
        (numpy.zeros((3, 2), order="F"), "column-major"),
        (numpy.zeros((3, 2), dtype=">f4"), "torch does not support"),
        (numpy.array(["a"] * 3), "torch does not support"),
    ]:
        numpy.save(tmp_path / "1.inputs.npy", array)
        with pytest.raises(DataError, match=message):
            dure.Shards(tmp_path)
    with pytest.raises(DataError, match="no folder of shards"):
        dure.Shards(tmp_path / "elsewhere")
    for bad in ({"window": 0}, {"inputs": 3}):
        with pytest.raises(ValueError, match=r"window|columns"):
            dure.Shards(tmp_path, **bad)


def test_a_file_that_becomes_shorter_is_named(made, tmp_path):
    safetensors(tmp_path)
    shards = dure.Shards(tmp_path, window=4)
    path = tmp_path / "2.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"2\.safetensors has become shorter"):
        shards.batch(torch.tensor([ROWS - 1]))
    batches = shards.order()(0, 0, 0).split(3)
    with pytest.raises(DataError, match=r"2\.safetensors has become shorter"):
        [shards.batch(batch) for batch in batches]


def test_columns_of_arrow_that_are_no_tensors_are_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet as writer

    uneven = pa.table(
        {"inputs": [[1.0], [2.0, 3.0]], "targets": [0, 1], "name": ["a", "b"], "hole": [1, None]}
    )
    writer.write_table(uneven, tmp_path / "0.parquet")
    for column, message in [("name", "type string"), ("hole", "is null")]:
        with pytest.raises(DataError, match=message):
            # The first row of each is what it seems; the second is seen when it is read.
            dure.Shards(tmp_path, column, "targets").batch(torch.tensor([0, 1]))
    with pytest.raises(DataError, match="different lengths"):
        dure.Shards(tmp_path).batch(torch.tensor([0, 1]))
    _write(tmp_path, "0.parquet", b"nothing of it")
    with pytest.raises(DataError, match="not a Parquet file"):
        dure.Shards(tmp_path)


ENDS = """
import sys, torch, dure
from dure.data.batches import Batches

train = dure.Shards(sys.argv[1], window=4096)
batches = Batches(len(train), 8, 0, order=train.order())
train.batch(batches.at(0))
"""


def test_a_process_ends_well_while_a_window_is_read(tmp_path: Path) -> None:
    for number in range(4):
        columns = {"inputs": torch.zeros(4096, 2048), "targets": torch.zeros(4096)}
        save_file(columns, tmp_path / f"{number}.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
