"""Trees in files: what is written is read again, and what is damaged is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dure.deploy.tree_files import TreeFiles
from dure.errors import RunFolderError

TREE: dict[str, Any] = {
    "total": torch.arange(5, dtype=torch.int32),
    "pairs": [(1, torch.tensor([1 + 2j], dtype=torch.complex128))],
    "lost": {7: "it left", 8: None},
    "numbers": [0.1, math.inf, True],
    "empty": torch.empty(0, 3),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("tree", [TREE, {}, {"plain": 1}])
def test_a_tree_comes_back_as_it_was(tree: dict[str, Any], tmp_path: Path) -> None:
    trees = TreeFiles(tmp_path / "once")
    digest = trees.write(3, tree)
    assert same(TreeFiles(tmp_path / "once").read(3, digest), tree)


def test_a_file_that_is_missing_or_damaged_or_another_one_is_named(tmp_path: Path) -> None:
    trees = TreeFiles(tmp_path / "once")
    digest, other = trees.write(3, TREE), trees.write(4, {"plain": 1})
    with pytest.raises(RunFolderError, match=r"5\.safetensors"):
        trees.read(5, digest)
    with pytest.raises(RunFolderError, match=r"3\.safetensors"):
        trees.read(3, other)
    path = tmp_path / "once" / "3.safetensors"
    content = bytearray(path.read_bytes())
    for place in (0, len(content) // 2, len(content) - 1):
        damaged = content.copy()
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(RunFolderError, match=r"3\.safetensors is damaged"):
            trees.read(3, digest)
    path.write_bytes(content[:-1])
    with pytest.raises(RunFolderError, match=r"3\.safetensors is damaged"):
        trees.read(3, digest)


def test_what_no_checkpoint_can_have_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    trees = TreeFiles(tmp_path / "once")
    with pytest.raises(TypeError, match="bytes"):
        trees.write(0, {"key": b"secret"})
    assert not (tmp_path / "once").exists()


def test_files_are_removed_by_their_numbers(tmp_path: Path) -> None:
    trees = TreeFiles(tmp_path / "once")
    for number in range(12):
        trees.write(number, {"plain": number})
    (tmp_path / "once" / ".11.safetensors.77").write_bytes(b"half of one")
    (tmp_path / "once" / "notes.txt").write_bytes(b"somebody else's")
    trees.delete([0, 1, 99])
    trees.delete_from(10)
    trees.keep_only([3, 9])
    left = sorted(path.name for path in (tmp_path / "once").iterdir())
    assert left == ["3.safetensors", "9.safetensors", "notes.txt"]
