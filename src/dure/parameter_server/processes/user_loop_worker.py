"""Worker in a user's training loop: `pull` the weights, compute, `push` the gradients.

    pull    the servers' weights into the model, at most `staleness` clocks behind the slowest
    push    the gradients of the model's parameters; the clock grows by one
    leave   wait until every server has all pushes; afterwards no worker waits for this worker

The state machine is that of every worker (`worker`). Messages are sent and received within these
calls; while the loop computes, a thread sends heartbeats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from types import TracebackType
from typing import NoReturn

import torch
from torch import Tensor, nn

from dure.errors import PeerLostError, described
from dure.parameter_server.gradients import no_gradient, write_gradients
from dure.parameter_server.messages import MANAGER, Envelope, worker
from dure.parameter_server.plan import ParameterServerPlan
from dure.parameter_server.processes.buffers import GradientBuffers, WeightBuffers
from dure.parameter_server.processes.endpoint import Disconnected, Endpoint
from dure.parameter_server.processes.meeting import rank_of
from dure.parameter_server.processes.messages import (
    Heartbeat,
    LeaveRequest,
    PullTimeout,
    RankFailed,
    RankLost,
    RunEnded,
    WorkLease,
)
from dure.parameter_server.processes.serving import check_leader
from dure.parameter_server.processes.worker_process import HeartbeatThread
from dure.parameter_server.tables import split_rows
from dure.parameter_server.worker import CONNECTED, WorkerProtocol
from dure.tensors.buffers import BufferNames
from dure.tensors.elements import all_finite
from dure.tensors.flat import FlatParameters, by_dtype, trainable_parameters

VERDICT_SECONDS = 5.0
"""Seconds for the leader's answer about a timed-out pull; without an answer the leader is lost."""


class Worker:
    """Worker `number` of `count`, from `join`. A context manager: at its end the worker leaves.

    An exception in the context counts as a loss of the worker: the others continue without it.
    """

    def __init__(
        self,
        number: int,
        model: nn.Module,
        plan: ParameterServerPlan,
        skips: bool,
        endpoint: Endpoint,
        deadline: float,
    ) -> None:
        self.number = number
        self.count = len(plan.workers)
        self.model = model
        self.deadline = deadline
        self._rank = rank_of(worker(number), plan)
        self._bulk = plan.staleness == 0
        self._skips = skips
        self._port = endpoint
        self._shards = plan.shards(model)
        trained = trainable_parameters(model)
        self._vectors = list(by_dtype(trained).values())
        self._names = {id(one): name for name, one in model.named_parameters()}
        flat = FlatParameters(model, trained)
        self._slots = WeightBuffers(flat, self._shards)
        self._outbox = GradientBuffers(flat.buffers)
        self._buffers = BufferNames(model)
        self._side = WorkerProtocol(
            number,
            plan.layout(model),
            plan.all_portions(model),
            times=CONNECTED,
            into=partial(self._slots.ask, number),
        )
        self._begun = False
        self._pulled = False
        self._ended = ""
        """Reason that pulls and pushes are no longer possible; empty before."""
        self._closed = False
        self._heart = HeartbeatThread(self._side, endpoint)
        self._heart.start()

    # What can be asked

    @property
    def clock(self) -> int:
        """Number of pushes of this worker."""
        return self._side.clock

    @property
    def staleness(self) -> dict[int, int]:
        """Histogram of the pulled weights' staleness: clocks behind -> number of pulls."""
        return dict(self._side.staleness)

    @property
    def bytes_sent(self) -> int:
        """Bytes of sent gradients."""
        return self._port.sent

    @property
    def bytes_received(self) -> int:
        """Bytes of received weights."""
        return self._port.received

    # The loop

    def pull(self) -> None:
        """Set the model's weights to those of the servers, once they are recent enough.

        The weights contain all pushes of this worker, and with a staleness of s all pushes of all
        workers except the last s clocks before this worker's. Raises PeerLostError if a required
        node was lost, or if the pull timed out.
        """
        self._check_here("pull")
        self._say(self._side.pull(time.monotonic(), self._side.clock))
        self._wait(lambda: self._side.arrived, "the pull")
        values, _ = split_rows(self._side.take())
        self._slots.take(self.number, values)
        self._pulled = True

    def push(self, weight: float = 1.0) -> None:
        """Push the gradients of the model's parameters, without waiting.

        `weight` is the weight of the mean gradient relative to other workers, such as the number of
        examples if the numbers differ. With staleness 0 a step is the mean of all pushes of a clock
        by their weights; otherwise each push is a step with weight / (number of members) of its
        gradient.

        Raises RuntimeError without a pull before it, ValueError for a gradient that is not finite,
        or that is missing although the optimizer would move the parameter, and PeerLostError as
        `pull`.
        """
        self._check_here("push")
        if not self._pulled:
            raise RuntimeError(
                "push() needs a pull() before it, which identifies the weights of the gradient: "
                "to push less often, accumulate gradients over several backward passes"
            )
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight is {weight}, but it has to be 0 or more")
        gradients = self._gradients(weight)
        self._pulled = False
        self._say(self._side.push(gradients, self._share(weight), time.monotonic()))
        self._port.flush()
        self._listen(0.0)

    def leave(self) -> None:
        """Leave the run once every server has all pushes.

        Afterwards no worker waits for this worker.

        The model keeps the weights of the last pull. Raises PeerLostError as `pull`.
        """
        if self._ended:
            self._end()
            return
        try:
            self._wait(lambda: not self._side.behind, "the acknowledgement of all pushes")
            self._heart.stop()
            buffers = [buffer.detach() for buffer in self._buffers.of(self.model)]
            self._port.say(MANAGER, LeaveRequest(self.number, self._side.clock, buffers))
            self._wait(lambda: bool(self._ended), "the farewell")
        finally:
            self._ended = "it has left"
            self._end()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.leave()
            return
        if not self._ended:
            reason = described(error)
            self._port.say(MANAGER, RankFailed(self._side.name, self._step, "error", reason))
            self._ended = "it has left by an error"
        self._end()

    def begin(self) -> None:
        """Wait until the servers have the initial weights. `join` calls this."""
        try:
            self._wait(lambda: self._begun, "the beginning")
        except BaseException:
            self._end()
            raise

    # Gradients

    def _gradients(self, weight: float) -> list[Tensor]:
        """Return the gradients by shard, in memory that is stable until the acknowledgement."""
        if weight and not self._skips:
            self._check_all_there()
        room = self._outbox.room(self._side)
        for parameters, vector in zip(self._vectors, room, strict=True):
            write_gradients(parameters, vector)
            if not all_finite(vector):
                self._refuse_not_finite(parameters)
        return [room[keys.vector][keys.start : keys.stop] for keys in self._shards]

    def _check_all_there(self) -> None:
        for parameter in chain.from_iterable(self._vectors):
            if parameter.grad is None:
                raise ValueError(no_gradient(self._names[id(parameter)]))

    def _refuse_not_finite(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                raise ValueError(
                    f"the gradient of {self._names[id(parameter)]} is not finite at {self._step} "
                    f"of {self._side.name}, and nothing was pushed: lower the learning rate, or "
                    "look for invalid values in the data"
                )

    def _share(self, weight: float) -> float:
        """Return the weight of a push for the servers."""
        if self._bulk:
            return weight
        members = self._side.layout.groups[0].at(self._side.clock)
        return weight / max(1, len(members))

    # Messages

    @property
    def _step(self) -> str:
        return f"step {self._side.clock + 1}"

    def _wait(self, is_there: Callable[[], bool], operation: str) -> None:
        """Receive messages until `is_there` returns True."""
        since = time.monotonic()
        limit = since + self.deadline
        asked = False
        while not is_there():
            now = time.monotonic()
            if now >= limit and asked:
                self._lost((0,), operation, f"said nothing for {now - since:.0f} s")
            if now >= limit:
                asked = True
                limit = now + VERDICT_SECONDS
                waits = PullTimeout(self.number, self._side.clock, tuple(self._side.unanswered))
                self._port.say(MANAGER, waits)
            seconds = min(self._side.wake, limit) - now
            if not self._port.reach(MANAGER):  # the leader may start late: call it again soon
                seconds = min(seconds, 0.1)
            self._listen(seconds)

    def _listen(self, seconds: float) -> None:
        """Process received messages; waits for them for at most `seconds`."""
        for sender, said in self._port.hear(seconds):
            if isinstance(said, RunEnded):
                self._ended = "the run has ended"
                if said.ended:
                    return  # the answer to this worker's leave
                self._lost((0,), "the training", "has ended the run")
            elif isinstance(said, RankLost):
                self._ended = said.reason
                raise said.error()
            elif isinstance(said, Disconnected):
                check_leader(sender, said, "training", self._step)
                self._side.cut(sender)
            elif isinstance(said, Heartbeat):
                continue  # timeouts of pulls are reported by `PullTimeout`
            elif isinstance(said, WorkLease):
                self._begun = self._begun or said.until > 0
            else:
                self._slots.heard(sender, said)  # type: ignore[arg-type]
                self._say(self._side.receive(sender, said, time.monotonic()))  # type: ignore[arg-type]
        if time.monotonic() >= self._side.wake:
            self._say(self._side.tick(time.monotonic()))
        if self._side.given_up:
            self._lost(
                (self._rank,), "the training", "was silent, and the others continue without it"
            )

    def _say(self, said: Sequence[Envelope]) -> None:
        for to, message in said:
            self._slots.said(to, message)  # type: ignore[arg-type]
            if not self._port.say(to, message):
                self._side.cut(to)

    # The end

    def _check_here(self, call: str) -> None:
        if self._ended:
            raise RuntimeError(f"{call}() was called too late for {self._side.name}: {self._ended}")

    def _lost(self, ranks: tuple[int, ...], operation: str, reason: str) -> NoReturn:
        raise PeerLostError(ranks, operation, self._step, reason)

    def _end(self) -> None:
        """End the thread and the connections, once."""
        if not self._closed:
            self._closed = True
            self._heart.stop()
            self._port.close()
