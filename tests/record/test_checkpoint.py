"""Checkpoints: trees without pickle, whole or not there."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import random
import struct
import tempfile
import tracemalloc
import weakref
from functools import partial
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dure.errors import RunFolderError, RunFolderWriteError
from dure.randomness.seeds import generators_state, restore_generators
from dure.record import checkpoint
from dure.record.checkpoint import (
    CheckpointContents,
    pack_checkpoint,
    pack_tree,
    read_tree,
    save_checkpoint,
    stored,
    tree_to_bytes,
    write_atomically,
    write_tree,
)
from dure.record.weights import TensorFile, weights_to_bytes
from written import files_in, unpacked

REAL = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
]
DTYPES = [*REAL, torch.complex64, torch.complex128]
TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
LEAVES = (
    TENSORS | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS | st.just("$tensor") | st.just("$dict"), inner, max_size=3)
    ),
    max_leaves=8,
)


def there_and_back(tree):
    """Through the bytes of a checkpoint's files."""
    return unpacked(as_files(pack_checkpoint({}, tree)))[1]


def as_files(contents: CheckpointContents) -> tuple[bytes, bytes, bytes]:
    """What the three files hold."""
    weights, tensors, state = map(bytes, contents)
    return weights, tensors, state


def same(a, b) -> bool:
    """Equal in types, structure and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(TREES)
def test_a_tree_is_read_back_as_it_was_written(tree):
    assert same(there_and_back(tree), tree)


@pytest.mark.parametrize("node", [{1, 2}, object(), b"bytes", 1j, [{"deep": print}]])
def test_what_would_need_pickle_is_refused(node):
    with pytest.raises(TypeError, match="cannot be put into a checkpoint without pickle"):
        pack_tree(node)


def test_views_and_transposed_tensors_keep_their_values_alone():
    base = torch.arange(12.0).view(3, 4)
    tree = {
        "row": base[1],
        "transposed": base.T,
        "expanded": torch.ones(1).expand(3),
        "whole": base,
    }
    assert same(there_and_back(tree), {name: value.clone() for name, value in tree.items()})
    packed = weights_to_bytes({"row": base[1]})
    assert len(packed) < len(weights_to_bytes({"whole": torch.zeros(100)}))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(torch.optim.Adam, lr=0.01, amsgrad=True),
        partial(torch.optim.AdamW, lr=0.01),
    ],
)
def test_an_optimizer_goes_on_from_a_checkpoint_with_the_same_bits(make):
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, resumed = make(model.parameters()), make(other.parameters())
    for number in range(3):
        step(model, optimizer, number)
    weights, state = unpacked(as_files(pack_checkpoint(model.state_dict(), optimizer.state_dict())))
    assert same(state, optimizer.state_dict())
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, resumed, number)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(resumed.state_dict(), optimizer.state_dict())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_tied_weights_are_written_under_both_names_and_stay_tied():
    model, other = Tied(), Tied()
    weights, _ = unpacked(as_files(pack_checkpoint(model.state_dict(), {})))
    assert same(weights, {name: weights[name] for name in weights})
    assert torch.equal(weights["first.weight"], weights["second.weight"])
    other.load_state_dict(weights)
    assert other.second.weight is other.first.weight
    assert torch.equal(other.first.weight, model.first.weight)


def test_generators_go_on_where_they_were():
    def draws():
        return (
            torch.rand(3).tolist(),
            numpy.random.randn(3).tolist(),
            random.random(),
            random.gauss(0, 1),
        )

    random.gauss(0, 1)  # leaves a second number behind, as numpy's randn of an odd count does
    numpy.random.randn()
    state = there_and_back(generators_state())
    first = draws()
    restore_generators(state)
    assert draws() == first


def parts(step: int) -> CheckpointContents:
    return pack_checkpoint(
        {"w": torch.full((3,), float(step))}, {"step": step, "tensor": torch.ones(2)}
    )


def test_one_from_the_middle_of_a_step_comes_after_the_step(tmp_path):
    folder = tmp_path / "checkpoint"
    for step, past, name in [(7, 0, "00000007"), (7, 90, "00000007.00000090"), (8, 0, "00000008")]:
        save_checkpoint(folder, step, parts(step + past), past=past)
        assert [path.name for path in folder.iterdir()] == [name]
        assert files_in(folder) == as_files(parts(step + past))
        assert stored(folder).step == step


def test_the_newest_checkpoint_is_read_and_the_older_ones_are_gone(tmp_path):
    folder = tmp_path / "checkpoint"
    assert files_in(folder) is None
    save_checkpoint(folder, 7, parts(7))
    assert save_checkpoint(folder, 12, parts(12)).name == "00000012"
    assert [p.name for p in folder.iterdir()] == ["00000012"]
    assert files_in(folder) == as_files(parts(12))


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_kill_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch, call):
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, 7, parts(7))

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, call, killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(folder, 12, parts(12))
    assert files_in(folder) == as_files(parts(7))
    save_checkpoint(folder, 12, parts(12))  # what was left half written is in nobody's way
    assert files_in(folder) == as_files(parts(12))
    assert [p.name for p in folder.iterdir()] == ["00000012"]


def test_a_kill_before_the_old_checkpoint_is_removed_leaves_the_new_one(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, 7, parts(7))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", lambda *arguments, **options: None)
        save_checkpoint(folder, 12, parts(12))
    assert len(list(folder.iterdir())) == 2
    assert files_in(folder) == as_files(parts(12))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_kill_while_writing_a_file_leaves_the_old_content(tmp_path, monkeypatch, call):
    file = tmp_path / "config.json"
    write_atomically(file, b"old")

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, call, killed)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["config.json"]


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path):
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
    content = pack_checkpoint(
        {"w": torch.ones(2)}, {"optimizer": optimizer.state_dict(), "random": random.getstate()}
    )
    saved = save_checkpoint(tmp_path / "checkpoint", 1, content)
    assert sorted(p.name for p in saved.iterdir()) == [
        "model.safetensors",
        "state.json",
        "state.safetensors",
    ]
    json.loads((saved / "state.json").read_bytes())
    for file in saved.iterdir():
        with pytest.raises(
            (pickle.UnpicklingError, ValueError, EOFError, IndexError, KeyError, AttributeError)
        ):
            pickle.loads(file.read_bytes())


def test_a_checkpoint_with_a_missing_file_is_refused_by_name(tmp_path):
    saved = save_checkpoint(tmp_path / "checkpoint", 3, parts(3))
    (saved / "state.json").unlink()
    with pytest.raises(
        RunFolderError, match=r"00000003 is not a complete checkpoint: .*state\.json"
    ):
        files_in(tmp_path / "checkpoint")


def test_a_checkpoint_that_was_written_keeps_no_tensor() -> None:
    """Not even until the next collection of garbage: the state may be as large as the model."""
    state = {"weights": [torch.zeros(3)]}
    seen = weakref.ref(state["weights"][0])
    gc.disable()
    try:
        pack_checkpoint({}, state)
        del state
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(12, dtype=torch.int16).reshape(3, 4).T,
        torch.zeros(0, 2),
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3j], dtype=torch.complex64),
        torch.ones(3).to(torch.float8_e5m2),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_the_library_reads_what_is_written(tensor: torch.Tensor) -> None:
    beside = torch.zeros(3, dtype=torch.uint8)
    read = safetensors.torch.load(weights_to_bytes({"b": beside, "a": tensor}, {"said": "x"}))
    assert set(read) == {"a", "b"}
    assert read["a"].dtype == tensor.dtype
    assert read["a"].shape == tensor.shape
    assert bytes_of(read["a"]) == bytes_of(tensor)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Pieces:
    """Lets a file's pieces pass, and notes how many bytes each has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.fails_at = -1
        real = checkpoint.write_synced
        monkeypatch.setattr(
            checkpoint, "write_synced", lambda path, content: real(path, self.noted(content))
        )

    def noted(self, content):
        for piece in [content] if isinstance(content, bytes) else content:
            if len(self.sizes) == self.fails_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.sizes.append(len(piece))
            yield piece


LARGE = {f"layer{n}": torch.arange(float(300_000 + n)) for n in range(8)}
TRANSPOSED = {"t": torch.arange(4.0).reshape(2, 2).T}


def test_a_checkpoint_is_written_without_a_second_copy_of_a_tensor(tmp_path, monkeypatch) -> None:
    """Neither of the weights nor of the state: pieces are views of the tensors' own memory."""
    pieces = Pieces(monkeypatch)
    contents = pack_checkpoint(LARGE, {"moments": LARGE})
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        save_checkpoint(tmp_path, 1, contents)
        assert tracemalloc.get_traced_memory()[1] - before < 300_000
    finally:
        tracemalloc.stop()
    # A header, then tensor by tensor.
    assert sorted(pieces.sizes)[-16:] == sorted(2 * [4 * (300_000 + n) for n in range(8)])
    view = next(one for one in contents.weights if len(one) == LARGE["layer3"].nbytes)
    LARGE["layer3"][0] = 7
    assert bytes(view[:4]) == struct.pack("<f", 7)
    LARGE["layer3"][0] = 0


def test_the_files_of_a_checkpoint_are_those_that_the_library_reads(tmp_path) -> None:
    saved = save_checkpoint(tmp_path, 1, pack_checkpoint(LARGE | TRANSPOSED, [LARGE["layer2"]]))
    assert same(safetensors.torch.load_file(saved / "model.safetensors"), LARGE | TRANSPOSED)
    state = safetensors.torch.load_file(saved / "state.safetensors")
    assert same(state, {"0": LARGE["layer2"]})
    assert stored(tmp_path) is not None  # and the checksums that were counted are right


def test_a_disk_that_is_full_in_the_midst_leaves_the_old_checkpoint_and_room(
    tmp_path, monkeypatch
) -> None:
    save_checkpoint(tmp_path, 7, parts(7))
    before = files_in(tmp_path)
    pieces = Pieces(monkeypatch)
    count = len(list(pack_checkpoint(LARGE, {}).weights))
    for fails_at in (0, 1, count // 2, count, count + 1):
        pieces.sizes, pieces.fails_at = [], fails_at
        with pytest.raises(RunFolderWriteError, match=r"cannot write .*00000012: No space left"):
            save_checkpoint(tmp_path, 12, pack_checkpoint(LARGE, {}))
        assert files_in(tmp_path) == before
        assert [path.name for path in tmp_path.iterdir()] == ["00000007"]
    pieces.fails_at = -1
    save_checkpoint(tmp_path, 12, pack_checkpoint(LARGE, {}))
    assert [path.name for path in tmp_path.iterdir()] == ["00000012"]


@given(st.dictionaries(st.text(), TENSORS, max_size=4))
def test_whoever_asks_twice_gets_the_same_bytes(tensors) -> None:
    """A disk that was full for a moment is tried again."""
    file = TensorFile(tensors)
    assert b"".join(file) == b"".join(file) == weights_to_bytes(tensors)


@given(place=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255), cut=st.booleans())
def test_a_file_of_a_tree_that_has_changed_is_named(place: float, bits: int, cut: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turn.tree"
        write_tree(path, {"rows": torch.arange(40), "order": [1, 2]})
        content = bytearray(path.read_bytes())
        at = int(place * len(content))
        content[at] ^= bits
        path.write_bytes(content[:at] if cut else content)
        with pytest.raises(RunFolderError, match=r"turn\.tree is damaged"):
            read_tree(path)


def test_a_file_of_a_tree_is_read_again_also_one_without_a_checksum(tmp_path: Path) -> None:
    tree = {"rows": [1, 2], "of": "me"}
    write_tree(tmp_path / "new.tree", tree)
    (tmp_path / "old.tree").write_bytes(tree_to_bytes(tree))
    assert read_tree(tmp_path / "new.tree") == read_tree(tmp_path / "old.tree") == tree
