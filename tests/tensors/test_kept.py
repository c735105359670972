"""Python state of a model is found; what cannot be looked at ends no run."""

from __future__ import annotations

import collections
import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dure.tensors.python_state import changes, python_state_of


class Lazy(Mapping[str, int]):
    """Entries are computed when they are asked for, and one cannot be."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[str]:
        return iter(("a", "b"))

    def __getitem__(self, key: str) -> int:
        raise ImportError(f"{key} needs a package that is not installed")


class LazyDict(dict[str, int]):
    def items(self) -> Any:
        raise ImportError("the entries need a package that is not installed")


class Unbound:
    """A proxy without its context."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("working outside of a context")

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise RuntimeError


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


REGISTRY = Lazy()


class Net(nn.Module):
    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.held = held
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layer(inputs)
        return result


def changed_by(change: Any, held: Any) -> list[str]:
    model = Net(held)
    before = python_state_of(model, [])
    change(held)
    return list(changes(before, python_state_of(model, [])))


@pytest.mark.parametrize("make", [Lazy, LazyDict, lambda: [Lazy(), Unbound()]])
def test_what_cannot_be_looked_at_is_passed_over(make: Any) -> None:
    assert changed_by(lambda held: None, make()) == []
    held = [make(), [1]]
    assert changed_by(lambda held: held[1].append(2), held)


@pytest.mark.parametrize(
    ("held", "change"),
    [
        (Lazy(), lambda held: setattr(held, "asked", 1)),
        (LazyDict(a=1), lambda held: held.update(a=2)),
        (LazyDict(a=1), lambda held: setattr(held, "more", 2)),
        (collections.UserDict(a=1), lambda held: held.update(a=2)),
        (collections.ChainMap({"a": 1}), lambda held: held.update(a=2)),
        (collections.Counter("a"), lambda held: held.update("a")),
        (collections.deque([1]), lambda held: held.append(2)),
        (Slotted(), lambda held: setattr(held, "value", 1)),
    ],
)
def test_what_changes_is_found(held: Any, change: Any) -> None:
    assert changed_by(change, held)


def test_a_view_of_a_dict_is_looked_at_as_the_dict() -> None:
    content = {"a": 1}
    assert changed_by(lambda held: content.update(a=2), types.MappingProxyType(content))


LIBRARY = """
import torch
CALLS = []
class Layer(torch.nn.Linear):
    seen = 0
    def forward(self, inputs):
        Layer.seen += 1
        CALLS.append(1)
        return super().forward(inputs)
"""


@pytest.mark.parametrize("is_library", [True, False])
def test_what_a_library_of_the_python_path_keeps_for_itself_is_not_the_model_s(
    is_library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library_of_layers.py").write_text(LIBRARY)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    if is_library:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module = importlib.import_module("library_of_layers")
    monkeypatch.delitem(sys.modules, "library_of_layers")
    monkeypatch.setitem(sys.modules, "library_of_layers", module)
    model = Net()
    model.layer = module.Layer(2, 2)
    before = python_state_of(model, [])
    model(torch.ones(1, 2))
    assert bool(list(changes(before, python_state_of(model, [])))) is not is_library
    # A model whose own class is written there is the user's, as far as anybody knows.
    begun = python_state_of(model.layer, [])
    model(torch.ones(1, 2))
    assert list(changes(begun, python_state_of(model.layer, [])))
