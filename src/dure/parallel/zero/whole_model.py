"""The whole model on rank 0 or on all ranks: parameters to read and change, and state_dicts.

Messages go block by block. The meter does not count them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.collectives.tensor_transfer import gathered
from dure.memory.spill_store import SpillStore
from dure.parallel.zero.agreement import raise_on_all_ranks
from dure.parallel.zero.chunk_collectives import Algorithm, ChunkCollectives
from dure.parallel.zero.partitioned_parameters import elements_of, set_elements
from dure.parallel.zero.passes import ZeROPasses
from dure.parallel.zero.shares import ParameterShare
from dure.record.disk_tensors import (
    DiskTensor,
    DiskTensors,
    Leaf,
    TensorMeta,
    elements,
    form_of,
    forms_of,
    in_memory,
    leaves_of,
    put,
    run_of,
)


class UndividedModel:
    """The undivided model. group: a group whose meter is not reported."""

    def __init__(
        self,
        model: nn.Module,
        shares: Sequence[ParameterShare],
        passes: ZeROPasses,
        group: Group,
        algorithm: Algorithm,
    ) -> None:
        self.model = model
        self.shares = list(shares)
        self.passes = passes
        # without overlap: nothing else runs when the whole model is requested
        self.wire = ChunkCollectives(group, algorithm, beside=False)

    @torch.no_grad()
    def values(self, share: ParameterShare) -> list[Tensor]:
        """Return a block's parameters in their own dtype.

        In stages 1 and 2 they are the model's own memory, unless the master has another dtype.
        """
        # A clone if memory is common: a rank may change its values while others still read.
        if share.whole is not None and share.master is share.own:
            return share.views(share.whole.clone() if share.common else share.whole)
        whole = torch.empty(share.block.padded, dtype=share.block.master, device=share.own.device)
        self.wire.all_gather(whole, share.master).wait()
        return share.views(whole)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context manager in which the model is whole on every rank."""
        # Inside a pass, hooks would gather and free units while the caller uses the whole model.
        if self.passes.scope is not None or self.passes.in_backward():
            raise RuntimeError(
                "gathered() was called inside the model's forward or backward pass: call it "
                "before or after"
            )
        if self.passes.rests:
            raise RuntimeError("gathered() was called inside gathered()")
        values = {id(share): self.values(share) for share in self.shares}
        with torch.no_grad():
            self._give(values)
        # From here on hooks do nothing: all parameters are available.
        self.passes.rests = True
        try:
            yield
        finally:
            self.passes.rests = False
            with torch.no_grad():
                self._take_back(values)

    def _give(self, values: Mapping[int, list[Tensor]]) -> None:
        if self.passes.gathering is not None:
            for unit in self.passes.gathering.units:
                for number, share in enumerate(unit.shares):
                    unit.give(number, values[id(share)])
            return
        for share in self.shares:
            for parameter, value in zip(share.parameters, values[id(share)], strict=True):
                set_elements(parameter, value)

    def _take_back(self, values: Mapping[int, list[Tensor]]) -> None:
        # Other ranks may still read memory that this rank writes next.
        self.meet()
        for share in self.shares:
            # In stages 1 and 2 the caller changed the share itself, unless the master is a copy.
            if share.whole is None or share.common or share.master is not share.own:
                share.take([elements_of(parameter) for parameter in share.parameters])
            if share.whole is not None:
                share.install()
        if self.passes.gathering is not None:
            for unit in self.passes.gathering.units:
                self.passes.gathering.send_away(unit)
        self.meet()

    def meet(self) -> None:
        """Wait for all ranks if memory is common.

        No rank writes before all have read, and no rank reads before all have written.
        """
        if any(share.common for share in self.shares):
            self.wire.meet()

    @torch.no_grad()
    def state_dict(self, everywhere: bool) -> dict[str, Any]:
        """Return a copy of the model's state_dict: on rank 0, or on every rank.

        On other ranks the dictionary is empty. All ranks call this method.
        """
        # Every rank takes part in the gather of every block, even if it returns nothing.
        keeps = everywhere or self.wire.group.rank == 0
        found = {}
        for share in self.shares:
            for parameter, value in zip(share.parameters, self.values(share), strict=True):
                if keeps:
                    found[id(parameter)] = value.clone()
        if not keeps:
            return {}
        # The model defines names and order; with keep_vars its parameters match by identity.
        state: dict[str, Any] = self.model.state_dict(keep_vars=True)
        for name, value in state.items():
            if id(value) in found:
                state[name] = found[id(value)]
            elif isinstance(value, Tensor):
                state[name] = value.detach().clone()
        return state

    @torch.no_grad()
    def weights(self, store: SpillStore) -> DiskTensors:
        """Return the state_dict on rank 0, with tensors on a shelf; empty on other ranks.

        No rank has more than its share in memory: other ranks send a few million bytes at a time.
        """
        leads = self.wire.group.rank == 0
        places: dict[str, Leaf] = {}
        own: dict[str, Tensor] = {}
        for share in self.shares:
            # The whole block is on this rank already, in full precision.
            whole = share.views(share.whole) if share.whole is not None else []
            whole = whole if share.master is share.own else []
            for index, name in enumerate(share.block.names):
                if leads:
                    form = form_of(name, share.block.master, share.block.shapes[index])
                    places[name] = store.place(form)
                if whole and leads:
                    put(places[name], 0, whole[index].reshape(-1))
                piece = share.block.piece(index, share.rank)
                if not whole and piece is not None:
                    own[f"{piece.start} {name}"] = share.of(share.master, piece)

        def place(form: TensorMeta) -> Leaf:
            start, _, name = form.name.partition(" ")
            return run_of(places[name], int(start), int(start) + form.shape[0])

        gathered(self.wire.group, own, place)
        if not leads:
            return DiskTensors({})
        for form in forms_of(own):
            put(place(form), 0, own[form.name])
        return DiskTensors(self._named(places))

    def _named(self, places: Mapping[str, Leaf]) -> dict[str, Leaf]:
        """Return a state_dict of the model with these tensors in place of divided parameters."""
        names = {
            id(parameter): name
            for share in self.shares
            for name, parameter in zip(share.block.names, share.parameters, strict=True)
        }
        # with keep_vars, as in `state_dict`
        state: dict[str, Any] = self.model.state_dict(keep_vars=True)
        for name, value in state.items():
            if id(value) in names:
                state[name] = places[names[id(value)]]
            elif isinstance(value, Tensor):
                state[name] = value.detach().to("cpu", copy=True)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a whole state_dict, which is given on every rank.

        Only this rank's share of tensors in files is read. Raises ValueError, on all ranks and
        before any change, if names or shapes differ from the model's on any rank.
        """
        known: dict[str, Any] = self.model.state_dict(keep_vars=True)
        leaves = leaves_of(state)
        with raise_on_all_ranks(self.wire.group, "comparison of a state_dict with the model"):
            _check_fits(leaves, known)
        divided = {id(parameter) for share in self.shares for parameter in share.parameters}
        values = {id(own): leaves[name] for name, own in known.items() if id(own) in divided}
        self.meet()
        for share in self.shares:
            given = {
                name: values[id(parameter)]
                for name, parameter in zip(share.block.names, share.parameters, strict=True)
            }
            share.fill(partial(_elements, given))
        # buffers, and frozen parameters that are not divided
        rest = {name: value for name, value in leaves.items() if id(known[name]) not in divided}
        self.model.load_state_dict(
            {
                name: in_memory(value) if isinstance(value, DiskTensor) else value
                for name, value in rest.items()
            },
            strict=False,
        )
        self.meet()


def _elements(given: Mapping[str, Leaf], name: str, start: int, stop: int) -> Tensor:
    return elements(given[name], start, stop)


def _check_fits(state: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Check that a state_dict has the names and shapes of the model's `known` state_dict.

    Raises ValueError otherwise.
    """
    missing = sorted(known.keys() - state.keys())
    unknown = sorted(state.keys() - known.keys())
    if missing or unknown:
        raise ValueError(
            f"this state_dict does not match the model: missing {missing}, unknown {unknown}"
        )
    for name, own in known.items():
        if not isinstance(own, Tensor):  # a module's extra state, which is its own matter
            continue
        there = state[name]
        if not isinstance(there, (Tensor, DiskTensor)):
            raise ValueError(
                f"{name} is a {type(there).__name__} in the state_dict, but a tensor in the model"
            )
        if tuple(there.shape) != tuple(own.shape):
            raise ValueError(
                f"{name} has the shape {tuple(there.shape)} in the state_dict, but "
                f"{tuple(own.shape)} in the model"
            )
