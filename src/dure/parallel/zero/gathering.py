"""Stage 3: units are gathered just before they are used, and freed after use.

A unit is gathered into a buffer, and its parameters become views of the buffer; after the unit is
freed they are `AbsentParameter`. For views of parameters that autograd saves for backward, an
offset in the unit is stored instead of memory, and read from the unit's buffer of that time
(torch's saved-tensor hooks). A unit is freed in backward when all its gradients are complete and
nothing in the graph needs it; before that time some of its modules may run again, such as a part
whose activations are recomputed.

A unit is in use from the first call of its modules to the end of the last call. The output of a
module may be a view of a parameter; the unit then stays until the forward pass ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dure.collectives.handle import Handle
from dure.memory.mapped import release_pages
from dure.parallel.zero.change_detection import ParameterChanges
from dure.parallel.zero.chunk_collectives import ChunkCollectives
from dure.parallel.zero.partitioned_parameters import remove_elements, restore_elements
from dure.parallel.zero.shares import BufferPool, ParameterShare


class GatherUnit:
    """Shares that are gathered together.

    calls: calls of its modules in this forward pass. saved: views of its parameters that autograd
    has saved. stays: the unit stays until the end of the pass. always_stays: it does so in every
    forward pass. complete: all gradients of this backward pass are there. comes_again: a backward
    pass needed the unit after it was freed. whole: a buffer for each share while the unit is
    gathered or on its way. handles: transfers while the unit is on its way.
    """

    def __init__(self, number: int, modules: list[nn.Module], shares: list[ParameterShare]) -> None:
        self.number = number
        self.modules = modules
        self.shares = shares
        # the classes to give back, before the parameters become `AbsentParameter`
        self.kinds = [[type(parameter) for parameter in share.parameters] for share in shares]
        self.calls = 0
        self.saved = 0
        self.stays = False
        self.always_stays = False
        self.complete = False
        self.comes_again = False
        self.whole: list[Tensor] | None = None
        self.handles: list[Handle[None]] | None = None

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of all shares of the unit."""
        for share in self.shares:
            yield from share.parameters

    def give(self, share: int, elements: Sequence[Tensor]) -> None:
        """Set the elements of a share's parameters."""
        for parameter, kind, own in zip(
            self.shares[share].parameters, self.kinds[share], elements, strict=True
        ):
            restore_elements(parameter, kind, own)

    @property
    def frozen(self) -> bool:
        """Whether the unit has frozen parameters, whose last use no gradient marks."""
        return any(not share.block.trained for share in self.shares)


def tensors_in(outputs: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in the output of a module.

    They may be in containers, and in attributes of objects, to a nesting of `depth` objects.
    """
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            yield leaf
        # the depth is limited, because objects may refer to each other
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)):
            yield from tensors_in(list(vars(leaf).values()), depth - 1)


class _Saved:
    """Placeholder that autograd saves instead of a view of a parameter: an offset and strides."""

    __slots__ = ("gathering", "number", "offset", "share", "size", "stride", "unit")

    def __init__(
        self, gathering: UnitGathering, unit: GatherUnit, share: int, view: Tensor
    ) -> None:
        self.gathering = gathering
        self.unit = unit
        self.number = share
        self.offset = view.storage_offset()
        self.size = view.size()
        self.stride = view.stride()
        unit.saved += 1

    def __del__(self) -> None:
        # Autograd drops saved objects as soon as a node is done, which shows when the unit is free.
        self.unit.saved -= 1
        if not self.unit.saved:
            self.gathering.unneeded(self.unit)


class SavedTensorStore(Protocol):
    """Interface that replaces the activations which autograd saves, such as by files."""

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd saves in place of a tensor."""

    def unpack(self, held: Any) -> Tensor:
        """Return the tensor of an object that `pack` returned."""


class UnitGathering:
    """All units of a model on this rank, which are gathered and freed.

    need: called with a unit that a module needs; set by `ZeROPasses`. changes: detects whether a
    pass has changed gathered parameters. here: whether all parameters are available, so that no
    unit needs to be gathered (`dure.parallel.zero.in_place`).
    """

    in_place = False
    here = False

    def __init__(
        self,
        units: list[GatherUnit],
        wire: ChunkCollectives,
        pool: BufferPool,
        changes: ParameterChanges,
    ) -> None:
        self.units = units
        self.wire = wire
        self.pool = pool
        self.changes = changes
        self.in_backward = False
        # by address of a buffer's storage: the unit and share in this buffer
        self._where: dict[int, tuple[GatherUnit, int]] = {}
        self.need: Any = None
        self.keeper: SavedTensorStore | None = None
        """Replacement of saved tensors other than parameters; None leaves them to autograd."""
        for unit in units:
            self.send_away(unit)

    def bring(self) -> None:
        """Make all parameters available from now on, if they are `in_place`."""

    def issue(self, unit: GatherUnit) -> None:
        """Start the all-gathers of a unit."""
        assert unit.whole is None
        unit.whole = [
            self.pool.take(share.block.padded, share.block.dtype) for share in unit.shares
        ]
        unit.handles = [
            self.wire.all_gather(whole, share.own)
            for whole, share in zip(unit.whole, unit.shares, strict=True)
        ]

    def arrive(self, unit: GatherUnit) -> None:
        """Wait for the all-gathers of a unit, and set the elements of its parameters."""
        if unit.handles is None:
            return
        for handle in unit.handles:
            self.wire.wait(handle, "parameters")
        unit.handles = None
        # This rank's chunks may be memory-mapped files (`ZeroRedundancy`), which were read to send.
        release_pages(share.own for share in unit.shares)
        assert unit.whole is not None
        # Views that are created in inference mode could not be used for training afterwards.
        with torch.inference_mode(False), torch.no_grad():
            for number, (share, whole) in enumerate(zip(unit.shares, unit.whole, strict=True)):
                self._where[whole.untyped_storage().data_ptr()] = unit, number
                unit.give(number, share.views(whole))

    def free(self, unit: GatherUnit) -> None:
        """Free the buffers of a unit that is gathered or on its way."""
        if unit.whole is None:
            return
        if unit.handles is not None:
            # On its way: other ranks need the message, and the buffer must not be reused before the
            # message has arrived.
            for handle in unit.handles:
                self.wire.wait(handle, "parameters")
            unit.handles = None
        else:
            self.changes.compare(unit.parameters)
            self.send_away(unit)
        for whole in unit.whole:
            self._where.pop(whole.untyped_storage().data_ptr(), None)
            self.pool.give(whole)
        unit.whole = None
        unit.stays = False

    def free_all(self) -> None:
        """Free every unit that is gathered or on its way."""
        for unit in self.units:
            self.free(unit)

    def send_away(self, unit: GatherUnit) -> None:
        """Remove the elements of a unit's parameters."""

        def fetch(parameter: nn.Parameter) -> None:
            self.need(unit)
            # a module outside the unit needs it, and no hook shows for how long
            unit.stays = True
            unit.always_stays = True

        with torch.inference_mode(False), torch.no_grad():
            for share in unit.shares:
                for parameter in share.parameters:
                    remove_elements(parameter, fetch, self.in_place)

    def lies_in(self, tensor: Tensor) -> tuple[GatherUnit, int] | None:
        """Return the unit, and the share's index, whose buffer a tensor is in.

        None for other tensors.
        """
        if tensor.layout != torch.strided:
            return None
        try:
            return self._where.get(tensor.untyped_storage().data_ptr())
        except (
            NotImplementedError,
            RuntimeError,
        ):  # tensors without their own memory, such as nested or fake tensors
            return None

    def called(self, unit: GatherUnit, outputs: Any) -> None:
        """Record that a module of the unit has returned in forward; free the unit if possible."""
        unit.calls += 1
        for output in tensors_in(outputs):
            if (found := self.lies_in(output)) is not None:
                found[0].stays = True
        # All modules have been called, so the unit is not used again until backward. A unit that is
        # called more often is gathered again, and then stays.
        if unit.calls >= len(unit.modules) and not (unit.stays or unit.always_stays):
            self.free(unit)

    def own_memory(self, outputs: Any) -> Any:
        """Return the outputs, with copies of tensors that are in a buffer."""
        return tree_map_only(
            Tensor, lambda output: output.clone() if self.lies_in(output) else output, outputs
        )

    # Tensors that autograd saves.

    def count(self) -> None:
        """Count the bytes that a pass reads instead of receiving, if parameters are `in_place`."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager: autograd saves offsets in units instead of views of parameters."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        found = self.lies_in(tensor)
        if found is None:
            return tensor if self.keeper is None else self.keeper.pack(tensor)
        unit, share = found
        assert unit.whole is not None
        if tensor.dtype != unit.whole[share].dtype or tensor.is_conj() or tensor.is_neg():
            # sizes and strides do not describe such a view
            return tensor.clone()
        return _Saved(self, unit, share, tensor)

    def _unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Saved):
            tensor: Tensor = kept if self.keeper is None else self.keeper.unpack(kept)
            return tensor
        # in backward: the unit may have to be gathered now
        self.need(kept.unit)
        assert kept.unit.whole is not None
        view = kept.unit.whole[kept.number].as_strided(kept.size, kept.stride, kept.offset)
        return (
            view.clone() if torch.is_grad_enabled() else view
        )  # a graph of gradients (create_graph) needs the tensor after this pass

    def begin_backward(self) -> None:
        """Begin a backward pass, in which complete units are freed."""
        self.in_backward = True
        for unit in self.units:
            # A unit without trained parameters has no gradients to wait for, unless it was once
            # freed too early.
            unit.complete = not (
                unit.comes_again or any(share.block.trained for share in unit.shares)
            )

    def unneeded(self, unit: GatherUnit) -> None:
        """Free a unit that autograd no longer needs, in backward, if its gradients are complete."""
        # Outside backward the end of a graph frees nothing: the forward pass may still use the
        # unit.
        if self.in_backward and unit.complete and unit.handles is None and not unit.stays:
            self.free(unit)

    def complete(self, unit: GatherUnit) -> None:
        """Record that all gradients of the unit are complete; free the unit if possible."""
        unit.complete = True
        if not unit.saved and not (unit.stays and unit.frozen):
            self.free(unit)
