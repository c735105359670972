"""Parameters whose gradients, and in stage 3 whose elements, lie divided over the ranks.

A `Divided` parameter raises an error that says where its gradient is, instead of showing none: a
norm over missing gradients would be 0, and clipping to it would silently do nothing.

An `Away` parameter has no elements either, between two gatherings. It keeps its shape, dtype and
identity, so that a model can be counted, printed and walked through; it has no memory. Code that
computes with it asks for it. Inside the model's forward pass its unit is then gathered on the spot,
which serves modules that use parameters of others; anywhere else that is an error that says what to
do. In stages 1 and 2 a parameter that is on its way after an update is waited for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# What a parameter without elements can answer. Anything else, unknown functions too, fetches first.
_HARMLESS = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "get_device",
    "__hash__",
    "__len__",
    "is_pinned",
    "has_names",
}
# Of properties it is the other way round: these few need elements, all others do not.
_NEEDS_ELEMENTS = {"data", "T", "mT", "H", "mH", "real", "imag"}
# Properties that may be set though there are no elements.
_HARMLESS_TO_SET = {"requires_grad"}
# The original properties: those of `Divided` hide them.
_GRADIENT: Any = Tensor.grad
_ELEMENTS: Any = Tensor.data
_bare = torch._C.DisableTorchFunctionSubclass


class Divided(nn.Parameter):
    """The class of a parameter whose gradient is divided."""

    @property
    def grad(self) -> Tensor | None:
        # in `__dict__`, since a tensor's class may change while its attributes stay
        check = self.__dict__.get("_before_grad")
        if check is not None:
            check()
        return gradient_of(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        set_gradient(self, value)

    @property
    def data(self) -> Tensor:
        # of one that is away this fetches the elements first (`Away.__torch_function__`)
        found: Tensor = _ELEMENTS.__get__(self)
        watch = self.__dict__.get("_watch")
        if watch is not None:
            watch.read(self)
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        _ELEMENTS.__set__(self, value)
        watch = self.__dict__.get("_watch")
        if watch is not None:
            watch.replaced(self)


class Away(Divided):
    """The class that a parameter has while it is away."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # A property comes here as its getter, `Tensor.shape.__get__`; its own name is that of the
        # object which the getter belongs to.
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        is_property = (name == "__get__" and attribute not in _NEEDS_ELEMENTS) or (
            name == "__set__" and attribute in _HARMLESS_TO_SET
        )
        if not is_property and name not in _HARMLESS:
            # After this they are of their own class, and the function sees elements.
            for parameter in _away_among((args, kwargs)):
                parameter.__dict__["_fetch"](parameter)
        with _bare():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.__dict__["_fetch"](self)  # from here on it is of its own class
        return copy.deepcopy(self, memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with _bare():
            return f"Parameter divided over ranks: {tuple(self.shape)}, {self.dtype}"


class Watch(Protocol):
    """Told of what torch does not count as a change of a parameter."""

    def read(self, parameter: nn.Parameter) -> None:
        """Somebody has read `parameter.data`, and may write there."""

    def replaced(self, parameter: nn.Parameter) -> None:
        """Somebody has assigned to `parameter.data`."""


def elements_of(parameter: Tensor) -> Tensor:
    """The elements of a parameter, past all checks."""
    with _bare():
        found: Tensor = _ELEMENTS.__get__(parameter)
        return found


def versions_of(parameters: Iterable[Tensor]) -> list[int]:
    """How often torch has counted a change of each, past all checks."""
    with _bare():
        return [parameter._version for parameter in parameters]


def set_elements(parameter: Tensor, elements: Tensor) -> None:
    """Gives a parameter its elements, past all checks."""
    with _bare():
        _ELEMENTS.__set__(parameter, elements)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """What autograd has left in a parameter on this rank."""
    with _bare():
        found: Tensor | None = _GRADIENT.__get__(parameter)
        return found


def set_gradient(parameter: Tensor, value: Tensor | None) -> None:
    """Puts a gradient into a parameter on this rank, past all checks."""
    with _bare():
        _GRADIENT.__set__(parameter, value)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """What autograd has left in parameters on this rank."""
    with _bare():
        return [_GRADIENT.__get__(parameter) for parameter in parameters]


def take_gradients(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """What autograd has left in parameters on this rank, which then have none."""
    taken = []
    with _bare():
        for parameter in parameters:
            taken.append(_GRADIENT.__get__(parameter))
            _GRADIENT.__set__(parameter, None)
    return taken


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Forgets what autograd has left in parameters on this rank."""
    with _bare():
        for parameter in parameters:
            _GRADIENT.__set__(parameter, None)


def watch_gradient(parameter: nn.Parameter, check: Callable[[], None]) -> None:
    """From now on `check` is called before somebody reads the parameter's gradient.

    It may raise.
    """
    if _become_divided(parameter):
        parameter.__dict__["_before_grad"] = check


def watch_data(parameter: nn.Parameter, watch: Watch) -> None:
    """From now on `watch` is told of who reads `parameter.data`, or assigns to it."""
    if _become_divided(parameter):
        parameter.__dict__["_watch"] = watch


def _become_divided(parameter: nn.Parameter) -> bool:
    """Returns whether it is `Divided` now: one of a class of its own stays what it is."""
    # A class is exchanged in place: the parameter stays the same object, which optimizers, hooks
    # and users hold.
    if type(parameter) is nn.Parameter:
        parameter.__class__ = Divided
    return type(parameter) is Divided


@contextmanager
def unwatched(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, no check is called.

    It is for code that looks at gradients without using them, such as a tracer.
    """
    checks = [
        (p, p.__dict__.pop("_before_grad")) for p in parameters if "_before_grad" in p.__dict__
    ]
    try:
        yield
    finally:
        for parameter, check in checks:
            parameter.__dict__["_before_grad"] = check


def send_away(
    parameter: nn.Parameter, fetch: Callable[[nn.Parameter], None], stays: bool = False
) -> None:
    """Takes the elements from a parameter. `fetch` makes it whole when asked for, or raises.

    stays: its elements stay where they are, and are only kept from being used.
    """
    if not stays:
        # One element, expanded: the shape is right, and no memory is held.
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        set_elements(parameter, nothing.expand(parameter.shape))
    parameter.__class__ = Away
    parameter.__dict__["_fetch"] = fetch


def bring_back(parameter: nn.Parameter, kind: type[nn.Parameter], elements: Tensor | None) -> None:
    """Gives a parameter that is away its class, and its elements unless they have stayed."""
    parameter.__class__ = kind
    if elements is not None:
        set_elements(parameter, elements)


def _away_among(node: Any) -> list[nn.Parameter]:
    """The parameters in nested arguments that are away."""
    if isinstance(node, Tensor):
        return [node] if type(node) is Away else []
    if isinstance(node, dict):
        node = list(node.values())
    found: list[nn.Parameter] = []
    if isinstance(node, (list, tuple)):
        for part in node:
            found += _away_among(part)
    return found
