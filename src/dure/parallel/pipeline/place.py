"""Where in a model something happens: module, file, line and what is written there.

    module decoder.layers.0 at opt.py:123, `if torch.rand([]) < self.layerdrop:`

Torch's own lines are left out, where there are others: nobody can change them.
"""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

Line = tuple[FrameType, int]
"""A frame, and the number of the line at which it is."""

_PRINTED = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
_PYTHON = sysconfig.get_path("stdlib")
_HERE = str(Path(__file__).parent)


def place_of(error: BaseException, model: nn.Module) -> str | None:
    """Where in the model an error was raised; None if that was not in the model."""
    return _told(_lines_of(error), model)


def modules_of(error: BaseException, model: nn.Module) -> list[str]:
    """The names of the modules in whose code an error was raised, the innermost last."""
    return _modules(_lines_of(error), model)


def modules_here(model: nn.Module) -> list[str]:
    """The names of the modules whose code called the caller, the innermost last."""
    return _modules(_lines_here(), model)


def place_in(stack: str, name: str) -> str:
    """The innermost line of the user's in a stack that is printed as Python does it.

    name: of the module. The module alone where no line is the user's.
    """
    lines = [(file, int(number)) for file, number in _PRINTED.findall(stack)]
    own = [(file, number) for file, number in lines if _is_users_file(file)]
    return _written(name, *own[-1]) if own else _named(name)


def place_here(model: nn.Module) -> str | None:
    """Where in the model the caller was called from; None if it was not."""
    return _told(_lines_here(), model)


def _lines_here() -> list[Line]:
    """Of the caller's caller and all around it, the innermost last."""
    frame = sys._getframe(2)
    return [*_outside(frame), (frame, frame.f_lineno)]


def place_where(changes: Callable[[], bool], run: Callable[[], Any], model: nn.Module) -> str:
    """Where in the model's code `changes` begins to hold while `run` calls the model.

    Only the model itself is named where no line can be told. Slow: every line is looked at.
    """
    last: list[Line] = []
    found: list[str | None] = []

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if not found and changes():
            # It was the line before, which has just been done.
            found.append(_told(last, model))
        last[:] = [*_outside(frame), (frame, frame.f_lineno)]
        return look

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return look if _is_users(frame) and not found else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    except Exception:  # what it does is asked here, and not whether it fails
        pass
    finally:
        sys.settrace(before)
    if not found and changes():
        found.append(_told(last, model))
    return (found[0] if found else None) or module_at(model, "")


def module_at(model: nn.Module, name: str) -> str:
    """A module with its class, and where the forward of that class is written."""
    kind = type(model.get_submodule(name))
    code = getattr(kind.forward, "__code__", None)
    at = f" at {Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""
    return f"{_named(name)} ({kind.__name__}{at})"


def _lines_of(error: BaseException) -> list[Line]:
    """Of the error and of those that it was raised from, the innermost last."""
    cause = error.__cause__ or error.__context__
    lines = []
    trace = error.__traceback__
    while trace is not None:
        lines.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    # The first error is the one that was raised in the model.
    inner = _lines_of(cause) if cause is not None else []
    return [*lines, *inner]


def _outside(frame: FrameType) -> list[Line]:
    """The frames around one, the outermost first."""
    lines = []
    around = frame.f_back
    while around is not None:
        lines.append((around, around.f_lineno))
        around = around.f_back
    return lines[::-1]


def _modules(lines: Iterable[Line], model: nn.Module) -> list[str]:
    """The names of the modules whose code these lines are, in their order."""
    names = {id(module): name for name, module in model.named_modules()}
    own = (names.get(id(module_of(frame))) for frame, _ in lines)
    return list(dict.fromkeys(name for name in own if name is not None))


def _told(lines: Iterable[Line], model: nn.Module) -> str | None:
    """The innermost line of a module's code that is the user's; else of torch's modules."""
    names = {id(module): name for name, module in model.named_modules()}
    inside: str | None = None
    users: str | None = None
    torchs: str | None = None
    for frame, number in lines:
        own = module_of(frame)
        inside = names.get(id(own), inside)
        # Before the model was called there is nothing of it.
        if inside is None or frame.f_code.co_filename.startswith(_HERE):
            continue
        if _is_users(frame):
            users = _written(inside, frame.f_code.co_filename, number)
        elif own is not None and id(own) in names and frame.f_code.co_name != "_call_impl":
            torchs = _written(inside, frame.f_code.co_filename, number)
    return users or torchs


def module_of(frame: FrameType) -> Any:
    """What the method is called of, whose frame this is: the first argument, whatever its name."""
    code = frame.f_code
    own: Any = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    # While it traces, torch stands in for a module by another object.
    return own.get_base() if hasattr(type(own), "get_base") else own


def _is_users(frame: FrameType) -> bool:
    return _is_users_file(frame.f_code.co_filename)


def _is_users_file(file: str) -> bool:
    of_python = file.startswith(_PYTHON) and not file.startswith(f"{_PYTHON}/site-packages")
    return not (file.startswith((_TORCH, _HERE, "<frozen")) or of_python)


def _written(name: str, file: str, number: int) -> str:
    source = " ".join(linecache.getline(file, number).split())
    at = f"{_named(name)} at {Path(file).name}:{number}"
    return f"{at}, `{source}`" if source else at


def _named(name: str) -> str:
    return f"module {name}" if name else "the model itself"
