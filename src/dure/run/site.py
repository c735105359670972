"""What a site brings along to talk with a server: its folder, its policy, its log, its identity.

`dure.join` and `dure.Client` both begin here: the folder is locked, the policy read, the session
opened, and the token of an invitation handed in where the site is new.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from dure.errors import PolicyError
from dure.wire.requests import Welcome
from dure.worlds.network.client.audit import Audit
from dure.worlds.network.client.policy import Policy
from dure.worlds.network.client.session import Session
from dure.worlds.network.client.state import ClientState


@dataclass(frozen=True)
class Reach:
    """Who takes part, and how it reaches its server.

    Args:
        name: how this client is called; by default as its invitation says, or by its number.
        state: the folder of what this client keeps; with one it may be killed and started again.
            policy.toml in it says what this site allows, audit.jsonl what has left it.
        part: for demonstrations, takes the place of this simulated client: of the task's data only
            what the partition gives it.
        token: of an invitation (dure clients invite), needed once.
        authority: PEM file of who signed the server's certificate; the system's by default.
        certificate: PEM file of this client's certificate, where the server wants one.
        give_up: hours for which a server that is not reached is tried; None tries on without end.
        identities: in split learning, a file of lines NUMBER FINGERPRINT, got from the other
            clients themselves: the head is handed to nobody else.
    """

    name: str = ""
    state: Path | None = None
    part: int | None = None
    token: str = ""
    authority: Path | None = None
    certificate: Path | None = None
    give_up: float | None = 24.0
    identities: Path | None = None

    @property
    def give_up_seconds(self) -> float | None:
        """Raises ValueError where it is no time."""
        if self.give_up is not None and not self.give_up > 0:
            raise ValueError(
                f"give_up is {self.give_up}, but a server is tried for more than 0 hours"
            )
        return None if self.give_up is None else 3600 * self.give_up


def path_of(given: str | Path | None) -> Path | None:
    """A path that may be given as text, or not at all."""
    return None if given is None else Path(given)


class Site(NamedTuple):
    """A site that can talk with its server."""

    session: Session
    kept: ClientState
    policy: Policy

    def agree(self, welcome: Welcome, approve: bool) -> None:
        """Raises PolicyError where the site does not take part in what is served.

        approve: its user agrees to this run.
        """
        if approve:
            self.kept.approve(welcome.run)
        reasons = self.policy.check(welcome)
        if self.policy.asks and not self.kept.approved(welcome.run):
            system = welcome.strategy.get("name")
            reasons.append(
                f"run {welcome.run} ({system}, {welcome.clients} clients) is not approved: look "
                f"at it, and join once with --approve"
            )
        if reasons:
            raise PolicyError(f"this site does not take part: {'; '.join(reasons)}")

    def closed(self) -> float:
        """Seconds until the site works again; 0 while it does."""
        return self.policy.seconds_until_open(datetime.now().astimezone())


@contextmanager
def opened(
    url: str,
    reach: Reach,
    stop: threading.Event,
    *,
    audits: bool = True,
    tell: Callable[[str], None] = lambda text: None,
    moved: Callable[[int], None] = lambda count: None,
) -> Iterator[Site]:
    """The site, for as long as the block goes on.

    url: of its server. stop: ends every wait. audits: notes what leaves, where the site has a
    folder. tell: hears of what goes wrong with the link; moved: of bytes of a transfer.
    """
    folder = reach.state
    _ = reach.give_up_seconds
    policy = Policy() if folder is None else Policy.beside(folder)
    with ExitStack() as ending:
        kept = ending.enter_context(ClientState(folder))
        audit = None
        if folder is not None and audits:
            audit = Audit(folder / "audit.jsonl")
            ending.callback(audit.close)
        session = Session(
            url,
            context=context_for(url, reach),
            state=kept,
            audit=audit,
            stop=stop,
            tell=tell,
            moved=moved,
            bytes_per_second=policy.bandwidth,
            give_up=reach.give_up_seconds,
        )
        ending.callback(session.close)
        if reach.token and kept.about is None:
            session.enrol(reach.token, reach.name, reach.part)
        yield Site(session, kept, policy)


def context_for(url: str, reach: Reach) -> ssl.SSLContext | None:
    """For TLS with the server; None over plain HTTP."""
    if not url.startswith("https:"):
        return None
    # Here: a site without TLS does without these libraries.
    from dure.wire.certificates import client_context

    own = None
    if reach.certificate is not None:
        own = reach.certificate, reach.certificate.with_suffix(".key")
    return client_context(reach.authority, own)
