"""What a site brings along to talk with a server: its folder, its policy, its log, its identity.

`dure.join` and `dure.Client` both begin here: the folder is locked, the policy read, the session
opened, and the token of an invitation handed in where the site is new. What is served is compared
with what the site allows, and with the roster of the federation's owner where the site knows one.
What the site then agrees to is written down, and every later message is compared with it
(`dure.worlds.network.client.agreement`).
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from dure.contracts.task import Task
from dure.errors import PolicyError
from dure.federated.privacy.choice import Privacy, parse_privacy
from dure.federated.privacy.secure_aggregation.trust import semi_honest
from dure.references import is_reference
from dure.run.given import GivenReferences
from dure.wire import owners_roster
from dure.wire.loopback import is_loopback
from dure.wire.members import RosterError, is_said, key_said
from dure.wire.owners_roster import OwnersRoster, Pinned
from dure.wire.requests import CheckIn, Welcome
from dure.wire.roster import read_identities
from dure.worlds.network.client.agreement import AgreedRun, AgreementChecks
from dure.worlds.network.client.audit import Audit
from dure.worlds.network.client.connection import place_of
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
        token: of an invitation (dure clients invite), needed once; - reads it on standard input.
            Every user of this machine can read an argument: rather use --token-file.
        authority: PEM file of who signed the server's certificate; the system's by default.
        certificate: PEM file of this client's certificate, where the server wants one.
        give_up: hours for which a server that is not reached is tried; None tries on without end.
        identities: in split learning, a file of lines NUMBER FINGERPRINT, got from the other
            clients themselves: the head is handed to nobody else.
        owner: public key or fingerprint of the federation's owner, got from there: takes part only
            where that owner has signed a roster with this client on it (dure roster).
        insecure: take part without TLS too where others on the network can read the token, and
            change what is sent.
        rules: code of your own that the run may use, as path/to/file.py:Name: a partition, an
            aggregator or a selection. The server chooses by the file's and the class's name, and
            can name nothing else.
    """

    name: str = ""
    state: Path | None = None
    part: int | None = None
    token: str = ""
    authority: Path | None = None
    certificate: Path | None = None
    give_up: float | None = 24.0
    identities: Path | None = None
    owner: str = ""
    insecure: bool = False
    rules: tuple[str, ...] = ()

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
    reach: Reach
    owner: str
    """Whose signature the roster has to have; empty where the site does not know."""
    audit: Audit | None = None
    """What notes messages that leave."""

    def look(self, said: CheckIn) -> Welcome:
        """Hears what is served, and takes no place. said: a check-in that only looks."""
        self.session.checks.smallest_cohort = self.policy.smallest_cohort
        return self.session.check_in(said)

    def agree(self, welcome: Welcome, approve: bool) -> None:
        """Takes part in what is served: this run, and no other, is agreed to, on the disk.

        approve: its user agrees to this run, as it is served now. Raises PolicyError where the site
        does not take part in it, or has agreed to the run as it was served before.
        """
        if approve:
            self.kept.approve(welcome.run)
        reasons = self.refusals(welcome)
        if self.policy.asks and not self.kept.approved(welcome.run):
            system = welcome.strategy.get("name")
            reasons.append(
                f"run {welcome.run} ({system}, {welcome.clients} clients) is not approved: look "
                f"at it, and join once with --approve"
            )
        _decline(reasons)
        secure = privacy_of(welcome).secure is not None
        checks = self._checks(AgreedRun.of(welcome), secure)
        before = self.kept.agreed(welcome.run)
        if before is not None and not approve:
            self._checks(before, secure).welcome(welcome)
        self.kept.agree(checks.agreed)
        self.session.checks = checks
        self.kept.quota.limit = self.policy.quota(welcome.trains)
        if self.audit is not None:
            self.audit.quota = self.kept.quota

    def _checks(self, agreed: AgreedRun, secure: bool) -> AgreementChecks:
        return AgreementChecks(
            agreed,
            self.policy.smallest_cohort,
            allows=lambda welcome: _decline(self.refusals(welcome)),
            number=self._number,
            secure=secure,
        )

    def _number(self) -> int | None:
        about = self.kept.about
        return None if about is None else about.client

    def refusals(self, welcome: Welcome) -> list[str]:
        """Why the site does not take part, by the run and by what its server keeps to; empty where
        it does."""
        return self.reasons(welcome) or self._not_kept(welcome)

    def reasons(self, welcome: Welcome) -> list[str]:
        """Why the site does not take part in such a run; empty where it does."""
        secure = privacy_of(welcome).secure
        reasons = self.policy.check(welcome, sums=None if secure is None else secure.minimum)
        try:
            self._roster(welcome)
        except RosterError as error:
            reasons.append(str(error))
        # In such sums clients check each other by the roster: one that cannot takes no part.
        if secure is not None and welcome.roster and not self.owner:
            reasons.append(
                "the clients of this run know each other by a roster that its owner has signed: "
                "ask the owner, and not the server, for its public key, and give it as --owner"
            )
        return reasons

    def _not_kept(self, welcome: Welcome) -> list[str]:
        """Why the server would not keep to what the site asks; empty where it says it does."""
        least = self.policy.smallest_cohort
        if least == 1 or welcome.smallest_cohort >= least:
            return []
        return [
            f"policy.toml asks for at least {least} clients in a new model, and the server keeps "
            f"to {welcome.smallest_cohort or 'no number'}: its run cannot have so many, or its "
            f"dure is an older one"
        ]

    def enter(self, welcome: Welcome) -> Mapping[int, str] | None:
        """The site is a client of the run from now on. The public keys of all clients, by number,
        where their owner has signed them; None where the site knows no owner.

        Raises StateError where the folder is another client's, and PolicyError for a roster that is
        not the one with which the run was begun here.
        """
        try:
            roster = self._roster(welcome)
            self.session.belongs(welcome, self.reach.name)
            if roster is None:
                return None
            self._pinned(welcome).take(roster)
        except RosterError as error:
            raise PolicyError(f"this site does not take part: {error}") from error
        return roster.identities

    def known(self, identities: Mapping[int, str] | None) -> Mapping[int, str] | None:
        """The others, for what is handed from client to client: public keys or fingerprints.

        identities: of a roster. Raises ValueError for a list of identities that is none.
        """
        if identities is None and self.reach.identities is not None:
            return read_identities(self.reach.identities)
        return identities

    def trust(self, welcome: Welcome) -> str:
        """What the site knows of who the clients are, and has to believe; empty for nothing."""
        roster = self._roster(welcome)
        said = [] if roster is None else [f"roster {roster}"]
        secure = privacy_of(welcome).secure
        if secure is not None:
            said.append(semi_honest(secure, roster is not None))
            if self.kept.temporary:
                said.append("without --state, sums that it helps with are forgotten at its end")
        return "; ".join(filter(None, said))

    def _roster(self, welcome: Welcome) -> OwnersRoster | None:
        """The roster, checked; None where the site knows no owner. Raises RosterError."""
        if not self.owner:
            return None
        if not welcome.roster:
            raise RosterError("no roster", "the server has no roster, which --owner asks for")
        roster = OwnersRoster.from_json(welcome.roster.encode())
        owners_roster.check_owner(roster, self.owner)
        owners_roster.check_date(roster)
        owners_roster.check_count(roster, welcome.clients)
        # Who only looks has no number yet.
        number = welcome.client if welcome.client >= 0 else None
        owners_roster.check_own(roster, self.session.key.public, number)
        self._pinned(welcome).check(roster)
        return roster

    def _pinned(self, welcome: Welcome) -> Pinned:
        return Pinned.of_client(self.kept.folder, welcome.run)

    def given(self, task: Task | None = None) -> GivenReferences:
        """Return what code of the site's own the server may name. task: the user's.

        Raises PolicyError for references that cannot be followed.
        """
        systems = filter(is_reference, self.policy.systems)
        return GivenReferences([*systems, *self.reach.rules], self.kept.folder, task)

    def closed(self) -> float:
        """Seconds until the site works again; 0 while it does."""
        return self.policy.seconds_until_open(datetime.now().astimezone())


def _decline(reasons: Sequence[str]) -> None:
    """Raises PolicyError where there is a reason."""
    if reasons:
        raise PolicyError(f"this site does not take part: {'; '.join(reasons)}")


@contextmanager
def opened(
    url: str,
    reach: Reach,
    stop: threading.Event,
    *,
    tell: Callable[[str], None] = lambda text: None,
    moved: Callable[[int], None] = lambda count: None,
) -> Iterator[Site]:
    """The site, for as long as the block goes on.

    url: of its server. stop: ends every wait. tell: hears of what goes wrong with the link; moved:
    of bytes of a transfer. Where the site has a folder, its log has a line for each message.
    """
    folder = reach.state
    _ = reach.give_up_seconds
    _check_secure(url, reach.insecure)
    policy = Policy() if folder is None else Policy.beside(folder)
    owner = _owner(reach, policy)
    with ExitStack() as ending:
        kept = ending.enter_context(ClientState(folder))
        audit = None
        if folder is not None:
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
        site = Site(session, kept, policy, reach, owner, audit)
        # Before the token is spent.
        site.given()
        if reach.token and kept.about is None:
            session.enrol(reach.token, reach.name, reach.part)
        yield site


def _check_secure(url: str, insecure: bool) -> None:
    """Raises ValueError for a server without TLS whose traffic other machines can read."""
    place = place_of(url)
    if not (place.secure or insecure or is_loopback(place.host)):
        raise ValueError(
            f"{url} is without TLS: on the way to {place.host} others can read the token, and "
            f"change what is sent: take https://, or say --insecure"
        )


def _owner(reach: Reach, policy: Policy) -> str:
    """Who has to have signed the roster, by what was typed or by policy.toml."""
    try:
        typed = key_said(reach.owner) if reach.owner else ""
    except ValueError as error:
        raise ValueError(f"owner: {error}") from error
    if typed and policy.owner and not _same(typed, policy.owner):
        raise PolicyError("policy.toml names another owner than --owner: leave one of them out")
    owner = typed or policy.owner
    if owner and reach.identities is not None:
        raise ValueError(
            "the owner's roster says who the other clients are: leave --identities or --owner out"
        )
    return owner


def _same(one: str, other: str) -> bool:
    """Whether two texts, each a key or a fingerprint, are of one key."""
    return one == other or any(
        len(key) == 64 and is_said(key, said) for key, said in ((one, other), (other, one))
    )


def privacy_of(welcome: Welcome) -> Privacy:
    """What the run protects. Raises PolicyError for what this dure does not know."""
    written = welcome.strategy.get("privacy", "none")
    try:
        return parse_privacy(str(written))
    except ValueError as error:
        raise PolicyError(f"the run's privacy is not known here: {error}") from error


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
