"""The life of a server's process: messages in, messages out, until the run is over."""

from __future__ import annotations

import time

from dure.errors import PeerLostError
from dure.parameter_server.messages import MANAGER, Envelope, Snapshot
from dure.parameter_server.processes.port import Gone, Port
from dure.parameter_server.processes.said import Over, Save
from dure.parameter_server.server import Server


def serve(server: Server, port: Port) -> str:
    """Serves until the leader says that it is over; by which limit.

    Raises PeerLostError if the leader is gone.
    """
    while True:
        for sender, said in port.hear(server.wake - time.monotonic()):
            if isinstance(said, Over):
                return said.ended
            if isinstance(said, Gone):
                check_leader(sender, said, "serving")
                server.cut(sender)
            elif isinstance(said, Save):
                _save(server, said.shard, sender, port)
            else:
                # Each by itself: what is said takes the weights as they are at this moment.
                _say(server.receive(sender, said, time.monotonic()), server, port)  # type: ignore[arg-type]
        if time.monotonic() >= server.wake:
            _say(server.tick(time.monotonic()), server, port)


def _say(said: list[Envelope], server: Server, port: Port) -> None:
    for to, message in said:
        if not port.say(to, message):
            server.cut(to)


def check_leader(sender: str, gone: Gone, operation: str) -> None:
    """Raises PeerLostError if it is the leader that is gone: nobody would ever end the run."""
    if sender == MANAGER:
        raise PeerLostError((0,), operation, "the run", gone.reason)


def _save(server: Server, number: int, sender: str, port: Port) -> None:
    one = server.owned.get(number)
    if one is not None:
        shard = one.shard
        port.say(sender, Snapshot(number, one.epoch, shard.version, shard.state()))
