"""Optimizer with offloaded state, which steps parameter by parameter and piece by piece.

    for each piece of a parameter:  fetch its state, update the piece, store its state

An update of a parameter needs only the state of this parameter. Memory therefore contains the state
of a piece, and of the next piece, which is read during the update. The results are bit-identical
to a whole step for every parameter-wise optimizer. Element-wise optimizers, such as SGD and Adam,
update a long parameter in pieces of `PIECE` elements.

For the CPU the state is in mapped files. For a GPU the state is in pinned CPU memory, from which it
is copied to the GPU for its update, and back.

Cost: state that has left memory is written and read once a step. For Adam these are twice the
parameters' bytes in each direction.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity"; Ren et al. 2021, "ZeRO-Offload".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.memory.offload.store import OffloadStore

PIECE = 1 << 20
"""Elements of a long parameter that are updated at once; temporaries of an update have this length.

A multiple of a processor's vector length, so that pieces are bit-identical to the whole.
"""


class _Piece(NamedTuple):
    """Elements of a parameter, and its group. stop: None for the whole parameter."""

    group: dict[str, Any]
    parameter: nn.Parameter
    start: int = 0
    stop: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of a tensor that has the parameter's shape."""
        own = tensor.detach()
        return own if self.stop is None else own.view(-1)[self.start : self.stop]


class OffloadedSteps:
    """Replacement of an optimizer's `step`.

    element_wise: whether the optimizer updates every element alone. piece: elements that are then
    updated at once.
    """

    def __init__(
        self, optimizer: Optimizer, store: OffloadStore, element_wise: bool, piece: int = PIECE
    ) -> None:
        self.optimizer = optimizer
        self.store = store
        self._length = piece if element_wise and not _is_fused(optimizer) else None
        self._plain_step = _plain_step(optimizer)
        self._before: dict[str, Any] = {}
        # Loops and learners continue to call the optimizer's `step`.
        optimizer.step = self.step  # type: ignore[method-assign, assignment]
        self.keep_all()

    def keep_all(self) -> None:
        """Offload all state of the optimizer, which may have been created early or loaded."""
        for state in self.optimizer.state.values():
            self._keep(state)

    def _keep(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if isinstance(value, Tensor) and self.store.takes(value):
                state[name] = self.store.placed(value)

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> None:
        """Make a step, with the optimizer's hooks before and after it."""
        optimizer = self.optimizer
        # Hooks get the arguments of the function, of which the first is the optimizer.
        given = (optimizer, *args)
        for before in list(optimizer._optimizer_step_pre_hooks.values()):
            before(optimizer, given, kwargs)
        self._update_all()
        for after in list(optimizer._optimizer_step_post_hooks.values()):
            after(optimizer, given, kwargs)

    def _update_all(self) -> None:
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        pieces = list(self._pieces())
        try:
            for group in groups:
                group["params"] = []
            for number, piece in enumerate(pieces):
                for following in pieces[number + 1 : number + 2]:
                    for tensor in self._read_by(following):
                        self.store.ahead([following.of(tensor)], tensor)
                self._update(piece)
                self.store.behind(map(piece.of, self._read_by(piece)))
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def _pieces(self) -> Iterator[_Piece]:
        """Yield the pieces in the optimizer's order; some optimizers draw random numbers."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                # Without a gradient there is no update.
                if parameter.grad is None:
                    continue
                length = self._length
                if length is None or not self._can_be_cut(parameter, length):
                    yield _Piece(group, parameter)
                    continue
                for start in range(0, parameter.numel(), length):
                    yield _Piece(group, parameter, start, min(start + length, parameter.numel()))

    def _can_be_cut(self, parameter: nn.Parameter, length: int) -> bool:
        if parameter.numel() <= length:
            return False
        return all(
            one.layout is torch.strided and one.is_contiguous()
            for one in (parameter, *self._beside(parameter))
        )

    def _beside(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return the gradient of a parameter, and the state tensors of the parameter's shape."""
        state = self.optimizer.state.get(parameter, {})
        gradient = parameter.grad
        return [*(() if gradient is None else (gradient,)), *_shaped(state, parameter).values()]

    def _read_by(self, piece: _Piece) -> list[Tensor]:
        return [piece.parameter, *self._beside(piece.parameter)]

    def _update(self, piece: _Piece) -> None:
        if piece.stop is None:
            self._update_whole(piece)
        else:
            self._update_part(piece)

    def _stepped(self, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        """Step over a single parameter; return its state."""
        group["params"] = [parameter]
        self._plain_step()
        group["params"] = []
        state: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return state

    def _update_whole(self, piece: _Piece) -> None:
        parameter = piece.parameter
        state = self.optimizer.state.get(parameter, {})
        kept = {name: one for name, one in state.items() if self._is_kept(one)}
        state.update({name: self.store.fetched(one) for name, one in kept.items()})
        state = self._stepped(piece.group, parameter)
        for name, place in kept.items():
            value = state.get(name)
            if isinstance(value, Tensor) and value.shape == place.shape:
                state[name] = _put(value, place)
        self._keep(state)

    def _is_kept(self, value: Any) -> bool:
        is_large = isinstance(value, Tensor) and value.nbytes >= self.store.least
        return is_large and self.store.holds(value)

    def _update_part(self, piece: _Piece) -> None:
        """Step over a part as if it were a parameter."""
        parameter = piece.parameter
        state = self.optimizer.state
        if piece.start == 0:
            # All parts begin with the common state, such as a count of steps; in the very first
            # step with no state.
            self._before = dict(state.get(parameter, {}))
        assert parameter.grad is not None
        part = nn.Parameter(piece.of(parameter))
        part.grad = piece.of(parameter.grad)
        if self._before:
            shaped = _shaped(self._before, parameter)
            state[part] = {
                name: self.store.fetched(piece.of(one)) if name in shaped else _copied(one)
                for name, one in self._before.items()
            }
        self._stepped(piece.group, part)
        self._join(piece, part, state.pop(part, {}))

    def _join(self, piece: _Piece, part: nn.Parameter, own: Mapping[str, Any]) -> None:
        """Store the state of a part at its place in the state of its parameter."""
        if not own:
            return
        state = self.optimizer.state[piece.parameter]
        for name, value in own.items():
            if name not in _shaped(own, part):
                state[name] = value
                continue
            if name not in state:
                state[name] = self.store.empty(piece.parameter.shape, value.dtype)
            _put(value, piece.of(state[name]))


def _plain_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return the optimizer's step without hooks; torch has wrapped the function of its class."""
    step: Any = type(optimizer).step
    plain = step.__wrapped__ if getattr(step, "hooked", False) else step
    bound: Callable[[], Any] = plain.__get__(optimizer)
    return bound


def _is_fused(optimizer: Optimizer) -> bool:
    """Return whether a fused kernel computes the step; it rounds the last elements differently."""
    return any(group.get("fused") for group in optimizer.param_groups)


def _shaped(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a state that have the parameter's shape."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape
    }


def _put(value: Tensor, place: Tensor) -> Tensor:
    """Copy the value to its place, unless it was updated in place; return the place."""
    return place if place.data_ptr() == value.data_ptr() else place.copy_(value)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
