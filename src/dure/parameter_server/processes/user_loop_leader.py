"""Leader of workers in user-defined training loops (`user_loop`).

This leader assigns no work, and there are no rounds: workers make any number of steps, and leave at
any time. The leader monitors the nodes, distributes layouts, and ends when the last worker has
left. A worker whose pull times out reports the timeout. The leader determines the node that is
late, and the run ends everywhere with an error that names this node.
"""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from torch import Tensor

from dure.errors import PeerLostError, text_of, warn
from dure.parameter_server.messages import server, worker
from dure.parameter_server.processes.leader import Leader
from dure.parameter_server.processes.meeting import rank_of
from dure.parameter_server.processes.messages import (
    LeaveRequest,
    PullTimeout,
    RankFailed,
    RankLost,
    RunEnded,
)
from dure.parameter_server.tables import split_rows

ENDLESS = 1 << 62
"""Granted number of steps: more than any worker makes."""

LEFT = "left"
"""Reason of the end of a run whose last worker has left."""

_LOOK_SECONDS = 0.5


class UserLoopLeader(Leader):
    """Leader from `start` until the last worker has left."""

    buffers: tuple[int, list[Tensor]] | None = None
    """Lowest number of a worker that has left, and the buffers of its model."""

    def until_all_left(self) -> list[Tensor]:
        """Wait until all workers have left, warn of lost nodes, and return the weights, by shard.

        Raises PeerLostError if weights were lost, all workers were lost, or a pull timed out.
        """
        told: set[str] = set()
        all_left = self.meet(ENDLESS)
        while not all_left.done():
            wait([all_left], _LOOK_SECONDS)
            self._tell_of_the_dead(told)
        all_left.result()
        weights, _ = split_rows(self.values().result())
        self.ended = LEFT
        return weights

    def _tell_of_the_dead(self, told: set[str]) -> None:
        for name, reason in list(self.manager.dead.items()):
            if name not in told:
                told.add(name)
                rank = rank_of(name, self.plan)
                warn(f"{name}, rank {rank}, is lost ({reason}); the others continue without it")

    def _hear(self, sender: str, said: Any, now: float) -> None:
        if isinstance(said, LeaveRequest):
            if self.buffers is None or said.worker < self.buffers[0]:
                self.buffers = said.worker, said.buffers
            self._say(self.manager.leave(said.worker, said.clock))
            self.endpoint.say(sender, RunEnded(LEFT))
            self._changed(now)
        elif isinstance(said, PullTimeout):
            self._look_for(said)
        elif isinstance(said, RankFailed) and sender.startswith("worker"):
            # The error of a worker's loop ends this worker alone.
            self._say(self.manager.lost(sender, said.reason, now))
            self._changed(now)
        else:
            super()._hear(sender, said, now)

    def _look_at_hanging(self, now: float) -> None:
        """Do nothing: a slow worker is legal until another worker's pull times out."""

    def _look_for(self, waits: PullTimeout) -> None:
        """Raise PeerLostError for the nodes that delayed a worker's pull."""
        names = [worker(who) for who in self._behind(waits.clock)]
        reason = f"made no step for {self._deadline:g} s"
        if not names:
            owners = [self.manager.layout.shards[shard].owner for shard in waits.shards]
            names = sorted({server(owner) for owner in owners if owner is not None})
            reason = f"did not answer for {self._deadline:g} s"
        if names:
            raise PeerLostError(
                tuple(rank_of(name, self.plan) for name in names),
                f"the pull of {worker(waits.worker)}",
                f"step {waits.clock + 1}",
                reason,
            )

    def _behind(self, clock: int) -> list[int]:
        """Return the workers that a pull at this clock waits for."""
        if self.plan.staleness is None:
            return []
        least = clock - self.plan.staleness
        return [who for who in self._alive() if self._clock.get(who, (0, 0.0))[0] < least]

    def _fail(self, error: BaseException) -> None:
        lost = _lost(error)
        for name in [*map(server, range(self.plan.servers)), *map(worker, self.plan.workers)]:
            if self.manager.alive(name):
                self.endpoint.say(name, lost)
        super()._fail(error)


def _lost(error: BaseException) -> RankLost:
    """Return the message about an error of the leader."""
    if isinstance(error, PeerLostError):
        return RankLost(error.ranks, error.operation, error.step, error.reason)
    return RankLost((0,), "the run", "the training", f"failed: {text_of(error)}")
