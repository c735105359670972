"""How a model is trained, whatever divides the work: clipping, precision, averages, compiling.

These are fields of a `Task`, the same for every system, so that a baseline can be compared:

    clip_norm    g <- g · min(1, clip_norm / |g|), of the gradient that an optimizer steps with
    precision    bf16: forward and loss in bfloat16 where torch's autocast takes it for safe; ZeRO
                 casts the parameters that it gathers, and inputs
    ema          e <- ema · e + (1 - ema) · w after every step, or round; e is what is evaluated
    compile      the model is called as torch's compiler has it
    unfreeze     parameters that stay as they are before a step

A strategy says which of them it can do (`Strategy.trains_with`). What it cannot do is refused by
name before anything is trained, and never left out in silence.

Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks" (clipping);
Micikevicius et al. 2018, "Mixed Precision Training"; Polyak and Juditsky 1992 (averages of
weights); Howard and Ruder 2018, "Universal Language Model Fine-tuning" (gradual unfreezing).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol, get_args

from torch import nn

Precision = Literal["full", "bf16"]

Part = Literal["clip_norm", "precision", "ema", "compile", "unfreeze"]

PARTS: tuple[Part, ...] = get_args(Part)
"""The fields of a task that a strategy has to be able to do."""

ALL: frozenset[Part] = frozenset(PARTS)
"""Of a strategy that can do all of them."""

_UNASKED: Mapping[Part, Any] = {
    "clip_norm": None,
    "precision": "full",
    "ema": None,
    "compile": False,
    "unfreeze": None,
}


class Asks(Protocol):
    """What a `Task` says of it."""

    @property
    def clip_norm(self) -> float | None: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def ema(self) -> float | None: ...
    @property
    def compile(self) -> bool | str: ...
    @property
    def unfreeze(self) -> Mapping[str, int] | None: ...


def asked_of(task: Asks) -> dict[Part, Any]:
    """The fields that ask for something, by name."""
    values: dict[Part, Any] = {
        "clip_norm": None if task.clip_norm is None else float(task.clip_norm),
        "precision": task.precision,
        "ema": task.ema,
        "compile": task.compile,
        "unfreeze": None if task.unfreeze is None else dict(task.unfreeze),
    }
    return {name: value for name, value in values.items() if value != _UNASKED[name]}


def check_learning(task: Asks) -> None:
    """Raises ValueError for a value that a field of these cannot have."""
    norm = task.clip_norm
    if norm is not None and not (_is_number(norm) and norm > 0):
        raise ValueError(f"Task(clip_norm={norm!r}): a largest norm is a number above zero")
    if task.precision not in get_args(Precision):
        raise ValueError(f"Task(precision={task.precision!r}): it is 'full' or 'bf16'")
    if task.ema is not None and not (_is_number(task.ema) and 0 <= task.ema < 1):
        raise ValueError(
            f"Task(ema={task.ema!r}): it is what an average of the weights keeps of itself in a "
            f"step, a number from 0 to below 1, such as 0.999"
        )
    if not isinstance(task.compile, (bool, str)):
        raise ValueError(
            f"Task(compile={task.compile!r}): it is True, or the name of one of torch's backends"
        )
    _check_unfreeze(task.unfreeze)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_unfreeze(unfreeze: object) -> None:
    if unfreeze is None:
        return
    if not isinstance(unfreeze, Mapping) or not unfreeze:
        raise ValueError(
            f"Task(unfreeze={unfreeze!r}): it says from which step on parameters are trained, such "
            f"as {{'layers.0.*': 100}}"
        )
    for name, step in unfreeze.items():
        if type(name) is not str or type(step) is not int or step < 0:
            raise ValueError(
                f"Task(unfreeze={{{name!r}: {step!r}}}): it is a name of parameters, where * is "
                f"anything, and the step from which on they are trained, 0 or more"
            )


def trained_from(task: Asks, names: Iterable[str]) -> dict[str, int]:
    """The step from which on parameters are trained, by name, of those that begin frozen.

    The first pattern that fits a name counts.
    """
    patterns = task.unfreeze or {}
    found: dict[str, int] = {}
    for name in names:
        step = next((step for one, step in patterns.items() if fnmatchcase(name, one)), 0)
        if step:
            found[name] = step
    return found


def check_unfrozen(task: Asks, model: nn.Module) -> None:
    """Raises ValueError for a pattern that fits no parameter, or where none is trained at first."""
    if task.unfreeze is None:
        return
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    for pattern in task.unfreeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"unfreeze names {pattern!r}, and no trained parameter of the model is called so: "
                f"they are {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            )
    if len(trained_from(task, names)) == len(names):
        raise ValueError("unfreeze leaves no parameter that is trained at step 0: name fewer")
