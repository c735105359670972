"""Idle time of clients: waiting for the other clients of their round.

    idle time of client k in a round    T - a_k - c_k

    T      the end of the round: its model is made
    a_k    when the client was asked first
    c_k    seconds in which it computed or transferred since

A client whose update is in waits until the slowest one has answered, or until the deadline. Who was
not asked, has failed, or answers after the end of the round waits for nobody. In asynchronous
systems a client is free as soon as its update is in: T is that moment.
"""

from __future__ import annotations

from collections.abc import Sequence

from dure.protocol.carrier import STEP, Flight

ROUNDING = 1e-9
"""Seconds that sums of times may be off."""


def idle_seconds(flown: Sequence[Flight], until: float | None) -> dict[int, float]:
    """Return the idle time of each client whose update came in time.

    flown: the assignments that ended since the model before, with their steps. until: when the
    model was made, in rounds; None where a client has nothing to wait for behind its update.
    """
    answered = [flight for flight in flown if flight.outcome == "accepted"]
    began: dict[int, float] = {}
    idle: dict[int, float] = {}
    for flight in answered:
        began[flight.client] = flight.began
        whole = (flight.ended if until is None else until) - flight.began
        idle[flight.client] = idle.get(flight.client, 0.0) + whole - flight.busy_seconds
    # Steps of a protocol, before the update and after it.
    for flight in flown:
        if flight.outcome == STEP and flight.client in idle:
            earlier = max(0.0, began[flight.client] - flight.began)
            began[flight.client] -= earlier
            idle[flight.client] += earlier - flight.busy_seconds
    return {client: seconds if seconds > ROUNDING else 0.0 for client, seconds in idle.items()}
