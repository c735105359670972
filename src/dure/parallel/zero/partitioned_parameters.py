"""Parameters whose gradients, and in stage 3 whose elements, are divided over the ranks.

A `PartitionedParameter` parameter raises an error that explains where its gradient is, instead of
returning None: a norm over missing gradients would be 0, and clipping by that norm would silently
do nothing.

An `AbsentParameter` parameter also has no elements, between two all-gathers. It keeps its shape,
dtype and identity, so that a model can be counted, printed and traversed, and needs no memory. Code
that computes with the parameter triggers a fetch. Inside the model's forward pass the fetch gathers
the unit at once, which serves modules that use parameters of other modules; anywhere else it raises
an error with instructions. In stages 1 and 2 the fetch waits for a parameter that is being
gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# Functions that need no elements. Anything else, unknown functions too, fetches first.
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
# Properties that need elements; all other properties do not.
_NEEDS_ELEMENTS = {"data", "T", "mT", "H", "mH", "real", "imag"}
# Properties that may be set though there are no elements.
_HARMLESS_TO_SET = {"requires_grad"}
# The original properties, which the properties of `PartitionedParameter` hide.
_GRADIENT: Any = Tensor.grad
_ELEMENTS: Any = Tensor.data
_bare = torch._C.DisableTorchFunctionSubclass


class PartitionedParameter(nn.Parameter):
    """Class of a parameter whose gradient is divided over the ranks."""

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
        # for an absent parameter this fetches the elements first
        # (`AbsentParameter.__torch_function__`)
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


class AbsentParameter(PartitionedParameter):
    """Class of a parameter while its elements are not available on this rank."""

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
            # After this the parameters have their own class, and the function sees elements.
            for parameter in _away_among((args, kwargs)):
                parameter.__dict__["_fetch"](parameter)
        with _bare():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.__dict__["_fetch"](self)  # from here on the parameter has its own class
        return copy.deepcopy(self, memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with _bare():
            return f"Parameter divided over ranks: {tuple(self.shape)}, {self.dtype}"


class DataAccessWatch(Protocol):
    """Interface for events that torch does not count as changes of a parameter."""

    def read(self, parameter: nn.Parameter) -> None:
        """Handle a read of `parameter.data`, whose reader may write there."""

    def replaced(self, parameter: nn.Parameter) -> None:
        """Handle an assignment to `parameter.data`."""


def elements_of(parameter: Tensor) -> Tensor:
    """Return the elements of a parameter, bypassing all checks."""
    with _bare():
        found: Tensor = _ELEMENTS.__get__(parameter)
        return found


def versions_of(parameters: Iterable[Tensor]) -> list[int]:
    """Return the version counter of each parameter, bypassing all checks."""
    with _bare():
        return [parameter._version for parameter in parameters]


def set_elements(parameter: Tensor, elements: Tensor) -> None:
    """Set a parameter's elements, bypassing all checks."""
    with _bare():
        _ELEMENTS.__set__(parameter, elements)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient of a parameter on this rank, bypassing all checks."""
    with _bare():
        found: Tensor | None = _GRADIENT.__get__(parameter)
        return found


def set_gradient(parameter: Tensor, value: Tensor | None) -> None:
    """Set a parameter's gradient on this rank, bypassing all checks."""
    with _bare():
        _GRADIENT.__set__(parameter, value)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradients of parameters on this rank, bypassing all checks."""
    with _bare():
        return [_GRADIENT.__get__(parameter) for parameter in parameters]


def take_gradients(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradients of parameters on this rank, and set them to None."""
    taken = []
    with _bare():
        for parameter in parameters:
            taken.append(_GRADIENT.__get__(parameter))
            _GRADIENT.__set__(parameter, None)
    return taken


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Set the gradients of parameters on this rank to None."""
    with _bare():
        for parameter in parameters:
            _GRADIENT.__set__(parameter, None)


def watch_gradient(parameter: nn.Parameter, check: Callable[[], None]) -> None:
    """Call `check`, which may raise, before each read of the parameter's gradient from now on."""
    if _become_divided(parameter):
        parameter.__dict__["_before_grad"] = check


def watch_data(parameter: nn.Parameter, watch: DataAccessWatch) -> None:
    """Report each read of `parameter.data` and each assignment to `watch` from now on."""
    if _become_divided(parameter):
        parameter.__dict__["_watch"] = watch


def _become_divided(parameter: nn.Parameter) -> bool:
    """Make a plain parameter a `PartitionedParameter`, and return whether it is one now.

    A parameter of a user-defined class keeps its class.
    """
    # The class is exchanged in place: the parameter stays the same object, to which optimizers,
    # hooks and users refer.
    if type(parameter) is nn.Parameter:
        parameter.__class__ = PartitionedParameter
    return type(parameter) is PartitionedParameter


@contextmanager
def without_gradient_checks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context manager that disables the checks of gradient reads.

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


def remove_elements(
    parameter: nn.Parameter, fetch: Callable[[nn.Parameter], None], stays: bool = False
) -> None:
    """Remove the elements of a parameter. `fetch` restores them on access, or raises.

    stays: the elements stay in memory, and only their use is prevented.
    """
    if not stays:
        # A single element, expanded: the shape is right, and no memory is needed.
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        set_elements(parameter, nothing.expand(parameter.shape))
    parameter.__class__ = AbsentParameter
    parameter.__dict__["_fetch"] = fetch


def restore_elements(
    parameter: nn.Parameter, kind: type[nn.Parameter], elements: Tensor | None
) -> None:
    """Restore the class of an `AbsentParameter`, and its elements unless they stayed (None)."""
    parameter.__class__ = kind
    if elements is not None:
        set_elements(parameter, elements)


def _away_among(node: Any) -> list[nn.Parameter]:
    """Return the `AbsentParameter` parameters in nested arguments."""
    if isinstance(node, Tensor):
        return [node] if type(node) is AbsentParameter else []
    if isinstance(node, dict):
        node = list(node.values())
    found: list[nn.Parameter] = []
    if isinstance(node, (list, tuple)):
        for part in node:
            found += _away_among(part)
    return found
