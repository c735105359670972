"""`Network`: what a run folder knows of it."""

from __future__ import annotations

from pathlib import Path

from dure.run.registry import decode_world, encode
from dure.worlds.network.world import Network


def test_a_world_with_certificates_can_be_resumed() -> None:
    world = Network(certificate="server.pem", client_ca="authority.pem")
    assert decode_world(encode(world)) == world
    assert world.certificate == str(Path.cwd() / "server.pem"), "from wherever it is resumed"
