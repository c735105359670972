"""The API reference has every public name, and what it says of each is all that can be given."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dure
from api_fields import listed

API = Path(__file__).parents[1] / "docs" / "api"
INIT = Path(dure.__file__).read_text()
SHOWN = re.compile(r"^::: (\S+)$", re.MULTILINE)
BASES = {"dure.federated.strategy.Federated", "dure.split.strategy.Split"}
"""What several strategies have in common; users never make one."""
WHOLE = {"dure.errors", "dure.tasks.models"}
"""Modules whose pages show everything in them."""
RETURNED = {"dure.collectives.Handle", "dure.parameter_server.Worker"}
"""Classes whose instances are returned, and made by nobody else."""
BUILT_IN = {"dure.StopRun"}
"""What takes whatever an exception takes, and has no signature."""


def resolved(name: str) -> Any:
    """What a dotted name stands for."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def is_module(name: str) -> bool:
    """Whether a module has this dotted name, whatever else has it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def public() -> dict[str, Any]:
    """Every public name, with what it stands for: those of dure, and of its modules' `__all__`."""
    names: dict[str, Any] = {}
    for name in dure.__all__:
        value = getattr(dure, name)
        if isinstance(value, ModuleType):
            names |= {
                f"{value.__name__}.{inner}": getattr(value, inner)
                for inner in getattr(value, "__all__", ())
            }
        else:
            names[f"dure.{name}"] = value
    return names


CALLABLE = {
    name: value
    for name, value in public().items()
    if callable(value) and name not in RETURNED | BUILT_IN
}


def described(value: Any) -> str:
    """What is said of a function, or of a class, its bases and how it is made."""
    if not inspect.isclass(value):
        return value.__doc__ or ""
    said = []
    for kind in value.__mro__[:-1]:
        said += [kind.__doc__ or "", getattr(vars(kind).get("__init__"), "__doc__", "") or ""]
    return " ".join(said)


def test_every_public_name_is_on_one_page() -> None:
    """If not: it belongs to one of the pages in docs/api."""
    shown = [name for page in API.glob("*.md") for name in SHOWN.findall(page.read_text())]
    assert sorted(shown) == sorted([*public(), *BASES, *WHOLE])
    assert all(resolved(name) is not None for name in shown)


def test_a_function_that_has_the_name_of_its_module_is_shown_with_it() -> None:
    """The reference finds the module first: it has to be told of the function."""
    text = (API / "collectives.md").read_text()
    same = [name for name in public() if is_module(name)]
    assert same
    for name in same:
        assert f"::: {name}\n    options: {{members: [{name.rpartition('.')[2]}]}}\n" in text, name


def test_editors_are_told_of_every_name() -> None:
    """They do not run `__getattr__`, and nor does what makes the reference."""
    told = re.findall(r"^    from dure\S+ import .*?(\w+) as \1", INIT, re.MULTILINE)
    wrapped = re.findall(r"^        (\w+) as \1,$", INIT, re.MULTILINE)
    modules = {name for name in dure.__all__ if isinstance(getattr(dure, name), ModuleType)}
    assert sorted([*told, *wrapped]) == sorted(set(dure.__all__) - modules)


@pytest.mark.parametrize("name", CALLABLE)
def test_what_can_be_given_is_described(name: str) -> None:
    said = described(CALLABLE[name])
    given = [one for one in inspect.signature(CALLABLE[name]).parameters if one != "kwargs"]
    assert said
    assert [one for one in given if not re.search(rf"\b{one}\b", said)] == []


@pytest.mark.parametrize(
    "name", [name for name, value in CALLABLE.items() if inspect.isfunction(value)]
)
def test_what_a_function_raises_itself_is_described(name: str) -> None:
    raised = re.findall(r"\braise (\w+Error)\b", inspect.getsource(CALLABLE[name]))
    assert [error for error in raised if error not in described(CALLABLE[name])] == []


def test_arguments_become_a_list_and_prose_stays() -> None:
    told = listed(
        "Does it.\n\nstop: by default\n    ten. out, seed: both. Raises ValueError.\n\n    a: b",
        {"stop", "out", "seed", "a"},
    )
    assert told == (
        "Does it.\n\n- **stop**: by default ten.\n- **out, seed**: both.\n\n"
        "Raises ValueError.\n\n    a: b"
    )
    prose = "Ends as it was.\n\nwhere: nothing of that name."
    assert listed(prose, {"stop"}) == prose
