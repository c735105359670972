"""Overlap of the all-gather after an update with the next forward pass, in stages 1 and 2.

After an update every rank sends its chunk of each block, in the order in which forward needs the
blocks, and the program continues. Until a block has arrived its parameters are `AbsentParameter`: a
module waits for its parameters before it computes, and any other code that accesses a parameter (a
norm, a `state_dict`, a module that uses the parameter of another module) waits at the access. Code
that reads memory directly, such as compiled code and views that were created before, would read
incomplete parameters.

Source: Megatron-LM's `overlap_param_gather`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dure.collectives.handle import Handle
from dure.parallel.zero.chunk_collectives import ChunkCollectives
from dure.parallel.zero.partitioned_parameters import (
    PartitionedParameter,
    remove_elements,
    restore_elements,
)
from dure.parallel.zero.shares import ParameterShare


class _Coming(NamedTuple):
    """A block that is being gathered, and the classes of its parameters after arrival."""

    share: ParameterShare
    handle: Handle[None]
    kinds: list[type[nn.Parameter]]


class OverlappedGather:
    """All-gathers of a rank's blocks after an update, overlapped with the next forward pass.

    shares: the shares that are gathered in the background, if the wire is planned.
    """

    def __init__(
        self, model: nn.Module, shares: Sequence[ParameterShare], wire: ChunkCollectives
    ) -> None:
        self.wire = wire
        self._coming: dict[int, _Coming] = {}
        # Several threads may wait for the same block, and only the first may install it.
        self._turn = threading.RLock()
        if not wire.planned:
            return
        holder = {id(parameter): share for share in shares for parameter in share.parameters}
        for module in model.modules():
            own = {
                id(holder[id(p)]): holder[id(p)]
                for p in module.parameters(recurse=False)
                if id(p) in holder
            }
            # The model itself gets a hook for passes without gradients (below).
            if own or module is model:
                module.register_forward_pre_hook(self._before(list(own.values())), prepend=True)

    def _before(self, shares: list[ParameterShare]) -> Callable[..., None]:
        def before(module: nn.Module, inputs: Any) -> None:
            if not self._coming:
                return
            if not torch.is_grad_enabled():
                # without gradients some modules choose operators by the class of their parameters
                self.settle()
            for share in shares:
                self._settle(share)

        return before

    def begin(self, shares: Iterable[ParameterShare]) -> None:
        """Start the all-gathers of these blocks, in this order.

        The order must be equal on all ranks.
        """
        # All gathers start before the first wait: the list is built first.
        for share, handle in [(share, self._gather(share)) for share in shares]:
            kinds = [type(parameter) for parameter in share.parameters]
            # A block that is complete needs no wait later. A parameter of a user-defined class
            # keeps its class, so that an access to it could not be noticed.
            if (
                not self.wire.planned
                or handle.is_completed()
                or not {nn.Parameter, PartitionedParameter}.issuperset(kinds)
            ):
                self.wire.wait(handle, "parameters")
                continue
            self._coming[id(share)] = _Coming(share, handle, kinds)
            for parameter in share.parameters:
                remove_elements(parameter, self._fetch(share), stays=True)

    def _gather(self, share: ParameterShare) -> Handle[None]:
        assert share.whole is not None
        return self.wire.all_gather(share.whole, share.own)

    def _fetch(self, share: ParameterShare) -> Callable[[nn.Parameter], None]:
        return lambda parameter: self._settle(share)

    def _settle(self, share: ParameterShare) -> None:
        with self._turn:
            coming = self._coming.get(id(share))
            # another thread was faster
            if coming is None:
                return
            self.wire.wait(coming.handle, "parameters")
            for parameter, kind in zip(share.parameters, coming.kinds, strict=True):
                restore_elements(parameter, kind, None)
            del self._coming[id(share)]

    def settle(self) -> None:
        """Wait for all blocks."""
        for coming in list(self._coming.values()):
            self._settle(coming.share)


def check_not_compiled(model: nn.Module) -> None:
    """Check that no module is compiled. Raises ValueError otherwise.

    An access of compiled code to a parameter cannot be noticed.
    """
    for name, module in model.named_modules():
        compiled = isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod")
        if compiled or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                "overlap_gather needs to observe each use of a parameter, but "
                f"{name or 'the model'} is compiled: leave overlap_gather out, or do not compile"
            )
