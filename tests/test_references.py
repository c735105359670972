"""References to what is a user's own: found by file or module, and found again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from dure.data.partition import IID, Partition
from dure.references import (
    file_of,
    following_references,
    is_reference,
    load,
    reference_of,
    resolved,
)

OWN = """
from dataclasses import dataclass
from dure.data.partition import Partition
from next_door import SHARE

@dataclass(frozen=True)
class Mine(Partition):
    share: float = SHARE

not_a_class = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "next_door.py").write_text("SHARE = 0.25\n")
    file = tmp_path / "my_parts.py"
    file.write_text(OWN)
    return file


def test_a_class_is_found_by_file_and_found_again_by_its_reference(own: Path) -> None:
    mine = load(f"{own}:Mine", Partition)
    assert mine().share == 0.25
    assert reference_of(mine) == f"{own}:Mine"
    assert load(f"{own}:Mine") is mine


def test_a_file_that_has_changed_is_run_again(own: Path) -> None:
    before = load(f"{own}:Mine")
    own.write_text(OWN.replace("= SHARE", "= 0.5"))
    assert load(f"{own}:Mine")().share == 0.5
    assert before().share == 0.25


def test_a_class_is_found_by_module(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("dure.data.partition:IID") is IID
    assert reference_of(IID) == "dure.data.partition.iid:IID"
    monkeypatch.chdir(own.parent)
    own.rename(own.with_name("parts_of_this_folder.py"))
    mine = load("parts_of_this_folder:Mine")
    # Another folder's process does not find the module by its name.
    assert reference_of(mine) == f"{own.parent}/parts_of_this_folder.py:Mine"


def test_a_module_is_found_in_a_folder_and_nowhere_else(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = own.parent / "package_of_mine"
    package.mkdir()
    (package / "parts.py").write_text(
        f"from .share import SHARE\n{OWN}".replace("next_door", ".share")
    )
    (package / "share.py").write_text("SHARE = 0.75\n")
    reference = f"{own.parent}/package_of_mine.parts:Mine"
    mine = load(reference, Partition)
    assert mine().share == 0.75
    assert reference_of(mine) == reference
    assert load(reference) is mine
    assert file_of(reference.rpartition(":")[0]) == package / "parts.py"
    monkeypatch.chdir(own.parent)
    assert resolved("./package_of_mine.parts") == reference.rpartition(":")[0]
    other = own.parent / "other"
    other.mkdir()
    with pytest.raises(ValueError, match=r"not the module in .*/other"):
        load(f"{other}/package_of_mine.parts:Mine")


def test_what_is_asked_first_decides_what_is_followed(own: Path) -> None:
    def ask(reference: str) -> str:
        if reference != "mine:Any":
            raise ValueError("not that one")
        return f"{own}:Mine"

    with following_references(ask):
        assert load("mine:Any").__name__ == "Mine"
        with pytest.raises(ValueError, match="not that one"):
            load(f"{own}:Mine")
    assert load(f"{own}:Mine").__name__ == "Mine"


def test_an_object_of_a_file_goes_to_a_process_that_has_not_loaded_it(own: Path) -> None:
    sent = cloudpickle.dumps(load(f"{own}:Mine")(share=0.75))
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).share)"
    answer = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True)
    assert answer.stdout == b"0.75\n", answer.stderr


def test_a_class_of_a_function_has_no_reference() -> None:
    class Local(Partition):
        pass

    assert reference_of(Local) is None


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{folder}/other.py:Mine", "there is no file .*other.py"),
        ("{file}:Mein", "has no 'Mein', did you mean 'Mine'"),
        ("{file}:not_a_class", "is not a class, but of type int"),
        ("{folder}/broken.py:Mine", r"broken\.py could not be loaded: ZeroDivisionError"),
        ("no_such_package.rules:Mine", "no_such_package.rules could not be imported"),
        ("dure.errors:DureError", "is not a subclass of dure.data.partition.partition.Partition"),
    ],
)
def test_what_is_not_there_is_named(own: Path, reference: str, message: str) -> None:
    (own.parent / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=message):
        load(reference.format(folder=own.parent, file=own), Partition)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("my_parts.py:Mine:0.3", True),
        ("folder/my-parts.py:Mine", True),
        ("package.module:Mine:2", True),
        ("module:Mine", True),
        ("dirichlet:0.3:10", False),
        ("label-shards:2", False),
        ("iid", False),
        ("my_parts.py", False),
    ],
)
def test_a_reference_is_told_from_a_name_and_its_values(text: str, expected: bool) -> None:
    assert is_reference(text) is expected
