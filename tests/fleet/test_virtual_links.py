"""Links of the virtual network: who waits for whom."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from dure.fleet.virtual_network import HEADER, Envelope, NodeLink, VirtualNetwork


class Parcel(msgspec.Struct):
    name: str
    content: Tensor


@dataclass
class Listener:
    """Notes what it is told, and when."""

    heard: dict[str, float] = field(default_factory=dict)
    wake: float = math.inf

    def receive(self, sender: str, message: Any, now: float) -> list[Envelope]:
        self.heard[message.name] = now
        return []

    def tick(self, now: float) -> list[Envelope]:
        return []


def parcel(name: str, size: int) -> Envelope:
    return "server", Parcel(name, torch.zeros(size - HEADER, dtype=torch.uint8))


def heard(into: float, *sent: tuple[str, Envelope]) -> dict[str, float]:
    """When the server hears what is sent at once by nodes that send 100 bytes a second."""
    network = VirtualNetwork()
    server = Listener()
    network.add("server", server, NodeLink(into=into))
    for name in sorted({sender for sender, _ in sent}):
        network.add(name, Listener(), NodeLink(out=100.0))
    for sender, envelope in sent:
        network.send(sender, [envelope])
    network.run(lambda: len(server.heard) == len(sent), math.inf)
    return server.heard


def test_a_large_message_that_is_still_leaving_holds_up_nobody() -> None:
    found = heard(math.inf, ("a", parcel("large", 1000)), ("b", parcel("small", 100)))
    assert found == {"small": 1.0, "large": 10.0}


def test_what_has_left_first_comes_in_first() -> None:
    found = heard(
        50.0,
        ("a", parcel("large", 300)),
        ("b", parcel("small", 100)),
        ("c", parcel("later", 250)),
    )
    # In from 1, 2.5 (when the link is free at 3) and 3 (at 8) on.
    assert found == pytest.approx({"small": 3.0, "later": 8.0, "large": 14.0})


def test_messages_of_one_sender_keep_their_order() -> None:
    found = heard(math.inf, ("a", parcel("large", 300)), ("a", parcel("small", 100)))
    assert found == {"large": 3.0, "small": 4.0}
