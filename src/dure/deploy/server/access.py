"""Access control: a request is admitted, or refused with a reason.

The checks have this order, so that a stranger cannot harm a client by using its name:

    the headers name a sender    401   not signed
    the client is enrolled       403   unknown client
    it is not in quarantine      429   quarantined; with the seconds until a retry
    its signature is right       403   forged
    nonce and serial are new     401   new nonce, replayed: sign again with the nonce of the answer
    it is not revoked            403   revoked
    it is within its rate        429   too fast

A refusal counts against a client if its signature covers the cause: method, path and query, and the
body whose digest is signed. Every other refusal counts against the sender's address: a body with
another digest and headers besides the five may have been changed in transit. Since many clients may
share an address, no client is shut out for its address; a sender that continues is told to wait.

The mode `open` admits every client in the order of first check-ins, until all client numbers are
taken: for demonstrations and a single machine. The mode `invited` requires an invitation
(`register.py`), which is valid once. If the owner of the federation has signed a roster of its
clients, both modes enrol only these clients, each with its number on the roster.

This module does not read the body. Its digest is signed, and the reader of the body compares the
digest (`client_requests`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn

from dure.deploy.server.rate_limits import RateLimiter, RateLimits
from dure.deploy.server.register import EnrolError, Register, RegisteredClient, check_same
from dure.errors import RunFolderError
from dure.wire.requests import Enrol, Enrolled
from dure.wire.signatures import (
    NONCE,
    Claim,
    Nonces,
    SignatureError,
    check_public,
    claim_of,
    is_proven,
)

Mode = Literal["invited", "open"]

CHECK_IN = "/v1/check-in"
NEW = -1
"""Number of a client that will be enrolled at its check-in."""

MOST_KINDS = 64
"""Maximum kinds of refusals with separate counters."""


class RequestRefused(Exception):  # noqa: N818, it is an answer
    """Refusal of a request. `headers` are additional headers of the answer, in lower case."""

    def __init__(
        self, status: int, kind: str, reason: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.kind = kind
        self.reason = reason
        self.headers = dict(headers or {})


class Admitted(NamedTuple):
    """Sender of an admitted request, its key, and the digest that the body must have.

    `client` is its number, or `NEW`. `nonce` is the same for all requests of a session of the
    client.
    """

    client: int
    name: str
    key: str
    nonce: str
    serial: int
    digest: str


class AccessControl:
    """Access control of a server. Safe for several threads.

    `clock` returns monotonic seconds. `identities` has public keys by client number, if an owner's
    roster fixes them.
    """

    def __init__(
        self,
        register: Register,
        mode: Mode = "invited",
        limits: RateLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        identities: Mapping[int, str] | None = None,
    ) -> None:
        self.register = register
        self.mode = mode
        # In open mode anybody can make keys; the additional entries are for observers.
        self._nonces = Nonces(most=2 * register.places + 1000, clock=clock)
        self._conducts: RateLimiter[int] = RateLimiter(limits, clock)
        # A separate object: no number of addresses may evict a client.
        self._addresses: RateLimiter[str] = RateLimiter(limits, clock)
        self._refusals: Counter[str] = Counter()
        self._numbers: dict[str, int] | None = None
        if identities is not None:
            self._numbers = {key: number for number, key in identities.items()}
        self._lock = threading.Lock()
        self._version: int | None = None
        self._change = 0
        self._by_key: dict[str, RegisteredClient] = {}
        self._by_number: dict[int, RegisteredClient] = {}

    def admit(
        self, headers: Mapping[str, str], method: str, path: str, address: str = ""
    ) -> Admitted:
        """Return the sender of a request. Raises Refused.

        `headers` have names in lower case. `path` includes the query, as received. `address` is the
        sender's address without the port.
        """
        try:
            claim = claim_of(headers)
        except SignatureError as error:
            self._refuse_stranger(401, error.kind, str(error), address)
        client = self._client(claim.client)
        if client is None:
            self._check_may_come(claim.client, path, address)
        else:
            self._check_welcome(client.number)
        self._check_signature(claim, method, path, address)
        if client is None:
            return Admitted(NEW, "", claim.client, claim.nonce, claim.serial, claim.digest)
        if client.state != "enrolled":
            self.refuse(client.number, 403, "revoked", f"client {client.number} was revoked")
        wait = self._conducts.hurry(client.number)
        if wait:
            self._count("too fast")
            raise RequestRefused(429, "too fast", "too many requests at once", _after(wait))
        name = client.name or ""
        number = client.number
        return Admitted(number, name, claim.client, claim.nonce, claim.serial, claim.digest)

    def check_in(self, admitted: Admitted, name: str = "", wants: int | None = None) -> Admitted:
        """Return the admitted client with its number at its check-in. Raises Refused.

        `name` and `wants` come from the check-in. They must match the enrolment; open mode enrols a
        `NEW` client with them.
        """
        try:
            client = self._client(admitted.key)
            if client is None:
                # The client was removed after its admission.
                if self.mode != "open":
                    raise EnrolError("unknown client", _ENROL_FIRST)
                client = self._enrol(admitted.key, name, wants, None)
            else:
                check_same(client, name, wants)
        except EnrolError as error:
            self.refuse(admitted.client, 409, error.kind, str(error))
        return admitted._replace(client=client.number, name=client.name or "")

    def enrol(self, body: Enrol, address: str = "") -> Enrolled:
        """Enrol a client; a repetition with the same key gets the same answer. Raises Refused."""
        try:
            check_public(body.key)
        except ValueError as error:
            self._refuse_stranger(403, "weak key", str(error), address)
        if not is_proven(body.key, body.proof, body.token, body.name, body.wants):
            reason = "the enrolment is not signed with the key that it brings"
            self._refuse_stranger(403, "forged", reason, address)
        # In open mode, an invitation may still determine the number.
        token = None if self.mode == "open" and not body.token else body.token
        try:
            client = self._enrol(body.key, body.name, body.wants, token)
        except EnrolError as error:
            self._refuse_stranger(
                403 if "token" in error.kind else 409, error.kind, str(error), address
            )
        return Enrolled(client.number, self.register.places, client.name or "")

    def may(self, client: int) -> bool:
        """Return whether a client is still enrolled, for answers to requests that waited long."""
        self._read_changes()
        known = self._by_number.get(client)
        return known is not None and known.state == "enrolled"

    def refuse(self, client: int, status: int, kind: str, reason: str) -> NoReturn:
        """Refuse a request and count the refusal against the client. Raises Refused.

        `kind` is a short category, for counters; `reason` is a message that the client prints.
        """
        self._count(kind)
        headers: dict[str, str] = {}
        away = self._conducts.refused(client) if client != NEW else 0.0
        if away:
            reason = f"{reason}; after many rejected requests, retry in {math.ceil(away)} s"
            headers = _after(away)
        raise RequestRefused(status, kind, reason, headers)

    def refuse_unproven(self, address: str, status: int, kind: str, reason: str) -> NoReturn:
        """Refuse an unproven request, and count the refusal against the sender's address.

        `kind` is a short category, for counters; `reason` is a message that the client prints.
        Raises Refused.
        """
        self._refuse_stranger(status, kind, reason, address)

    def status(self) -> dict[str, Any]:
        """Return counts of clients and refusals, and the quarantine, for /status."""
        self._read_changes()
        with self._lock:
            enrolled = sum(one.state == "enrolled" for one in self._by_number.values())
            refusals = dict(self._refusals)
        away = self._conducts.in_quarantine()
        return {
            "places": self.register.places,
            "enrolled": enrolled,
            "refusals": refusals,
            "quarantine": away,
        }

    def _client(self, key: str) -> RegisteredClient | None:
        self._read_changes()
        return self._by_key.get(key)

    def _check_may_come(self, key: str, path: str, address: str) -> None:
        """Check that an unknown client may send this request. Raises Refused."""
        if self.mode != "open":
            self._refuse_stranger(403, "unknown client", _ENROL_FIRST, address)
        if path != CHECK_IN:
            reason = "the server does not know this key: check in first"
            self._refuse_stranger(403, "unknown client", reason, address)
        if len(self._by_number) >= self.register.places:
            reason = f"all {self.register.places} clients of this run are enrolled"
            self._refuse_stranger(409, "full", reason, address)
        if self._numbers is not None:
            try:
                _listed(self._numbers, key, None)
            except EnrolError as error:
                self._refuse_stranger(409, error.kind, str(error), address)

    def _check_welcome(self, client: int) -> None:
        away = self._conducts.away(client)
        if away:
            self._count("quarantined")
            reason = (
                f"after many rejected requests, client {client} is blocked for {math.ceil(away)} s"
            )
            raise RequestRefused(429, "quarantined", reason, _after(away))

    def _check_signature(self, claim: Claim, method: str, path: str, address: str) -> None:
        try:
            if not claim.is_true(method, path):
                reason = "the signature does not match this request: was it changed in transit?"
                self._refuse_stranger(403, "forged", reason, address)
            self._nonces.take(claim)
        except SignatureError as error:
            # A new session is not a violation.
            if error.kind != "new nonce":
                self._count(error.kind)
            headers = {} if error.nonce is None else {NONCE: error.nonce}
            raise RequestRefused(401, error.kind, str(error), headers) from None

    def _enrol(self, key: str, name: str, wants: int | None, token: str | None) -> RegisteredClient:
        if self._numbers is not None:
            wants = _listed(self._numbers, key, wants)
        try:
            return self.register.enrol(key, name, wants, token)
        except RunFolderError as error:
            # For example on a full disk; a retry later finds the register unchanged.
            self._count("not written")
            reason = "the server cannot write an enrolment now; try again later"
            raise RequestRefused(503, "not written", reason, _after(10.0)) from error

    def _refuse_stranger(self, status: int, kind: str, reason: str, address: str) -> NoReturn:
        self._count(kind)
        away = self._addresses.refused(address)
        if away:
            reason = f"{reason}; after many rejected requests, retry in {math.ceil(away)} s"
            raise RequestRefused(429, kind, reason, _after(away))
        raise RequestRefused(status, kind, reason)

    def _count(self, kind: str) -> None:
        with self._lock:
            known = kind in self._refusals or len(self._refusals) < MOST_KINDS
            self._refusals[kind if known else "other"] += 1

    def _read_changes(self) -> None:
        """Read changes of the register by this or another process since the last call."""
        try:
            version = self.register.version()
            if version == self._version:
                return
            with self._lock:
                self._change, changed = self.register.changes(self._change)
                for client in changed:
                    self._put(client)
                # The version was read before the changes: changes in between are read next time.
                self._version = version
        except RunFolderError as error:
            reason = "the server cannot read the enrolled clients now; try again later"
            raise RequestRefused(503, "not readable", reason, _after(10.0)) from error

    def _put(self, client: RegisteredClient) -> None:
        before = self._by_number.get(client.number)
        self._by_number[client.number] = client
        if client.key is not None:
            self._by_key[client.key] = client
        elif before is not None and before.key is not None:
            del self._by_key[before.key]


_ENROL_FIRST = "the server does not know this key: enrol with the token of an invitation"


def _listed(numbers: Mapping[str, int], key: str, wants: int | None) -> int:
    """Return the number of a client on the roster. Raises EnrolError for an unlisted client."""
    number = numbers.get(key)
    if number is None:
        reason = (
            f"the run's roster does not have the key {key}: ask the federation's owner to add it"
        )
        raise EnrolError("not listed", reason)
    if wants not in (None, number):
        reason = f"this key is client {number} on the run's roster, and cannot be client {wants}"
        raise EnrolError("wrong number", reason)
    return number


def _after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(math.ceil(seconds))}
