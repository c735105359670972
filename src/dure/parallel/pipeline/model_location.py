"""Position in a model's code at which something happens: module, file, line and source text.

    module decoder.layers.0 at opt.py:123, `if torch.rand([]) < self.layerdrop:`

Lines of torch itself are left out if there are others, because users cannot change them.
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

FrameLine = tuple[FrameType, int]
"""Frame, and the number of its current line."""

_PRINTED = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
_PYTHON = sysconfig.get_path("stdlib")
_HERE = str(Path(__file__).parent)


def place_of(error: BaseException, model: nn.Module) -> str | None:
    """Return the position in the model at which an error was raised; None outside the model."""
    return _told(_lines_of(error), model)


def modules_of(error: BaseException, model: nn.Module) -> list[str]:
    """Return the names of the modules in whose code an error was raised, the innermost last."""
    return _modules(_lines_of(error), model)


def modules_here(model: nn.Module) -> list[str]:
    """Return the names of the modules whose code called the caller, the innermost last."""
    return _modules(_lines_here(), model)


def place_in(stack: str, name: str) -> str:
    """Return the innermost line of the user's code in a stack trace in Python's format.

    name: the module's name. Without a line of the user's code the result is the module alone.
    """
    lines = [(file, int(number)) for file, number in _PRINTED.findall(stack)]
    own = [(file, number) for file, number in lines if _is_users_file(file)]
    return _written(name, *own[-1]) if own else _named(name)


def place_here(model: nn.Module) -> str | None:
    """Return the position in the model from which the caller was called; None outside the model."""
    return _told(_lines_here(), model)


def _lines_here() -> list[FrameLine]:
    """Return the lines of the caller's caller and of all frames around it, the innermost last."""
    frame = sys._getframe(2)
    return [*_outside(frame), (frame, frame.f_lineno)]


def place_where(changes: Callable[[], bool], run: Callable[[], Any], model: nn.Module) -> str:
    """Return the position in the model at which `changes` becomes true while `run` calls the model.

    The result is the model itself if no line is known. Slow: `changes` is called after every line.
    """
    last: list[FrameLine] = []
    found: list[str | None] = []

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if not found and changes():
            # The previous line, which has just been executed, caused the change.
            found.append(_told(last, model))
        last[:] = [*_outside(frame), (frame, frame.f_lineno)]
        return look

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return look if _is_users(frame) and not found else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    except Exception:  # only the position of the change matters here, not a failure of the run
        pass
    finally:
        sys.settrace(before)
    if not found and changes():
        found.append(_told(last, model))
    return (found[0] if found else None) or module_at(model, "")


def module_at(model: nn.Module, name: str) -> str:
    """Return a module's name with its class, and the file and line of that class's forward."""
    kind = type(model.get_submodule(name))
    code = getattr(kind.forward, "__code__", None)
    at = f" at {Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""
    return f"{_named(name)} ({kind.__name__}{at})"


def _lines_of(error: BaseException) -> list[FrameLine]:
    """Return the lines of the error and of its causes, the innermost last."""
    cause = error.__cause__ or error.__context__
    lines = []
    trace = error.__traceback__
    while trace is not None:
        lines.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    # The first error of the chain was raised in the model.
    inner = _lines_of(cause) if cause is not None else []
    return [*lines, *inner]


def _outside(frame: FrameType) -> list[FrameLine]:
    """Return the lines of the frames around a frame, the outermost first."""
    lines = []
    around = frame.f_back
    while around is not None:
        lines.append((around, around.f_lineno))
        around = around.f_back
    return lines[::-1]


def _modules(lines: Iterable[FrameLine], model: nn.Module) -> list[str]:
    """Return the names of the modules whose code contains these lines, in their order."""
    names = {id(module): name for name, module in model.named_modules()}
    own = (names.get(id(module_of(frame))) for frame, _ in lines)
    return list(dict.fromkeys(name for name in own if name is not None))


def _told(lines: Iterable[FrameLine], model: nn.Module) -> str | None:
    """Return the innermost line of the user's code in a module; otherwise of torch's modules."""
    names = {id(module): name for name, module in model.named_modules()}
    inside: str | None = None
    users: str | None = None
    torchs: str | None = None
    for frame, number in lines:
        own = module_of(frame)
        inside = names.get(id(own), inside)
        # Frames before the call of the model do not belong to the model.
        if inside is None or frame.f_code.co_filename.startswith(_HERE):
            continue
        if _is_users(frame):
            users = _written(inside, frame.f_code.co_filename, number)
        elif own is not None and id(own) in names and frame.f_code.co_name != "_call_impl":
            torchs = _written(inside, frame.f_code.co_filename, number)
    return users or torchs


def module_of(frame: FrameType) -> Any:
    """Return the first argument of the frame's function: the module, if it is a module's method."""
    code = frame.f_code
    own: Any = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    # While tracing, torch replaces a module by a proxy object.
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
