"""Process of a server: receive and send messages until the run ends."""

from __future__ import annotations

import time

from dure.contracts.world import RankContext
from dure.errors import PeerLostError
from dure.machine.stall_timeout import StallTimeout
from dure.parameter_server.messages import (
    MANAGER,
    Envelope,
    Message,
    Push,
    Replicate,
    Snapshot,
    Values,
)
from dure.parameter_server.processes.endpoint import Disconnected, Endpoint, payload_of
from dure.parameter_server.processes.messages import (
    Heartbeat,
    ProcessCounters,
    RankLost,
    RequestCounters,
    RunEnded,
    Save,
)
from dure.parameter_server.server import ShardServer


def serve(server: ShardServer, endpoint: Endpoint, context: RankContext) -> str:
    """Serve until the leader ends the run; returns the limit by which it has ended.

    Raises PeerLostError if the leader is lost, or reports a loss.
    """
    context.group.meter.name = server.name
    watch = LeaderWatch(context.deadline)
    while True:
        for sender, said in endpoint.hear(watch.within(server.wake - time.monotonic())):
            if isinstance(said, RunEnded):
                return said.ended
            if isinstance(said, Heartbeat | RankLost):
                watch.hear(said)
            elif isinstance(said, Disconnected):
                check_leader(sender, said, "serving", context.group.step)
                server.cut(sender)
            elif isinstance(said, Save):
                _save(server, said.shard, sender, endpoint)
            elif isinstance(said, RequestCounters):
                _tell(server, sender, endpoint, context)
            else:
                _answer(server, sender, said, endpoint, context)  # type: ignore[arg-type]
        watch.look("serving", context.group.step)
        if time.monotonic() >= server.wake:
            _say(server.tick(time.monotonic()), server, endpoint)
            # Only one of two servers calls the other: it reconnects even if only the other sends.
            for other in server.follows:
                endpoint.reach(other)


def _say(said: list[Envelope], server: ShardServer, endpoint: Endpoint) -> None:
    for to, message in said:
        if not endpoint.say(to, message):
            server.cut(to)


def _answer(
    server: ShardServer, sender: str, message: Message, endpoint: Endpoint, context: RankContext
) -> None:
    began = time.perf_counter()
    counters = context.group.meter.counters
    if isinstance(message, Push):
        context.group.step = f"step {message.clock + 1}"
    if isinstance(message, Push | Replicate):
        counters.bytes_received += payload_of(message)
    # Answers are encoded one at a time, since they take the weights at this moment.
    for to, answer in server.receive(sender, message, time.monotonic()):
        if not endpoint.say(to, answer):
            server.cut(to)
        # The leader's reads belong to measurements and are not counted.
        if isinstance(answer, Values | Replicate) and to != MANAGER:
            context.group.meter.sent(payload_of(answer))
    if sender != MANAGER:
        what = str(message.__struct_config__.tag).lower()
        clock = getattr(message, "clock", None) or 0
        context.group.meter.compute(what, began, time.perf_counter(), clock + 1)


def _tell(server: ShardServer, sender: str, endpoint: Endpoint, context: RankContext) -> None:
    """Send the counters and the new part of the timeline."""
    counters = context.group.meter.counters.as_list()
    trace = context.trace.packed(context.clock_offset)
    context.trace.lanes.clear()
    endpoint.say(sender, ProcessCounters(server.name, counters, trace))


def check_leader(sender: str, gone: Disconnected, operation: str, step: str) -> None:
    """Check that a lost node is not the leader; raises PeerLostError if it is.

    Without a leader nothing would end the run.
    """
    if sender == MANAGER:
        raise PeerLostError((0,), operation, step, gone.reason)


class LeaderWatch:
    """Monitor of the leader's heartbeats. `deadline` is in seconds."""

    def __init__(self, deadline: float) -> None:
        self._patience = StallTimeout(deadline)
        self._often = 0

    def hear(self, said: Heartbeat | RankLost) -> None:
        """Register a heartbeat. Raises PeerLostError if the leader reports the end of the run."""
        if isinstance(said, RankLost):
            raise said.error()
        self._often += 1

    def within(self, seconds: float) -> float:
        """Return the seconds to wait before the next check, at most `seconds`."""
        return min(seconds, self._patience.every) if self._often else seconds

    def look(self, operation: str, step: str) -> None:
        """Check that the leader is not silent; raises PeerLostError after the deadline.

        The check begins with the first heartbeat: before, the leader may still be starting.
        """
        if self._often and self._patience.is_over(self._often):
            reason = f"fell silent (nothing for {self._patience.deadline:g} s)"
            raise PeerLostError((0,), operation, step, reason)


def _save(server: ShardServer, number: int, sender: str, endpoint: Endpoint) -> None:
    one = server.owned.get(number)
    if one is not None:
        shard = one.shard
        endpoint.say(sender, Snapshot(number, one.epoch, shard.version, shard.state()))
