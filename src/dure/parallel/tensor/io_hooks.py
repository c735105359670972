"""Hooks that apply a function to an input or to the output of a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

from torch import Tensor, nn

USUAL_ARGUMENT = "hidden_states"
"""Hugging Face's name of the main argument; in a module without it, the first argument is taken."""


class ArgumentPosition(NamedTuple):
    """Position of an argument in calls of a module.

    place: index among the positional arguments, None if it is passed by name alone. name: its name.
    optional: whether a call may omit it.
    """

    place: int | None
    name: str
    optional: bool


def on_input(
    name: str, module: nn.Module, function: Callable[[Tensor], Tensor], argument: str
) -> Callable[[], None]:
    """Return a function that installs a hook: `function` is applied to an argument of a module.

    name: the module's name. Raises ValueError if the module's forward has no such argument.
    """
    index, own, optional = argument_position(name, module, argument)

    def hook(
        module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if index is not None and index < len(args):
            changed = _applied(function, args[index], name, own)
            return (*args[:index], changed, *args[index + 1 :]), named
        if own in named:
            changed = _applied(function, named[own], name, own)
            return args, {**named, own: changed}
        if not optional:
            raise ValueError(f"{name or 'the model'} is called without {own!r}")
        return args, named

    def install() -> None:
        module.register_forward_pre_hook(hook, with_kwargs=True)

    return install


def argument_position(name: str, module: nn.Module, argument: str) -> ArgumentPosition:
    """Return the position of an argument in calls of a module.

    Raises ValueError if the module's forward has no such argument, unless the name is
    `USUAL_ARGUMENT`.
    """
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters
    ordered = [each.name for each in parameters.values() if each.kind in by_place]
    any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    if argument in parameters:
        index = ordered.index(argument) if argument in ordered else None
        optional = parameters[argument].default is not inspect.Parameter.empty
        return ArgumentPosition(index, argument, optional)
    if argument == USUAL_ARGUMENT:
        return ArgumentPosition(0, ordered[0] if ordered else USUAL_ARGUMENT, False)
    if any_name:
        return ArgumentPosition(None, argument, False)
    raise ValueError(
        f"{name or 'the model'} takes no argument {argument!r}; it takes {', '.join(parameters)}"
    )


def _applied(function: Callable[[Tensor], Tensor], value: Any, name: str, argument: str) -> Any:
    # An omitted input may be passed as None, for example the states of a missing encoder.
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name or 'the model'} gets {argument!r} as a {type(value).__name__}, but the plan "
            "needs a tensor"
        )
    return function(value)


def on_output(
    name: str, module: nn.Module, function: Callable[[Tensor], Tensor]
) -> Callable[[], None]:
    """Return a function that installs a hook: `function` is applied to the first output tensor."""

    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return function(output)
        if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
            values = [function(output[0]), *output[1:]]
            # a named tuple takes its values as separate arguments
            return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
        if isinstance(output, MutableMapping):
            for key, value in output.items():
                if isinstance(value, Tensor):
                    output[key] = function(value)
                    return output
        raise ValueError(
            f"{name or 'the model'} returns a {type(output).__name__} without a tensor, which the "
            "plan needs"
        )

    def install() -> None:
        module.register_forward_hook(after)

    return install
