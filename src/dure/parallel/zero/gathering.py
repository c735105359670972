"""Stage 3: units are gathered just before they are used, and freed after it.

A unit is gathered into a buffer, of which its parameters become views; when it is freed they are
`Away`. What autograd saves of them for the backward pass is kept as a place in the unit and not as
memory, and read from the buffer that the unit then has (torch's saved-tensor hooks). A unit is
freed in backward when all its gradients are there and nothing in the graph needs it; before that
some module of it may come again, such as a part whose activations are computed anew.

A unit is used from the first call of one of its modules to the end of the last. What a module gives
back may be a view of a parameter; then the unit stays until the forward pass ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dure.collectives.handle import Handle
from dure.memory.mapped import release
from dure.parallel.zero.away import bring_back, send_away
from dure.parallel.zero.changes import Changes
from dure.parallel.zero.shares import Pool, Share
from dure.parallel.zero.wire import Wire


class Unit:
    """Shares that are gathered together.

    calls: of its modules in this forward pass. saved: places that autograd keeps. stays: until the
    end of the pass. always_stays: so in every forward pass. complete: all its gradients of this
    backward pass are there. comes_again: a backward pass needed it after it was freed. whole: one
    buffer a share, where it is gathered or on its way. handles: while it is on its way.
    """

    def __init__(self, number: int, modules: list[nn.Module], shares: list[Share]) -> None:
        self.number = number
        self.modules = modules
        self.shares = shares
        # the classes to give back, before the parameters become `Away`
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
        """Those of all its shares."""
        for share in self.shares:
            yield from share.parameters

    def give(self, share: int, elements: Sequence[Tensor]) -> None:
        """Gives the parameters of a share their elements."""
        for parameter, kind, own in zip(
            self.shares[share].parameters, self.kinds[share], elements, strict=True
        ):
            bring_back(parameter, kind, own)

    @property
    def frozen(self) -> bool:
        """Whether it has parameters without gradients.

        Nothing tells when backward is done with those.
        """
        return any(not share.block.trained for share in self.shares)


def tensors_in(outputs: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors in what a module gives back.

    They may lie in containers, and in objects of classes that torch does not know.
    """
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            yield leaf
        # to a depth, since objects may refer to each other
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)):
            yield from tensors_in(list(vars(leaf).values()), depth - 1)


class _Saved:
    """What autograd keeps instead of a view of a parameter."""

    __slots__ = ("gathering", "number", "offset", "share", "size", "stride", "unit")

    def __init__(self, gathering: Gathering, unit: Unit, share: int, view: Tensor) -> None:
        self.gathering = gathering
        self.unit = unit
        self.number = share
        self.offset = view.storage_offset()
        self.size = view.size()
        self.stride = view.stride()
        unit.saved += 1

    def __del__(self) -> None:
        # Autograd drops what it has kept as soon as a node is done, and so tells when the unit is
        # free.
        self.unit.saved -= 1
        if not self.unit.saved:
            self.gathering.unneeded(self.unit)


class Keeper(Protocol):
    """Keeps what autograd keeps of activations."""

    def pack(self, tensor: Tensor) -> Any:
        """What autograd is to hold in place of a tensor."""

    def unpack(self, held: Any) -> Tensor:
        """The inverse of `pack`."""


class Gathering:
    """All units of a model on one rank, gathered and freed.

    need: called with a unit that a module needs; set by whoever decides when units are gathered.
    changes: tells whether a pass has changed what it was lent.

    here: whether all parameters are, so that nothing has to be asked
    (`dure.parallel.zero.in_place`).
    """

    in_place = False
    here = False

    def __init__(self, units: list[Unit], wire: Wire, pool: Pool, changes: Changes) -> None:
        self.units = units
        self.wire = wire
        self.pool = pool
        self.changes = changes
        self.in_backward = False
        # by address of a buffer's storage: the unit and share that lie in it
        self._where: dict[int, tuple[Unit, int]] = {}
        self.need: Any = None
        self.keeper: Keeper | None = None
        """Of what is no parameter; None leaves it to autograd."""
        for unit in units:
            self.send_away(unit)

    def bring(self) -> None:
        """All parameters may be used from now on, where they are `in_place`."""

    def issue(self, unit: Unit) -> None:
        """Begins to gather a unit."""
        assert unit.whole is None
        unit.whole = [
            self.pool.take(share.block.padded, share.block.dtype) for share in unit.shares
        ]
        unit.handles = [
            self.wire.all_gather(whole, share.own)
            for whole, share in zip(unit.whole, unit.shares, strict=True)
        ]

    def arrive(self, unit: Unit) -> None:
        """Waits for a unit that was issued, and gives its parameters their elements."""
        if unit.handles is None:
            return
        for handle in unit.handles:
            self.wire.wait(handle, "parameters")
        unit.handles = None
        # This rank's own chunks may lie in files (`ZeroRedundancy`), and were read to be sent.
        release(share.own for share in unit.shares)
        assert unit.whole is not None
        # Views that are made in inference mode could not be used for training afterwards.
        with torch.inference_mode(False), torch.no_grad():
            for number, (share, whole) in enumerate(zip(unit.shares, unit.whole, strict=True)):
                self._where[whole.untyped_storage().data_ptr()] = unit, number
                unit.give(number, share.views(whole))

    def free(self, unit: Unit) -> None:
        """Gives back the buffers of a unit, wherever it is."""
        if unit.whole is None:
            return
        if unit.handles is not None:
            # On its way: others count on the message, and the buffer must not be used before it has
            # come.
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
        """Frees every unit that is here or on its way."""
        for unit in self.units:
            self.free(unit)

    def send_away(self, unit: Unit) -> None:
        """Takes the elements from a unit's parameters."""

        def fetch(parameter: nn.Parameter) -> None:
            self.need(unit)
            # a module that is not of the unit needs it, and does not tell for how long
            unit.stays = True
            unit.always_stays = True

        with torch.inference_mode(False), torch.no_grad():
            for share in unit.shares:
                for parameter in share.parameters:
                    send_away(parameter, fetch, self.in_place)

    def lies_in(self, tensor: Tensor) -> tuple[Unit, int] | None:
        """The unit, and its share, in whose buffer a tensor lies."""
        if tensor.layout != torch.strided:
            return None
        try:
            return self._where.get(tensor.untyped_storage().data_ptr())
        except (
            NotImplementedError,
            RuntimeError,
        ):  # tensors without memory of their own, such as nested or fake ones
            return None

    def called(self, unit: Unit, outputs: Any) -> None:
        """A module of the unit has returned, in a forward pass."""
        unit.calls += 1
        for output in tensors_in(outputs):
            if (found := self.lies_in(output)) is not None:
                found[0].stays = True
        # All of its modules have been called, so it is not used again until backward. One that is
        # called more often is gathered again, and then stays.
        if unit.calls >= len(unit.modules) and not (unit.stays or unit.always_stays):
            self.free(unit)

    def own_memory(self, outputs: Any) -> Any:
        """The outputs, copied where they lie in a buffer."""
        return tree_map_only(
            Tensor, lambda output: output.clone() if self.lies_in(output) else output, outputs
        )

    # What autograd saves.

    def count(self) -> None:
        """Counts what a pass reads, where that is not sent."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, autograd keeps places in units instead of their memory."""
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
        # in backward: it may have to be gathered now
        self.need(kept.unit)
        assert kept.unit.whole is not None
        view = kept.unit.whole[kept.number].as_strided(kept.size, kept.stride, kept.offset)
        return (
            view.clone() if torch.is_grad_enabled() else view
        )  # a graph of gradients keeps it beyond this pass

    def begin_backward(self) -> None:
        """A backward pass begins: from now on units are freed when they are complete."""
        self.in_backward = True
        for unit in self.units:
            # A unit without trained parameters has no gradients to wait for, unless it was once
            # freed too early.
            unit.complete = not (
                unit.comes_again or any(share.block.trained for share in unit.shares)
            )

    def unneeded(self, unit: Unit) -> None:
        """Autograd keeps no place in this unit any more."""
        # Outside of backward a graph that is dropped frees nothing: the forward pass may still use
        # the unit.
        if self.in_backward and unit.complete and unit.handles is None and not unit.stays:
            self.free(unit)

    def complete(self, unit: Unit) -> None:
        """All gradients of the unit are there."""
        unit.complete = True
        if not unit.saved and not (unit.stays and unit.frozen):
            self.free(unit)
