"""The most that tensors take at one time while something is computed.

    with Live() as live:        every storage that is made inside counts from its first tensor to
        step()                  its last
    live.peak                   bytes

Seen is what operations return. What a kernel needs for itself and gives back is not.

On tensors without data a step of a model takes no memory, and the peak is that of the real step:
`step_peak` says before anything is trained what forward and backward will need beside parameters
and buffers: activations, gradients, and what lies between two operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dure.machine.compiler import left_out
from dure.memory.activations import faked, spare_copy, where_possible
from dure.memory.again import compute_again


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that are alive.

    known: tensors that were there before, and are not counted. bytes: now. peak: at most.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._note(tensor, counted=False)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._note(leaf, counted=True)
        return result

    def _note(self, tensor: Tensor, counted: bool) -> None:
        # The object lives as long as its memory does, whoever holds it, and so tells when it goes.
        storage = tensor.untyped_storage()
        if id(storage) in self._storages:
            return
        size = storage.nbytes() if counted else 0
        gone = partial(self._gone, id(storage), size)
        self._storages[id(storage)] = weakref.ref(storage, gone)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _gone(self, key: int, size: int, _: Any) -> None:
        del self._storages[key]
        self.bytes -= size


def step_peak(
    model: nn.Module,
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    again: Sequence[str] = (),
    spare: bool = False,
) -> int:
    """Bytes that forward and backward of a step take at most beside parameters and buffers.

    batch: inputs and targets; they are not counted either. loss: of outputs and targets. again: the
    modules that are computed again. spare: as for `dure.memory.activations.observed`.
    """

    def on_fakes() -> int:
        with faked(model, batch) as (twin, given):
            return _peak(twin, given, loss, again)

    def on_data() -> int:
        with spare_copy(model, spare) as twin:
            return _peak(twin, batch, loss, again)

    return where_possible(model, on_fakes, on_data)


def _peak(
    model: nn.Module,
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    again: Sequence[str],
) -> int:
    compute_again(model, again)
    given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    live = Live([*model.parameters(), *model.buffers(), *given])
    inputs, targets = batch
    with left_out(), torch.enable_grad(), live:
        loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    return live.peak
