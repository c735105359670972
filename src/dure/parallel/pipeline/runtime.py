"""Execution of a rank's list of actions.

Receives begin ahead, so that the next two messages arrive during the work on the current message.
They do not begin ahead if the transport accepts that many messages at once and stores them at their
receiver: then a rank fetches a message when it needs the message, without earlier interruptions.
Sends continue during the computation, and the rank waits for them at the end of the step. Stages on
the same rank pass tensors directly. The lists decide everything else
(`dure.parallel.pipeline.schedule`).

A message over the boundary after stage s holds the values that cross the boundary, in their order,
and on the way back a gradient for each differentiable value. So a micro-batch costs 4 b e bytes in
each direction, for b examples and e float32 numbers per example; STATE_BYTES are added on the way
forward if the generator's state travels (`dure.parallel.pipeline.rng`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from dure.collectives.group import Group, done_already
from dure.parallel.pipeline.message_cost import StepCosts
from dure.parallel.pipeline.program import StageProgram
from dure.parallel.pipeline.rng import STATE_BYTES, RandomStream
from dure.parallel.pipeline.schedule import RECEIVES, Action, Schedule
from dure.parallel.pipeline.stage import Microbatch, Stage
from dure.parallel.pipeline.trace import ValueSpec

AHEAD = 3
"""Number of receives that are in progress while a rank waits for the first of them."""

COSTS = 64
"""Number of steps whose times are stored."""

StageMicrobatch = tuple[int, int]
"""Stage and micro-batch."""


class PipelineEngine:
    """The stages of this rank, driven by the rank's list of actions.

    Args:
        group: the ranks of the pipeline, as the schedule numbers them.
        schedule: the actions of all ranks.
        stages: the stages of this rank by number.
        stream: the source of random numbers.
        device: the device on which messages arrive.
    """

    def __init__(
        self,
        group: Group,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        stream: RandomStream,
        device: torch.device,
    ) -> None:
        self.group = group
        self.schedule = schedule
        self.stages = stages
        self._stream = stream
        self._device = device
        self.actions = schedule.actions[group.rank]
        self.spans: list[tuple[Action, float, float]] = []
        """Computations of the last step, with start and end in seconds of `time.perf_counter`."""
        self.costs: deque[StepCosts] = deque(maxlen=COSTS)
        """Times of the newest steps."""

    def run(self, step: int, batches: Sequence[Microbatch]) -> None:
        """Run a step. Gradients are added to the parameters' gradients.

        Raises PeerLostError if another rank is lost.
        """
        begun = time.perf_counter()
        self._step = step
        self._batches = batches
        # Values and gradients that arrived, until they are used; and results, until they are sent.
        self._inputs: dict[StageMicrobatch, list[Tensor]] = {}
        self._gradients: dict[StageMicrobatch, list[Tensor]] = {}
        self._results: dict[StageMicrobatch, list[Tensor]] = {}
        self._sends: list[Callable[[], None]] = []
        # Receives that have not begun, and receives in progress: both in the order of the list,
        # which is the order of the senders.
        self._expected = deque(action for action in self.actions if action.kind in RECEIVES)
        self._coming: deque[tuple[list[Tensor], Callable[[], None]]] = deque()
        self._ahead = 1 if self._device.type == "cpu" and self._lie_here() else AHEAD
        self.spans = []
        for stage in self.stages.values():
            stage.begin(step)
        for action in self.actions:
            self._do(action)
        started = time.perf_counter()
        # No rank waits for a send before this line; `validate` relies on that to exclude deadlocks.
        for end in self._sends:
            end()
        if self._sends:
            self.group.meter.communication("sends", started, time.perf_counter(), step + 1)
        if self.spans:
            computed = sum(end - start for _, start, end in self.spans) / len(self.spans)
            received = sum(action.kind in RECEIVES for action in self.actions)
            self.costs.append(StepCosts(computed, time.perf_counter() - begun, received))

    def _do(self, action: Action) -> None:
        kind, number, microbatch = action
        place = (number, microbatch)
        if kind == "receive_input":
            received = self._program(number, microbatch).received
            arrived = self._receive(action)
            values = [
                value.laid_out(tensor) for value, tensor in zip(received, arrived, strict=False)
            ]
            # The state of a generator, if it travels, comes last.
            self._inputs[place] = values + arrived[len(received) :]
        elif kind == "receive_gradient":
            self._gradients[place] = self._receive(action)
        elif kind == "send_output":
            self._send(action, self._results.pop(place), self.schedule.home[number + 1])
        elif kind == "send_gradient":
            self._send(action, self._results.pop(place), self.schedule.home[number - 1])
        else:
            self._compute(action, place)

    def _compute(self, action: Action, place: StageMicrobatch) -> None:
        """Compute a micro-batch in a stage, and pass the result on within this rank."""
        kind, number, microbatch = action
        stage = self.stages[number]
        batch = self._batches[microbatch]
        started = time.perf_counter()
        if kind == "forward":
            received = self._inputs.pop(place, [])
            # The generator state of the preceding stage is the last tensor of its message.
            if self._stream.carried and number > 0:
                self._stream.resume_from(received.pop())
            results = stage.forward(microbatch, batch, received)
            if self._stream.carried:
                # also in the last stage, whose results `_hand_over` drops
                results.append(self._stream.state())
            self._hand_over(place, number + 1, results, self._inputs)
        elif kind == "weight_gradient":
            stage.weight_gradient(microbatch)
        else:
            # An input gradient is sent at once; the weight gradient is a separate, later action.
            descend = stage.backward if kind == "backward" else stage.input_gradient
            results = descend(microbatch, batch, self._gradients.pop(place, []))
            self._hand_over(place, number - 1, results, self._gradients)
        ended = time.perf_counter()
        self.spans.append((action, started, ended))
        name = f"{kind.replace('_', ' ')} {number}.{microbatch}"
        self.group.meter.compute(name, started, ended, self._step + 1)

    def _hand_over(
        self,
        place: StageMicrobatch,
        to: int,
        results: list[Tensor],
        inboxes: dict[StageMicrobatch, list[Tensor]],
    ) -> None:
        if not 0 <= to < self.schedule.stages:
            return
        # not a message: the tensors themselves
        if self.schedule.home[to] == self.group.rank:
            inboxes[to, place[1]] = results
        else:
            self._results[place] = results

    def _program(self, number: int, microbatch: int) -> StageProgram:
        return self.stages[number].program_for(self._batches[microbatch].examples)

    # Messages: a generator's state may travel after the values.

    def _send(self, action: Action, tensors: Sequence[Tensor], to: int) -> None:
        # A conjugate or negative view has a flag, which does not travel with its memory.
        sends = [(tensor.resolve_conj().resolve_neg().contiguous(), to) for tensor in tensors]
        end = self.group.begin_transfer(_words(action), sends, [])
        # A send that has already completed needs no wait.
        if end is not done_already:
            self._sends.append(end)

    def _receive(self, action: Action) -> list[Tensor]:
        """Return the message that `action` waits for.

        Further receives begin before the wait: after it they would delay the work on this message.
        """
        while self._expected and len(self._coming) < self._ahead:
            self._coming.append(self._begin(self._expected.popleft()))
        tensors, end = self._coming.popleft()
        started = time.perf_counter()
        end()
        self.group.meter.idle(
            f"wait: {_words(action)}", started, time.perf_counter(), self._step + 1
        )
        return tensors

    def _begin(self, action: Action) -> tuple[list[Tensor], Callable[[], None]]:
        source = self.schedule.home[action.counterpart.stage]
        tensors = [value.empty(self._device) for value in self._values(action)]
        if action.kind == "receive_input" and self._stream.carried:
            tensors.append(torch.empty(STATE_BYTES, dtype=torch.uint8))
        receives = [(tensor, source) for tensor in tensors]
        # The message is fetched only in the wait; until then the transport stores it.
        if self._ahead == 1:
            return tensors, partial(self._fetch, action, receives)
        return tensors, self.group.begin_transfer(_words(action), [], receives)

    def _fetch(self, action: Action, receives: Sequence[tuple[Tensor, int]]) -> None:
        with self.group.during(_words(action)):
            self.group.transfer([], receives)

    def _values(self, action: Action) -> Sequence[ValueSpec]:
        """Return descriptions of the values in a message."""
        program = self._program(action.stage, action.microbatch)
        if action.kind == "receive_input":
            return program.received
        return [value for value in program.leaving if value.differentiable]

    def _lie_here(self) -> bool:
        """Return whether the transport stores `AHEAD` of the longest messages at this rank."""
        # Messages of equal kind, stage and number of examples have equal size: check one of each.
        kinds = {(a.kind, a.stage, self._batches[a.microbatch].examples): a for a in self._expected}
        tensors = 0
        nbytes = 0
        for action in kinds.values():
            values = self._values(action)
            tensors = max(tensors, len(values))
            nbytes = max(nbytes, sum(value.nbytes for value in values))
        # The state of a generator may come with each message, as an additional tensor.
        tensors += 1
        nbytes += STATE_BYTES
        return self.group.holds(AHEAD * tensors, AHEAD * nbytes)


@cache
def _words(action: Action) -> str:
    kind, stage, microbatch = action
    what = "input" if kind == "receive_input" else "output" if kind == "send_output" else "gradient"
    verb = "receive" if kind in RECEIVES else "send"
    return f"{verb} of the {what} of stage {stage}, micro-batch {microbatch}"
