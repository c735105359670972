"""A client's talk with its server: every request, signed, patient, and noted before it leaves.

A session is one client's. It has a link for what it does, and while it works another one on which
it hears whether its work is still wanted. Its patience has an end: a server that nobody reaches for
so long is given up.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from dure.errors import DureError, PolicyError
from dure.record.inside import opened
from dure.wire.layout import is_extra
from dure.wire.requests import (
    AnswerTo,
    CheckIn,
    Enrol,
    Enrolled,
    Failed,
    Holds,
    MeasuredThis,
    Ready,
    Reserve,
    Said,
    Train,
    Watch,
    Watched,
    Welcome,
    Word,
    to_json,
)
from dure.wire.signatures import NONCE, Key, Signer, prove
from dure.wire.tensors import Form, TensorsError, check, forms_of, receive
from dure.worlds.network.client.agreement import ServerChecks
from dure.worlds.network.client.audit import Audit, Kind
from dure.worlds.network.client.channel import Channel
from dure.worlds.network.client.link import (
    Backoff,
    BusyError,
    Link,
    LinkLostError,
    StoppedError,
    UnfitMessageError,
    patiently,
)
from dure.worlds.network.client.state import About, ClientState
from dure.worlds.network.client.transfer import TransferError, download, upload

QUICK = 0.5
"""Seconds of work after which a client begins to ask whether it is still wanted."""

DAY = 86400.0
"""Seconds after which a server that is not reached is given up, where nobody says otherwise."""

LAST = 5.0
"""Seconds for which a server is still tried that has said that its run is over."""

MOMENT = 0.1
"""Seconds between two words on how far a transfer is."""

Tell = Callable[[str], None]
"""Hears of what goes wrong with the link, in a line."""


class GaveUpError(DureError):
    """The server was not reached for so long that it is not tried any more."""


class NotWantedError(DureError):
    """Nobody waits any more for what is being computed."""


def _seldom(moved: Callable[[int], None]) -> Callable[[int], None]:
    """Tells it no more often than anybody reads."""
    told = 0.0

    def tells(count: int) -> None:
        nonlocal told
        if time.monotonic() - told > MOMENT:
            told = time.monotonic()
            moved(count)

    return tells


REST = 0.2
"""Seconds after which a channel that broke is opened anew."""


class Signed:
    """Signs the requests of one link; its server's nonces are those of all links of the client."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._last: dict[str, str] = {}

    def headers(self, method: str, path: str, digest: str) -> Mapping[str, str]:
        self._last = self._signer.sign(method, path, digest)
        return self._last

    def renew(self, nonce: str) -> None:
        self._signer.again(self._last, 401, {NONCE: nonce})


class Session:
    """One client and its server.

    context: of TLS, None over plain HTTP. state: where the client keeps what it has to keep. audit:
    None notes nothing. stop: set when the client is to end, which ends every wait.
    bytes_per_second: of transfers, None without a bound. moved: hears now and then how many bytes
    of a transfer are through. give_up: seconds for which a request is tried while the server is not
    reached; then it raises GaveUpError. None tries on without end.
    """

    def __init__(
        self,
        url: str,
        *,
        context: ssl.SSLContext | None,
        state: ClientState,
        audit: Audit | None,
        stop: threading.Event,
        tell: Tell = lambda text: None,
        bytes_per_second: float | None = None,
        moved: Callable[[int], None] = lambda count: None,
        give_up: float | None = DAY,
    ) -> None:
        self.url = url
        self.over: str | None = None
        """Why the run is over, once the server has said so."""
        self._give_up = give_up
        self.state = state
        self.stop = stop
        self.tell = tell
        self._context = context
        self._audit = audit
        self._pace = bytes_per_second
        self._moved = _seldom(moved)
        self._key = Key.kept_in(state.key)
        self._signer = Signer(self._key)
        self._backoff = Backoff()
        self._link = self._made()
        self.patience = 30.0
        self.heartbeat = 10.0
        self.holds = False
        """Whether updates stay here, by what the server says of its run."""
        self.checks = ServerChecks()
        """Checks of what the server says, by what the site has agreed to."""
        self.expects: dict[str, Form] | None = None
        """What the tensors of a model are like, with what assignments have besides; None where
        the site does not know. Some of them are left out where a model is only measured."""

    def _made(self) -> Link:
        about = self.state.about
        known = about is not None and about.url == self.url
        return Link(self.url, context=self._context, signs=Signed(self._signer), known=known)

    def close(self) -> None:
        self._link.close()

    # A channel that stays open

    @property
    def key(self) -> Key:
        """The client's identity."""
        return self._key

    def channel(self) -> Channel:
        """Opens one, at once. Raises as `Link` does."""
        return Channel(
            self.url, self._context, self._signer, self.stop, self.heartbeat, self._audit
        )

    def patiently(self, call: Callable[[], Channel]) -> Channel:
        """A channel, as soon as there is one. Raises GaveUpError."""
        found: Channel = self._patiently(call, self._give_up)
        return found

    def rest(self) -> None:
        """A moment, before a channel that broke is opened anew. Raises StoppedError."""
        if self.stop.wait(REST):
            raise StoppedError

    # Who it is

    def enrol(self, token: str, name: str, wants: int | None) -> Enrolled:
        """Brings the client's key, and the token that lets it in."""
        proof = prove(self._key, token, name, wants)
        body = Enrol(token=token, key=self._key.public, proof=proof, name=name, wants=wants)
        enrolled: Enrolled = self._ask("/v1/enrol", body, Enrolled, "enrol")
        return enrolled

    def check_in(self, said: CheckIn) -> Welcome:
        """Says who it is, what it would train, and how many clients it asks for; without examples
        it only looks. Raises PolicyError for a run that is not the one that was agreed to."""
        asked = max(said.smallest_cohort, self.checks.smallest_cohort)
        said = replace(said, smallest_cohort=asked)
        welcome: Welcome = self._ask("/v1/check-in", said, Welcome, "check-in")
        self.checks.welcome(welcome)
        self.patience = welcome.patience
        self.heartbeat = welcome.heartbeat
        self.holds = welcome.holds
        return welcome

    def belongs(self, welcome: Welcome, name: str) -> None:
        """The folder is this client's from now on. Raises StateError if it is another's."""
        self.state.enter(About(self.url, welcome.run, welcome.client, name))

    # What it is to do

    def next(self, confirmed: Sequence[int]) -> Word:
        """What there is to do; waits until there is something, or the server says that there is
        not. The end of the run too: its server may be gone by now, if that was heard before.

        Raises PolicyError for an order that the site does not follow; the server hears of it."""
        ready = Ready(confirmed=list(confirmed))
        over = self.over
        try:
            limit = self._give_up if over is None else LAST
            timeout = self.patience + self.heartbeat
            word: Word = self._ask("/v1/next", ready, Word, "next", timeout, limit)
        except GaveUpError:
            if over is None:
                raise
            return Word(over=over)
        try:
            self.checks.word(word)
        except PolicyError:
            if word.train is not None:
                self._declines(word.train)
            raise
        return word

    def _declines(self, train: Train) -> None:
        """The server need not wait for an update that there will not be."""
        with suppress(OSError, DureError):
            self.failed(Failed(train.ticket, PolicyError.__name__))

    def fetch(
        self,
        round: int,
        digest: str,
        size: int,
        expected: Mapping[str, Form] | None = None,
        limit: float | None = None,
        extras: bool = True,
    ) -> dict[str, Tensor]:
        """The tensors of a model; kept as the newest one where the client keeps anything.

        expected: what they are like; by default as `expects` has them, without those that only
        assignments have where `extras` is false. limit: seconds after which a link that broke is
        given up, as by `give_up`. Raises TransferError where they are something else.
        """
        if expected is None:
            expected = self._expected(extras)
        kept = self.state.model_file()
        if kept is not None and kept[1] == digest:
            found = self.state.model()
            assert found is not None
            _check_forms(found[1], expected)
            return found[1]
        into = None if self.state.temporary else self.state.download(digest, size)
        tensors = self._down(digest, size, expected, into, limit)
        if into is not None:
            self.state.keep_download(round, digest)
        return tensors

    def _expected(self, extras: bool) -> dict[str, Form] | None:
        if self.expects is None:
            return None
        return {name: form for name, form in self.expects.items() if extras or not is_extra(name)}

    def fetch_frozen(
        self, digest: str, size: int, expected: Mapping[str, Form]
    ) -> dict[str, Tensor]:
        """The weights that are not trained."""
        return self._down(digest, size, expected)

    def _down(
        self,
        digest: str,
        size: int,
        expected: Mapping[str, Form] | None,
        into: Path | None = None,
        limit: float | None = None,
    ) -> dict[str, Tensor]:
        with self._given_up(limit):
            return download(
                self._link,
                digest,
                size,
                expected,
                self.stop,
                self._backoff,
                into,
                tell=self._tells,
                progress=self._moved,
                bytes_per_second=self._pace,
                limit=limit or self._give_up,
            )

    # What it says

    def send(
        self, reserve: Reserve, tensors: Mapping[str, Tensor], wanted: Callable[[], bool]
    ) -> bool:
        """Sends an update, or the tensors of an answer; whether the server has all of it. False
        where it is not wanted any more."""
        self._note_update(reserve)
        with self._given_up():
            return upload(
                self._link,
                reserve,
                tensors,
                self.stop,
                self._backoff,
                wanted,
                tell=self._tells,
                progress=self._moved,
                bytes_per_second=self._pace,
                limit=self._give_up,
            )

    def ready(self, ticket: int) -> None:
        """An update is there, and stays here."""
        self._post("/v1/ready", Holds(ticket), "ready", ticket)

    def answered(self, answer: AnswerTo) -> None:
        """What the client says to a step of a protocol."""
        self._post("/v1/answers", answer, "answer", answer.ticket)

    def failed(self, failed: Failed) -> None:
        """There will be no update, since the client's own code raised."""
        self._post("/v1/failures", failed, "failure", failed.ticket)

    def measured(self, measured: MeasuredThis) -> None:
        """How good a model is on what the client holds out."""
        self._post("/v1/measured", measured, "metrics", None, measured.round)

    @contextmanager
    def working(self, ticket: int) -> Iterator[Watching]:
        """While it works, the server knows that it is there. Gives whether the work is wanted."""
        watched = Watching(self, ticket)
        try:
            yield watched
        finally:
            watched.end()
        if watched.unfit is not None:
            raise watched.unfit

    # How it says it

    def _ask(
        self,
        path: str,
        said: Said,
        kind: Any,
        noted: Kind,
        timeout: float | None = None,
        limit: float | None = None,
    ) -> Any:
        # A question whether there is work tells nothing that has to be on the disk at once.
        self._note(noted, to_json(said), at_once=noted != "next")
        return self._patiently(
            lambda: self._link.ask("POST", path, said, kind, timeout), limit or self._give_up
        )

    def _post(
        self, path: str, said: Said, noted: Kind, ticket: int | None, round: int | None = None
    ) -> None:
        body = to_json(said)
        self._note(noted, body, ticket, round)
        headers = {"content-type": "application/json"}
        self._patiently(lambda: self._link.request("POST", path, body, headers), self._give_up)

    def _patiently(self, call: Callable[[], Any], limit: float | None) -> Any:
        with self._given_up(limit):
            return patiently(call, self._backoff, self.stop, self._tells, limit)

    @contextmanager
    def _given_up(self, limit: float | None = None) -> Iterator[None]:
        """What patience ends with says who was not reached, for how long, and what is kept."""
        try:
            yield
        except (LinkLostError, BusyError) as error:
            seconds = limit or self._give_up or 0.0
            raise GaveUpError(
                f"{self.url} was not reached for {_long(seconds)}: {error}; {self._kept()}"
            ) from error

    def _kept(self) -> str:
        """What a client that ends leaves here."""
        if self.state.temporary:
            return "nothing is kept here without --state"
        model = self.state.model_file()
        what = "no model yet" if model is None else f"the model of round {model[0]}"
        waiting = len(self.state.updates())
        updates = "update" if waiting == 1 else "updates"
        unsent = f", and {waiting} {updates} of unknown outcome" if waiting else ""
        return f"kept in {self.state.folder}: {what}{unsent}; join again to go on"

    def _note(
        self,
        kind: Kind,
        body: bytes,
        ticket: int | None = None,
        round: int | None = None,
        at_once: bool = True,
    ) -> None:
        """Write the line of a message that is about to leave; as `Audit.record`."""
        if self._audit is not None:
            self._audit.record(kind, body, ticket, round, at_once)

    def _note_update(self, reserve: Reserve) -> None:
        """Write the lines of an update, or of an answer: of what is said of it, and its tensors.

        Both are on the disk before the first leaves, and for that one write waits for the disk.
        """
        if self._audit is None:
            return
        tensors = reserve.bytes > 0
        self._note("reserve", to_json(reserve), reserve.ticket, at_once=not tensors)
        if tensors:
            kind: Kind = "answer" if reserve.asking else "update"
            self._audit.record_digest(kind, reserve.bytes, reserve.digest, reserve.ticket)

    def _tells(self, error: OSError, seconds: float) -> None:
        self.tell(f"{error}; trying again in {seconds:.1f} s")

    def watch(self, ticket: int, link: Link) -> Watched:
        """Asks once whether the work is wanted."""
        said = Watch(ticket)
        self._note("watch", to_json(said), ticket, at_once=False)
        return link.ask("POST", "/v1/watch", said, Watched, 2 * self.heartbeat)

    def another_link(self) -> Link:
        """One more to the server, signed as this client's."""
        return self._made()


class Watching:
    """Asks in a thread whether work is still wanted, from `QUICK` seconds on, on a link of its own.

    The question is open while the client works, by which the server sees that it is there.
    """

    def __init__(self, session: Session, ticket: int) -> None:
        self._session = session
        self._ticket = ticket
        self._wanted = True
        self.reason = ""
        """Why the work is not wanted any more."""
        self.unfit: UnfitMessageError | None = None
        """What the server has answered that cannot be; the work ends."""
        self._done = threading.Event()
        self._link: Link | None = None
        self._thread = threading.Thread(target=self._watch, name="dure watches", daemon=True)
        self._thread.start()

    def __call__(self) -> bool:
        """Whether the work is wanted."""
        return self._wanted

    def end(self) -> None:
        """The work is done: a question that is open ends with its link."""
        self._done.set()
        link = self._link
        if link is not None:
            link.close()
        self._thread.join()

    def _watch(self) -> None:
        if self._done.wait(QUICK):
            return
        self._link = self._session.another_link()
        with self._link as link:
            while not self._done.is_set() and not self._session.stop.is_set():
                try:
                    watched = self._session.watch(self._ticket, link)
                    self._session.over = watched.over
                    self.reason = watched.reason
                    self._wanted = watched.wanted
                except StoppedError:
                    return
                except UnfitMessageError as error:
                    self.unfit = error
                    self.reason = str(error)
                    self._wanted = False
                # What is wrong with the link is told where the work is sent.
                except (OSError, DureError):
                    self._done.wait(QUICK)
                if not self._wanted:
                    return


def _check_forms(tensors: Mapping[str, Tensor], expected: Mapping[str, Form] | None) -> None:
    """Raises TransferError where a model is another thing now than when it was fetched."""
    if expected is None:
        return
    try:
        check(forms_of(tensors), expected)
    except TensorsError as error:
        raise TransferError(f"what is to be trained or measured is no such model: {error}") from (
            error
        )


def _long(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 3600 else f"{seconds / 3600:g} h"


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    hashed = hashlib.sha256()
    with opened(path) as file:
        while chunk := file.read(1 << 20):
            hashed.update(chunk)
    return hashed.hexdigest()


def tensors_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a file in the safetensors format."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        return receive(lambda memory: file.readinto(memory), size)
