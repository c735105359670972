"""What a site brings along to talk with a server: its folder, its policy, its log, its identity.

`dure.join` and `dure.Client` both begin here: the folder is locked, the policy read, the session
opened, and the token of an invitation handed in where the site is new.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from dure.errors import PolicyError
from dure.wire.requests import Welcome
from dure.worlds.network.client.audit import Audit
from dure.worlds.network.client.policy import Policy
from dure.worlds.network.client.session import Session
from dure.worlds.network.client.state import ClientState


class Reach(NamedTuple):
    """How a site reaches its server, and as whom; `dure.join` says what these are."""

    url: str
    name: str = ""
    state: str | Path | None = None
    part: int | None = None
    token: str = ""
    authority: str | Path | None = None
    certificate: str | Path | None = None
    give_up: float | None = 24.0

    @property
    def give_up_seconds(self) -> float | None:
        """Raises ValueError where it is no time."""
        if self.give_up is not None and not self.give_up > 0:
            raise ValueError(
                f"give_up is {self.give_up}, but a server is tried for more than 0 hours"
            )
        return None if self.give_up is None else 3600 * self.give_up


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
    reach: Reach,
    stop: threading.Event,
    *,
    audits: bool = True,
    tell: Callable[[str], None] = lambda text: None,
    moved: Callable[[int], None] = lambda count: None,
) -> Iterator[Site]:
    """The site, for as long as the block goes on.

    stop: ends every wait. audits: notes what leaves, where the site has a folder. tell: hears of
    what goes wrong with the link; moved: of bytes of a transfer.
    """
    folder = Path(reach.state) if reach.state is not None else None
    _ = reach.give_up_seconds
    policy = Policy() if folder is None else Policy.beside(folder)
    with ExitStack() as ending:
        kept = ending.enter_context(ClientState(folder))
        audit = None
        if folder is not None and audits:
            audit = Audit(folder / "audit.jsonl")
            ending.callback(audit.close)
        session = Session(
            reach.url,
            context=context_for(reach),
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


def context_for(reach: Reach) -> ssl.SSLContext | None:
    """For TLS with the server; None over plain HTTP."""
    if not reach.url.startswith("https:"):
        return None
    # Here: a site without TLS does without these libraries.
    from dure.wire.certificates import client_context

    own = None
    if reach.certificate is not None:
        own = Path(reach.certificate), Path(reach.certificate).with_suffix(".key")
    return client_context(Path(reach.authority) if reach.authority is not None else None, own)
