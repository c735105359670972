"""The client's side of a connection to a server: its folder, policy, log and identity.

`dure.join` and `dure.Client` both begin here: the folder is locked, the policy is read, the session
is opened, and a new site redeems its invitation token. The served run is compared with the site's
policy, and with the roster of the federation's owner if the site knows an owner. The agreed run is
written down, and every later message is compared with the agreement
(`dure.deploy.client.agreement`).
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch

from dure import references
from dure.contracts.task import Task
from dure.deploy.client.agreement import AgreedRun, AgreementChecks
from dure.deploy.client.audit_log import AuditLog
from dure.deploy.client.connection import server_address_of
from dure.deploy.client.policy import Policy
from dure.deploy.client.session import Session
from dure.deploy.client.state import ClientState
from dure.errors import PolicyError
from dure.federated.privacy.privacy_settings import Privacy, parse_privacy
from dure.federated.privacy.secure_aggregation.trust import semi_honest_reason
from dure.machine.devices import chosen_device
from dure.references import is_reference, last_part
from dure.wire import owners_roster
from dure.wire.loopback import is_loopback
from dure.wire.members import RosterError, matches_key, parse_key
from dure.wire.owners_roster import OwnersRoster, PinnedOwnersRoster
from dure.wire.requests import CheckIn, Welcome
from dure.wire.roster import read_identities


@dataclass(frozen=True)
class ConnectionOptions:
    """Identity of a client, and its connection to the server.

    Args:
        name: name of this client; by default the name in its invitation, or its number.
        state: folder of this client's state, with which the client may be killed and restarted. Its
            file policy.toml sets the site's policy, audit.jsonl logs all that has left the site.
        part: for demonstrations, takes the place of this simulated client: only the examples that
            the partition gives to it.
        token: token of an invitation (dure clients invite), needed once; - reads it on standard
            input. Every user of this machine can read an argument: prefer --token-file.
        authority: PEM file of the authority that signed the server's certificate; the system's by
            default.
        certificate: PEM file of this client's certificate, if the server requires one.
        give_up: hours for which an unreachable server is retried; None retries forever.
        identities: in split learning, a file of lines NUMBER FINGERPRINT, obtained from the other
            clients themselves: only these clients receive the head.
        owner: public key or fingerprint of the federation's owner, obtained from the owner: this
            client takes part only if that owner has signed a roster with this client on it (dure
            roster).
        insecure: take part without TLS even if others on the network can read the token and change
            messages.
        rules: code of your own that the run may use, as path/to/file.py:Name: a partition, an
            aggregator or a selection. The server chooses by the names of file and class, and can
            name no other code.
        device: device on which this client trains: cpu, cuda, cuda:1; auto, a GPU if there is one,
            else the CPU; by default the device of the model that the task makes.
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
    device: str = ""

    @property
    def computes_on(self) -> torch.device | None:
        """Device that the user has named; None without one.

        Raises ValueError for a device that does not exist here.
        """
        return chosen_device(self.device) if self.device else None

    @property
    def give_up_seconds(self) -> float | None:
        """Seconds for which an unreachable server is retried; None for ever.

        Raises ValueError if `give_up` is not above 0.
        """
        if self.give_up is not None and not self.give_up > 0:
            raise ValueError(f"give_up is {self.give_up}, but it has to be more than 0 hours")
        return None if self.give_up is None else 3600 * self.give_up


def path_of(given: str | Path | None) -> Path | None:
    """Return the path of a text, a path or None."""
    return None if given is None else Path(given)


class ClientSite(NamedTuple):
    """A site that can exchange messages with its server."""

    session: Session
    kept: ClientState
    policy: Policy
    reach: ConnectionOptions
    owner: str
    """Owner whose signature the roster needs; empty if the site knows no owner."""
    audit: AuditLog | None = None
    """Log of outgoing messages; None without a folder."""

    def look(self, said: CheckIn) -> Welcome:
        """Return the description of the served run, without taking a place. said: a look."""
        self.session.checks.smallest_cohort = self.policy.smallest_cohort
        return self.session.check_in(said)

    def agree(self, welcome: Welcome, approve: bool) -> None:
        """Agree to the served run, and record the agreement on disk.

        approve: the user consents to this run as it is served now. Raises PolicyError if the site's
        policy refuses the run, or if the site has agreed to the run in another form.
        """
        if approve:
            self.kept.approve(welcome.run)
        reasons = self.refusals(welcome)
        if self.policy.asks and not self.kept.approved(welcome.run):
            system = welcome.strategy.get("name")
            reasons.append(
                f"run {welcome.run} ({system}, {welcome.clients} clients) is not approved by this "
                "site: examine it, and join once with --approve"
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
        """Return why the site refuses the run, by its policy or by the server's promises."""
        return self.reasons(welcome) or self._not_kept(welcome)

    def reasons(self, welcome: Welcome) -> list[str]:
        """Return why the site's policy refuses such a run; [] if it accepts the run."""
        secure = privacy_of(welcome).secure
        reasons = self.policy.check(welcome, sums=None if secure is None else secure.minimum)
        try:
            self._roster(welcome)
        except RosterError as error:
            reasons.append(str(error))
        # Clients of a secure sum verify each other by the roster, so each needs the owner's key.
        if secure is not None and welcome.roster and not self.owner:
            reasons.append(
                "the clients of this run identify each other by a roster that the owner of the "
                "run has signed: ask the owner, not the server, for the owner's public key, and "
                "give it with --owner"
            )
        return reasons

    def _not_kept(self, welcome: Welcome) -> list[str]:
        """Return why the server's promises do not satisfy the site's policy; [] if they do."""
        least = self.policy.smallest_cohort
        if least == 1 or welcome.smallest_cohort >= least:
            return []
        return [
            f"policy.toml requires at least {least} clients in a new model, and the server "
            f"guarantees {welcome.smallest_cohort or 'no number'}: its run cannot have that "
            "number, or the server runs an older dure"
        ]

    def enter(self, welcome: Welcome) -> Mapping[int, str] | None:
        """Enter the run as a client; return the owner-signed public keys of all clients, by number.

        Returns None if the site knows no owner. Raises StateError if the folder is another
        client's, and PolicyError for a roster other than the one with which the run began here.
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
        """Return the other clients' public keys or fingerprints, for transfers between clients.

        identities: of a roster. Raises ValueError for a malformed file of identities.
        """
        if identities is None and self.reach.identities is not None:
            return read_identities(self.reach.identities)
        return identities

    def trust(self, welcome: Welcome) -> str:
        """Return the assumptions about the other clients' identities, as text; empty for none."""
        roster = self._roster(welcome)
        said = [] if roster is None else [f"roster {roster}"]
        secure = privacy_of(welcome).secure
        if secure is not None:
            said.append(semi_honest_reason(secure, roster is not None))
            if self.kept.temporary:
                said.append(
                    "without --state, the client loses its part of unfinished secure sums when "
                    "it ends"
                )
        return "; ".join(filter(None, said))

    def _roster(self, welcome: Welcome) -> OwnersRoster | None:
        """Return the verified roster; None if the site knows no owner. Raises RosterError."""
        if not self.owner:
            return None
        if not welcome.roster:
            raise RosterError("no roster", "the server has no roster, which --owner requires")
        roster = OwnersRoster.from_json(welcome.roster.encode())
        owners_roster.check_owner(roster, self.owner)
        owners_roster.check_date(roster)
        owners_roster.check_count(roster, welcome.clients)
        # A look has no number yet.
        number = welcome.client if welcome.client >= 0 else None
        owners_roster.check_own(roster, self.session.key.public, number)
        self._pinned(welcome).check(roster)
        return roster

    def _pinned(self, welcome: Welcome) -> PinnedOwnersRoster:
        return PinnedOwnersRoster.of_client(self.kept.folder, welcome.run)

    def given(self, task: Task | None = None) -> ClientReferences:
        """Return the site's own code that the server may name. task: the user's task.

        Raises PolicyError for references that cannot be followed.
        """
        systems = filter(is_reference, self.policy.systems)
        return ClientReferences([*systems, *self.reach.rules], self.kept.folder, task)

    def closed(self) -> float:
        """Return the seconds until the site's working hours; 0 within them."""
        return self.policy.seconds_until_open(datetime.now().astimezone())


def _decline(reasons: Sequence[str]) -> None:
    """Raise PolicyError if there is any reason."""
    if reasons:
        raise PolicyError(f"this site does not take part: {'; '.join(reasons)}")


@contextmanager
def opened(
    url: str,
    reach: ConnectionOptions,
    stop: threading.Event,
    *,
    tell: Callable[[str], None] = lambda text: None,
    moved: Callable[[int], None] = lambda count: None,
) -> Iterator[ClientSite]:
    """Context manager: open the site, and close it at the end of the block.

    Args:
        url: address of the server.
        reach: identity and connection of the client.
        stop: event that ends every wait.
        tell: receives texts about connection problems.
        moved: receives the numbers of transferred bytes.

    If the site has a folder, its log gets a line for each message.
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
            audit = AuditLog(folder / "audit.jsonl")
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
        site = ClientSite(session, kept, policy, reach, owner, audit)
        # Before the token is spent.
        site.given()
        if reach.token and kept.about is None:
            session.enrol(reach.token, reach.name, reach.part)
        yield site


def _check_secure(url: str, insecure: bool) -> None:
    """Raise ValueError for a server without TLS whose traffic other machines can read."""
    place = server_address_of(url)
    if not (place.secure or insecure or is_loopback(place.host)):
        raise ValueError(
            f"{url} does not use TLS: others on the network to {place.host} can read the token "
            "and change what is sent: use https://, or accept it with --insecure"
        )


def _owner(reach: ConnectionOptions, policy: Policy) -> str:
    """Return the required signer of the roster, from the command line or policy.toml."""
    try:
        typed = parse_key(reach.owner) if reach.owner else ""
    except ValueError as error:
        raise ValueError(f"owner: {error}") from error
    if typed and policy.owner and not _same(typed, policy.owner):
        raise PolicyError("policy.toml and --owner name different owners: leave one out")
    owner = typed or policy.owner
    if owner and reach.identities is not None:
        raise ValueError(
            "the owner's roster already identifies the other clients: leave out --identities or "
            "--owner"
        )
    return owner


def _same(one: str, other: str) -> bool:
    """Return whether two texts, each a key or a fingerprint, denote the same key."""
    return one == other or any(
        len(key) == 64 and matches_key(key, said) for key, said in ((one, other), (other, one))
    )


def privacy_of(welcome: Welcome) -> Privacy:
    """Return the run's privacy settings. Raises PolicyError for settings unknown to this dure."""
    written = welcome.strategy.get("privacy", "none")
    try:
        return parse_privacy(str(written))
    except ValueError as error:
        raise PolicyError(
            f"the run's privacy setting is not known to this dure: {error}"
        ) from error


def context_for(url: str, reach: ConnectionOptions) -> ssl.SSLContext | None:
    """Return the TLS context for the server; None over plain HTTP."""
    if not url.startswith("https:"):
        return None
    # Imported here: a site without TLS does without these libraries.
    from dure.wire.certificates import client_context

    own = None
    if reach.certificate is not None:
        own = reach.certificate, reach.certificate.with_suffix(".key")
    return client_context(reach.authority, own)


class ClientReferences:
    """The `dure.references.ReferencePolicy` of a client, for references that a server sends.

    Args:
        given: references of the site's user.
        apart: the client's own folder, into which the client writes files of the server; no module
            is imported from this folder.
        task: the user's own task; classes defined in its file may be named too.

    Raises PolicyError for a reference into `apart`, and for two references with the same last part.
    """

    def __init__(self, given: Iterable[str], apart: Path, task: Task | None = None) -> None:
        self._given: dict[str, str] = {}
        for reference in given:
            own = _resolved(reference)
            if _lies_in(own, apart):
                raise PolicyError(
                    f"{reference} is in {apart}, the folder for files that a server sends: move "
                    "it to another folder"
                )
            other = self._given.setdefault(last_part(own), own)
            if other != own:
                raise PolicyError(f"{other} and {own} have the same name: rename one")
        found = None if task is None else task.reference
        self._task = str((found or {}).get("name") or "")

    def __call__(self, reference: str) -> str:
        """Return the user's reference to follow. Raises PolicyError if there is none."""
        own = self._given.get(last_part(reference)) or self._in_task(reference)
        if own is None:
            raise PolicyError(
                f"this site does not take part: the run needs the code {reference[:200]!r}, and a "
                "site runs only its own code: if you have read that code and accept it, give "
                "your copy of it with --rules path/to/FILE.py:NAME"
            )
        return own

    def _in_task(self, reference: str) -> str | None:
        """Return the reference to a class that the file of the user's own task defines."""
        place, colon, _ = self._task.rpartition(":")
        named, _, name = last_part(reference).rpartition(":")
        if not colon or last_part(place) != named:
            return None
        module = references.loaded(self._task)
        # vars, not getattr: a module's __getattr__ may import the name that is asked for.
        kind = None if module is None else vars(module).get(name)
        is_its_own = isinstance(kind, type) and kind.__module__ == getattr(module, "__name__", "")
        return f"{place}:{name}" if is_its_own else None


def _resolved(reference: str) -> str:
    """Return the reference with an absolute path. Raises PolicyError for a malformed reference."""
    if not references.is_reference(reference):
        raise PolicyError(
            f"{reference!r} does not name a class of yours: write path/to/file.py:Name"
        )
    place, _, name = reference.rpartition(":")
    return f"{references.resolved(place)}:{name}"


def _lies_in(reference: str, folder: Path) -> bool:
    place = reference.rpartition(":")[0]
    return references.is_file(place) and Path(place).is_relative_to(folder.resolve())
