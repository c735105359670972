"""Context of a server with clients: simulated clients, or clients on a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from dure.contracts.page import Page
from dure.contracts.world import RankContext
from dure.fleet.conditions import Conditions
from dure.protocol.carrier import Carrier, Clients
from dure.protocol.channels import Channels, HostedRun
from dure.wire.layout import FederationSpec

MakesPage = Callable[[str, str, bool, Callable[[], Mapping[str, Any]]], Page]


class SigningKey(Protocol):
    """Private key. public: the public key as text."""

    public: str

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message."""


@dataclass
class ServerContext(RankContext):
    """Context of a program that is the server of clients.

    Args:
        conditions: conditions of the clients.
        carrier: makes the carrier of messages between a coordinator and simulated clients, from the
            clients' side and the seed.
        network: makes the carrier to remote clients, from the federation.
        channels: opens the channels to remote clients that stay connected, from the facts of the
            run.
        signs: key that signs the final model; None for no signature.
        identities: the clients' public keys, by number, signed by the owner of the federation; None
            without such a roster.
        page: makes the live page of the run, for a listener of the world: from the token that opens
            the page, a description of the token's location, whether the page is served over TLS,
            and the server's facts about itself. It raises ImportError if plotting is not installed.
    """

    conditions: Conditions | None = None
    carrier: Callable[[Clients, int], Carrier] | None = None
    network: Callable[[FederationSpec], Carrier] | None = None
    channels: Callable[[HostedRun], Channels] | None = None
    signs: SigningKey | None = None
    identities: Mapping[int, str] | None = None
    page: MakesPage | None = None

    @classmethod
    def of(cls, context: RankContext, conditions: Conditions) -> ServerContext:
        """Return the context of a server that runs as a program in this context."""
        common = {one.name: getattr(context, one.name) for one in fields(RankContext)}
        return cls(**common, conditions=conditions)

    @property
    def _moves_model(self) -> bool:
        # By default clients compute where the task makes the model.
        return self.conditions is not None and self.conditions.device is not None


def conditions_in(context: RankContext) -> Conditions:
    """Return the conditions of a server's clients; ideal conditions if the context has none."""
    known = context.conditions if isinstance(context, ServerContext) else None
    return known or Conditions()


def channels_in(context: RankContext) -> Callable[[HostedRun], Channels] | None:
    """Return the function that opens channels to remote clients; None in a simulation."""
    return context.channels if isinstance(context, ServerContext) else None
