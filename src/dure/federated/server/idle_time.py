"""Idle time of clients: waiting for the other clients of their round.

    idle time of client k in a round    T - a_k - c_k

    T      end of the round: its model is made
    a_k    time of the client's first assignment
    c_k    seconds in which the client computed or transferred since

A client with an arrived update waits until the slowest client has answered, or until the deadline.
A client that was not asked, has failed, or answers after the end of the round has no idle time. In
asynchronous systems a client is free as soon as its update has arrived: T is that moment.
"""

from __future__ import annotations

from collections.abc import Sequence

from dure.protocol.carrier import STEP, AssignmentRecord

ROUNDING = 1e-9
"""Tolerated rounding error of sums of times, in seconds."""


def idle_seconds(flown: Sequence[AssignmentRecord], until: float | None) -> dict[int, float]:
    """Return the idle time in seconds of each client whose update arrived in time.

    flown: the assignments that ended since the last model, with their protocol steps. until: time
    of the new model, with rounds; None if a client does not wait after its update.
    """
    answered = [flight for flight in flown if flight.outcome == "accepted"]
    began: dict[int, float] = {}
    idle: dict[int, float] = {}
    for flight in answered:
        began[flight.client] = flight.began
        whole = (flight.ended if until is None else until) - flight.began
        idle[flight.client] = idle.get(flight.client, 0.0) + whole - flight.busy_seconds
    # Steps of a protocol, before and after the update.
    for flight in flown:
        if flight.outcome == STEP and flight.client in idle:
            earlier = max(0.0, began[flight.client] - flight.began)
            began[flight.client] -= earlier
            idle[flight.client] += earlier - flight.busy_seconds
    return {client: seconds if seconds > ROUNDING else 0.0 for client, seconds in idle.items()}
