"""Training options that every system shares: clipping, precision, averages, compilation.

The options are fields of a `Task`, the same for every system, so that systems are comparable:

    clip_norm    g <- g · min(1, clip_norm / |g|), of the gradient that an optimizer steps with
    precision    bf16: forward and loss in bfloat16 where torch's autocast takes it for safe; ZeRO
                 casts the parameters that it gathers, and inputs. fp16: in float16, with a scale of
                 the loss (`dure.tasks.loss_scaling`), by strategies with `scales_loss`
    ema          e <- ema · e + (1 - ema) · w after every step, or round; e is evaluated
    compile      torch's compiler compiles the calls of the model
    unfreeze     parameters that stay frozen before a step
    adapter      low-rank factors are trained, and the model's own weights are frozen

A strategy declares the supported options (`Strategy.trains_with`). An unsupported option is refused
by name before training begins, and never ignored.

Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks" (clipping);
Micikevicius et al. 2018, "Mixed Precision Training"; Polyak and Juditsky 1992 (averages of
weights); Howard and Ruder 2018, "Universal Language Model Fine-tuning" (gradual unfreezing).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol, get_args

from torch import nn

from dure.contracts.adapter import LoRA

Precision = Literal["full", "bf16", "fp16"]

Part = Literal["clip_norm", "precision", "ema", "compile", "unfreeze", "adapter"]

PARTS: tuple[Part, ...] = get_args(Part)
"""Fields of a task that a strategy has to support."""

ALL: frozenset[Part] = frozenset(PARTS)
"""Value of `trains_with` for a strategy that supports all options."""

_UNASKED: Mapping[Part, Any] = {
    "clip_norm": None,
    "precision": "full",
    "ema": None,
    "compile": False,
    "unfreeze": None,
    "adapter": None,
}


class HasTrainingOptions(Protocol):
    """Training options of a `Task`."""

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
    @property
    def adapter(self) -> LoRA | None: ...


def training_options_of(task: HasTrainingOptions) -> dict[Part, Any]:
    """Return the options that differ from their defaults, by name."""
    values: dict[Part, Any] = {
        "clip_norm": None if task.clip_norm is None else float(task.clip_norm),
        "precision": task.precision,
        "ema": task.ema,
        "compile": task.compile,
        "unfreeze": None if task.unfreeze is None else dict(task.unfreeze),
        # As text, which run folders hold and which `Task` reads.
        "adapter": None if task.adapter is None else str(task.adapter),
    }
    return {name: value for name, value in values.items() if value != _UNASKED[name]}


def check_learning(task: HasTrainingOptions) -> None:
    """Raise ValueError for an invalid value of a training option."""
    norm = task.clip_norm
    if norm is not None and not (_is_number(norm) and norm > 0):
        raise ValueError(f"Task(clip_norm={norm!r}): give a number greater than 0")
    if task.precision not in get_args(Precision):
        raise ValueError(f"Task(precision={task.precision!r}): choose 'full', 'bf16' or 'fp16'")
    if task.ema is not None and not (_is_number(task.ema) and 0 <= task.ema < 1):
        raise ValueError(
            f"Task(ema={task.ema!r}): give the decay of the moving average per step, 0 or more "
            "and less than 1, such as 0.999"
        )
    if not isinstance(task.compile, (bool, str)):
        raise ValueError(
            f"Task(compile={task.compile!r}): give True or the name of a backend of torch.compile"
        )
    _check_unfreeze(task.unfreeze)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_unfreeze(unfreeze: object) -> None:
    if unfreeze is None:
        return
    if not isinstance(unfreeze, Mapping) or not unfreeze:
        raise ValueError(
            f"Task(unfreeze={unfreeze!r}): give the step from which parameters are trained, such "
            "as {'layers.0.*': 100}"
        )
    for name, step in unfreeze.items():
        if type(name) is not str or type(step) is not int or step < 0:
            raise ValueError(
                f"Task(unfreeze={{{name!r}: {step!r}}}): give a pattern of parameter names, where "
                "* matches anything, and the step, 0 or more, from which they are trained"
            )


def trained_from(task: HasTrainingOptions, names: Iterable[str]) -> dict[str, int]:
    """Return the step from which each initially frozen parameter is trained, by name.

    The first pattern that matches a name counts.
    """
    patterns = task.unfreeze or {}
    found: dict[str, int] = {}
    for name in names:
        step = next((step for one, step in patterns.items() if fnmatchcase(name, one)), 0)
        if step:
            found[name] = step
    return found


def check_unfrozen(task: HasTrainingOptions, model: nn.Module) -> None:
    """Raise ValueError for a pattern without a match, or if no parameter is trained at step 0."""
    if task.unfreeze is None:
        return
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    for pattern in task.unfreeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"unfreeze names {pattern!r}, which matches no trainable parameter of the model; "
                f"its parameters are {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            )
    if len(trained_from(task, names)) == len(names):
        raise ValueError("unfreeze freezes every parameter at step 0: name fewer parameters")
