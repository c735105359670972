"""Forward and backward passes on a rank: hooks send messages, in an order equal on all ranks.

Hooks on the model's modules show when units are needed, hooks on parameters when gradients are
complete, and a callback of autograd when a backward pass has ended. A rank without examples takes
part in a pass by sending the messages of the order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dure.collectives.group import Group
from dure.errors import RunFolderError
from dure.machine.compiler import excluded_from_compilation
from dure.parallel.gradients_into_buckets import GradientsIntoBuckets
from dure.parallel.zero.gather_order import (
    GatherAction,
    GatherSweep,
    backward_order,
    completed_events,
    forward_order,
    guessed_events,
)
from dure.parallel.zero.gathering import GatherUnit, UnitGathering
from dure.parallel.zero.gradient_reduction import GradientReduction

VERSION = 2
"""Version of the state of `MessageOrders`."""


class MessageOrders:
    """Order of the messages of a pass, equal on all ranks: a guess first, then rank 0's order.

    blocks: for each unit, its blocks that have gradients. around: units that contain other units.
    prefetch: units gathered ahead.
    """

    def __init__(self, blocks: list[list[int]], around: set[int], prefetch: int) -> None:
        self.blocks = blocks
        self.prefetch = prefetch
        self.learned = False
        self.units = list(range(len(blocks)))
        # Used until the first pass has been observed; a wrong guess costs late gradients or waits,
        # but never a wrong sum.
        self.events = guessed_events(self.units, blocks, around)
        self.everything = list(self.events)

    def forward(self) -> list[GatherAction]:
        """Return the order of the gathers of a forward pass."""
        return forward_order(self.units)

    def backward(self, gathers: bool, reduces: bool) -> list[GatherAction]:
        """Return the order of a backward pass.

        Gathers, reduces: the kinds of messages that are sent.
        """
        events = [
            event for event in self.events if (gathers if event.kind == "gather" else reduces)
        ]
        return backward_order(events, self.prefetch)

    def learn(
        self,
        group: Group,
        needed: Sequence[int],
        events: Sequence[GatherAction],
        carrier: int | None,
    ) -> None:
        """Adopt the order that rank 0 has observed. The meter does not count the exchange.

        Args:
            group: The ranks.
            needed: Units in the order in which this rank needed them in forward.
            events: Gathers and reductions in the order of this rank's backward pass.
            carrier: The block that carries the trailer, which goes last; None if there is none.
        """
        # Units that rank 0 did not need come last: other ranks may need them.
        units = list(dict.fromkeys([*needed, *self.units]))
        actions = completed_events(events, self.everything, carrier)
        # Every rank sends equally many numbers; only rank 0's numbers are used.
        mine = [float(number) for number in (*units, *map(_coded, actions))]
        numbers = [int(number) for number in group.all_gather_values(mine, "order")[0]]
        self._take(numbers)

    def state(self) -> dict[str, Any]:
        """Return the learned order for a checkpoint, which `restore` accepts."""
        return {
            "version": VERSION,
            "learned": self.learned,
            "units": self.units,
            "events": [{"kind": event.kind, "number": event.number} for event in self.events],
        }

    def restore(self, state: Mapping[str, Any] | Sequence[int]) -> bool:
        """Adopt the learned order of a checkpoint.

        Returns whether the state has an order for a model of as many units and blocks. Raises
        RunFolderError for a state of another version.

        Until version 2 a state was a list of numbers: units, then events as `_coded`; empty if no
        order was learned.
        """
        if not isinstance(state, Mapping):
            fits = len(state) == len(self.units) + len(self.everything)
            if fits:
                self._take(state)
            return fits
        if state["version"] != VERSION:
            raise RunFolderError(
                f"the order of messages has version {state['version']} of the format, but this "
                f"dure reads version {VERSION}: update dure"
            )
        sizes = (len(state["units"]), len(state["events"]))
        if not state["learned"] or sizes != (len(self.units), len(self.everything)):
            return False
        self.units = list(state["units"])
        self.events = [GatherAction(event["kind"], event["number"]) for event in state["events"]]
        self.learned = True
        return True

    def _take(self, numbers: Sequence[int]) -> None:
        """Adopt units and coded events."""
        count = len(self.units)
        self.units = list(numbers[:count])
        self.events = [_decoded(number) for number in numbers[count:]]
        self.learned = True


def _coded(action: GatherAction) -> int:
    """Return an action as a number: a gather as its unit, a reduction of block b as -1 - b."""
    return action.number if action.kind == "gather" else -1 - action.number


def _decoded(number: int) -> GatherAction:
    """Return the action of a number, the inverse of `_coded`."""
    return GatherAction("gather", number) if number >= 0 else GatherAction("reduce", -1 - number)


class ZeROPasses:
    """Passes of a model on this rank.

    Args:
        model: The divided model, which receives hooks.
        group: The ranks.
        gathering: Gathers and frees units; None in stages 1 and 2.
        reducing: Sends gradients.
        orders: Order of the messages.
        direct: Computes large gradients in their buffers.
        sends_in_backward: Whether gradients are sent during backward (stages 2 and 3).

    Attributes:
        sends: Whether gradients are sent in this pass.
        rests: Whether the whole model is gathered, so that passes have nothing to do.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        gathering: UnitGathering | None,
        reducing: GradientReduction,
        orders: MessageOrders,
        direct: GradientsIntoBuckets,
        sends_in_backward: bool,
    ) -> None:
        self.model = model
        self.group = group
        self.gathering = gathering
        self.reducing = reducing
        self.orders = orders
        self.sends_in_backward = sends_in_backward
        self.sends = True
        self.rests = False
        self._blocks = (
            dict(zip(gathering.units, orders.blocks, strict=True)) if gathering is not None else {}
        )
        self._unit_of = {block: unit for unit, blocks in self._blocks.items() for block in blocks}
        self.forward: GatherSweep | None = None
        self.backward: GatherSweep | None = None
        # the outermost module of the running forward pass; its depth of recursive calls
        self.scope: nn.Module | None = None
        self._depth = 0
        self._handled: BaseException | None = None
        # open during a forward pass: autograd saves offsets instead of views
        self._saving = ExitStack()
        self._needed: list[int] = []
        self._events: list[GatherAction] = []
        self._set_carrier()
        self._direct = direct
        if gathering is not None:
            gathering.need = self.need
            self._watch_modules(gathering)
        elif sends_in_backward:
            model.register_forward_pre_hook(
                excluded_from_compilation(self._before_forward), prepend=True
            )
        model.register_forward_hook(excluded_from_compilation(self._look_at))
        if sends_in_backward:
            self._watch_gradients()

    def _set_carrier(self) -> None:
        # The block with the trailer goes last: used and late parameters are known only then.
        carrier = self.reducing.choose_carrier(self.orders.events)
        self.reducing.carrier = carrier
        self.orders.events = completed_events(self.orders.events, [], carrier)

    def restore_order(self, state: Mapping[str, Any] | Sequence[int]) -> None:
        """Adopt the learned order of a checkpoint of a model with the same units."""
        if self.orders.restore(state):
            self._set_carrier()

    # Hooks.

    def _watch_modules(self, gathering: UnitGathering) -> None:
        # The model itself always has hooks: it begins and ends a pass.
        units: dict[nn.Module, list[GatherUnit]] = {self.model: []}
        for unit in gathering.units:
            for module in unit.modules:
                units.setdefault(module, []).append(unit)
        for module, own in units.items():
            # Before all other pre-hooks, which may read parameters; after an error as well, so that
            # the scope always ends.
            module.register_forward_pre_hook(self._before(own, gathering), prepend=True)
            module.register_forward_hook(self._after(own, gathering), always_call=True)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Stage 2: end an aborted backward pass before a new forward pass.

        Recomputation is ignored.
        """
        if not self.in_backward():
            self.abandon()

    def _before(self, units: list[GatherUnit], gathering: UnitGathering) -> Callable[..., None]:
        def before(module: nn.Module, inputs: Any) -> None:
            if self.rests:
                return
            if gathering.here and self.scope is not None and self.orders.learned:
                # in place all parameters are available, and the order is known
                self._depth += module is self.scope
                return
            if self.in_backward():  # recomputed activations
                for unit in units:
                    self.need(unit)
                    # No hook shows when the recomputed part ends.
                    unit.stays = True
                return
            self._enter(module)
            for unit in units:
                self.need(unit)

        return excluded_from_compilation(before)

    def _after(self, units: list[GatherUnit], gathering: UnitGathering) -> Callable[..., Any]:
        def after(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            if self.scope is None:  # recomputed, or failed before it began
                return None
            for unit in units:
                gathering.called(unit, outputs)
            if module is not self.scope:
                return None
            self._depth -= 1
            if self._depth:
                return None
            # this hook is also called after an error; an error that the caller was handling when
            # the pass began does not count
            failed = sys.exc_info()[1] is not self._handled
            # The buffers are freed next: the caller must not get views of them.
            outputs = gathering.own_memory(outputs)
            self._leave(failed)
            return outputs

        return excluded_from_compilation(after)

    def _look_at(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Prepare large gradients to be computed in the memory that they are sent from."""
        if torch.is_grad_enabled() and not self.rests:
            self._direct.prepare(
                output for output in tree_leaves(outputs) if isinstance(output, Tensor)
            )

    def _watch_gradients(self) -> None:
        for number, share in enumerate(self.reducing.shares):
            for index, parameter in enumerate(share.parameters):
                hook = self._gradient_hook(number, index)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient_hook(self, number: int, index: int) -> Callable[[Any], None]:
        reducing = self.reducing

        def arrived(parameter: Any) -> None:
            if self.rests:
                raise RuntimeError(
                    "a backward pass was called inside gathered(), where gradients are not "
                    "divided; leave gathered() first"
                )
            if not self.sends and self.gathering is None:
                return
            sweep = self._backward()
            if not reducing.arrived(number, index):
                return
            if self.sends:
                # The event is recorded when the gradients are complete, not when they are sent: the
                # order is learned from these events.
                self._events.append(GatherAction("reduce", number))
                sweep.advance()
            unit = self._unit_of.get(number)
            # A unit has several blocks if dtypes differ or parameters are long; it is complete with
            # its last block.
            if unit is not None and all(map(reducing.ready, self._blocks[unit])):
                assert self.gathering is not None
                self.gathering.complete(unit)

        return arrived

    # Forward.

    def _enter(self, module: nn.Module) -> None:
        if self.scope is not None:
            self._depth += module is self.scope
            return
        assert self.gathering is not None
        # An error may have ended the previous backward pass.
        self.abandon()
        self.scope = module
        self._depth = 1
        self._handled = sys.exc_info()[1]
        if module is self.model:
            self._needed = []
            self.gathering.count()
        # A pass of a part of the model has no order: units are gathered on demand, by all ranks.
        if module is self.model and not self.gathering.in_place:
            self.forward = self._forward_sweep()
        self._saving.enter_context(self.gathering.saving())

    def _forward_sweep(self) -> GatherSweep:
        order = self.orders.forward()
        return self._sweep(order)

    def _sweep(self, order: Sequence[GatherAction]) -> GatherSweep:
        return GatherSweep(
            order,
            self.orders.prefetch,
            gather=self._gather,
            reduce=self.reducing.issue,
            ready=self.reducing.ready,
        )

    def _leave(self, failed: bool) -> None:
        assert self.gathering is not None
        self._saving.close()
        self.scope = None
        # Units that this rank did not need are gathered for the ranks that did. After an error
        # nothing is sent: the ranks no longer agree on the order anyway.
        if self.forward is not None and not failed:
            self.forward.finish(self._make_room)
        self.forward = None
        self.gathering.free_all()
        for unit in self.gathering.units:
            unit.calls = 0
        if not failed:
            self.gathering.changes.check()

    def _gather(self, number: int) -> None:
        assert self.gathering is not None
        unit = self.gathering.units[number]
        if unit.whole is None:
            self.gathering.issue(unit)

    def _make_room(self, action: GatherAction) -> None:
        """Free units gathered at the end of a pass: this rank does not need them."""
        if self.gathering is not None and action.kind == "gather":
            self.gathering.free_all()

    def need(self, unit: GatherUnit) -> None:
        """Make a unit available now: gather it, or wait for it."""
        assert self.gathering is not None
        sweep: GatherSweep | None = None
        if self.in_backward():
            sweep = self._backward()
            if not self.orders.learned:
                self._events.append(GatherAction("gather", unit.number))
        elif self.scope is None:
            raise RuntimeError(
                "this parameter is divided over the ranks and is complete only while the model "
                "runs: use it inside `with zero.gathered():`, on all ranks"
            )
        else:
            sweep = self.forward
            self._needed.append(unit.number)
        if self.gathering.in_place:
            self.gathering.bring()
            return
        if unit.whole is not None and unit.handles is None:
            return
        if sweep is not None:
            # The unit was gathered in this pass and freed too early. From the next pass on it stays
            # longer.
            again = unit.whole is None and sweep.has_gathered(unit.number)
            sweep.need(unit.number)
            unit.always_stays |= again and self.scope is not None
            unit.comes_again |= again and self.scope is None
        if unit.whole is None:
            # used again after it was freed, or outside a pass of the whole model: on all ranks
            self.gathering.issue(unit)
        self.gathering.arrive(unit)

    # Backward.

    @staticmethod
    def in_backward() -> bool:
        """Return whether autograd runs a backward pass on this thread."""
        # autograd numbers its passes; -1 means none
        return torch._C._current_graph_task_id() != -1

    def _backward(self) -> GatherSweep:
        """Return the order of the running backward pass; begin the pass if needed."""
        if self.backward is None:
            self._begin_backward()
            # at the end of this backward pass, when all gradients are there
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        assert self.backward is not None
        return self.backward

    def _begin_backward(self) -> None:
        self._events = []
        self.reducing.begin()
        gathers = self.gathering is not None and not self.gathering.in_place
        order = self.orders.backward(gathers, self.sends)
        self.backward = self._sweep(order)
        if self.gathering is not None:
            self.gathering.begin_backward()
            self.gathering.count()

    def _end_backward(self) -> None:
        assert self.backward is not None
        if self.gathering is not None:
            self.gathering.in_backward = False
            self.gathering.free_all()
        # Send the messages that this rank did not need: the other ranks wait for them.
        self.backward.finish(self._make_room)
        if self.gathering is not None:
            self.gathering.free_all()
        self.backward = None
        if self.sends:
            self.reducing.finish()
            # Stage 1 sends all gradients at once, before the step: any order will do.
            if self.sends_in_backward and not self.orders.learned and self.group.size > 1:
                self.orders.learn(self.group, self._needed, self._events, self.reducing.carrier)
                self._set_carrier()
        # last, after all messages of the pass: an error must not leave other ranks waiting
        if self.gathering is not None:
            self.gathering.changes.check()

    def reduce(self) -> None:
        """Send all gradients of this rank, in a separate pass."""
        self._begin_backward()
        self._end_backward()

    def take_part(self, backward: bool) -> None:
        """Take part in a pass of the other ranks without computing.

        backward: whether a backward pass follows the forward pass.
        """
        self.abandon()
        if self.gathering is not None:
            self.gathering.count()
            if not self.gathering.in_place:
                # The others gather each unit once: this rank sends its chunks, and frees the units
                # that it receives.
                self._forward_sweep().finish(self._make_room)
                self.gathering.free_all()
        if backward and self.sends_in_backward:
            self.reduce()

    def abandon(self) -> None:
        """Discard a backward pass that an error ended; called while no pass is running.

        Raises RuntimeError if some of its gradients were sent: messages that the other ranks count,
        or wait for, cannot be taken back.
        """
        if self.backward is None:
            return
        if self.gathering is not None:
            self.gathering.in_backward = False
            self.gathering.free_all()
        if self.reducing.has_sent:
            raise RuntimeError(
                "the last backward pass was interrupted after some of its gradients had been "
                "sent: the ranks are out of step. End the program and resume from a checkpoint"
            )
        self.backward = None
