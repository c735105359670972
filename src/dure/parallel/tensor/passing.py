"""A function put before an input of a module, or after its output, by a hook that stays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

from torch import Tensor, nn

USUAL = "hidden_states"
"""The argument by the name that Hugging Face gives it; of other modules it is the first one."""


class Place(NamedTuple):
    """Where a call of a module has an argument.

    place: among those by place, None where it is by name alone. name: by which it may be given
    instead. optional: whether a call may leave it out.
    """

    place: int | None
    name: str
    optional: bool


def on_input(
    name: str, module: nn.Module, function: Callable[[Tensor], Tensor], argument: str
) -> Callable[[], None]:
    """What puts a function before an argument of a module. name: the module's.

    Raises ValueError if the module's forward has no such argument.
    """
    index, own, optional = place_of(name, module, argument)

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


def place_of(name: str, module: nn.Module, argument: str) -> Place:
    """Where calls of a module have an argument.

    Raises ValueError if its forward has none of that name, and the name is not the usual one.
    """
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters
    ordered = [each.name for each in parameters.values() if each.kind in by_place]
    any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    if argument in parameters:
        index = ordered.index(argument) if argument in ordered else None
        optional = parameters[argument].default is not inspect.Parameter.empty
        return Place(index, argument, optional)
    if argument == USUAL:
        return Place(0, ordered[0] if ordered else USUAL, False)
    if any_name:
        return Place(None, argument, False)
    raise ValueError(
        f"{name or 'the model'} takes no argument {argument!r}; it takes {', '.join(parameters)}"
    )


def _applied(function: Callable[[Tensor], Tensor], value: Any, name: str, argument: str) -> Any:
    # What is left out may be given as None, as the states of an encoder where there is none.
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name or 'the model'} gets {argument!r} as a {type(value).__name__}, where the plan "
            "wants a tensor"
        )
    return function(value)


def on_output(
    name: str, module: nn.Module, function: Callable[[Tensor], Tensor]
) -> Callable[[], None]:
    """What puts a function after a module's output, or after the first tensor of several."""

    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return function(output)
        if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
            values = [function(output[0]), *output[1:]]
            # a named tuple takes its values one by one
            return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
        if isinstance(output, MutableMapping):
            for key, value in output.items():
                if isinstance(value, Tensor):
                    output[key] = function(value)
                    return output
        raise ValueError(
            f"{name or 'the model'} gives a {type(output).__name__} without a first tensor, to "
            "which the plan could do something"
        )

    def install() -> None:
        module.register_forward_hook(after)

    return install
