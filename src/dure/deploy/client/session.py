"""Session of a client with its server: signed, retried and audited requests.

A session has a link for the client's work. While the client works, a second link asks whether the
work is still needed. A session stops retrying if the server is unreachable for `give_up` seconds.
"""

from __future__ import annotations

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

from dure.deploy.client.agreement import ServerChecks
from dure.deploy.client.audit_log import AuditLog, Kind
from dure.deploy.client.channel import Channel
from dure.deploy.client.link import (
    Backoff,
    BusyError,
    HttpLink,
    LinkLostError,
    StoppedError,
    UnfitMessageError,
    call_with_retries,
)
from dure.deploy.client.state import ClientState, FolderOwner
from dure.deploy.client.transfer import TransferError, download, upload
from dure.errors import DureError, PolicyError
from dure.record.untrusted_files import opened
from dure.wire.layout import is_extra
from dure.wire.requests import (
    CheckIn,
    Enrol,
    Enrolled,
    EvaluationReport,
    MessageBody,
    NextAnswer,
    NextRequest,
    ProtocolAnswerBody,
    Train,
    TrainingFailure,
    UpdateReady,
    UploadRequest,
    WatchAnswer,
    WatchRequest,
    Welcome,
    to_json,
)
from dure.wire.signatures import NONCE, Key, Signer, prove
from dure.wire.tensors import TensorsError, TensorSpec, check, forms_of, receive

QUICK = 0.5
"""Seconds of work before a client begins to ask whether the work is still needed."""

DAY = 86400.0
"""Default number of seconds without contact after which a client gives up a server."""

LAST = 5.0
"""Seconds of retries with a server that has announced the end of its run."""

MOMENT = 0.1
"""Minimum seconds between two progress reports of a transfer."""

Tell = Callable[[str], None]
"""Listener for problems of the link, each a line of text."""


class GaveUpError(DureError):
    """The server was unreachable for `give_up` seconds."""


class NotWantedError(DureError):
    """The result that is being computed is no longer needed."""


def _seldom(moved: Callable[[int], None]) -> Callable[[int], None]:
    """Return a listener that forwards progress at most every `MOMENT` seconds."""
    told = 0.0

    def tells(count: int) -> None:
        nonlocal told
        if time.monotonic() - told > MOMENT:
            told = time.monotonic()
            moved(count)

    return tells


REST = 0.2
"""Seconds before a broken channel is reopened."""


class LinkSigner:
    """Signer of the requests of a link; all links of a client share the server's nonces."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._last: dict[str, str] = {}

    def headers(self, method: str, path: str, digest: str) -> Mapping[str, str]:
        self._last = self._signer.sign(method, path, digest)
        return self._last

    def renew(self, nonce: str) -> None:
        self._signer.again(self._last, 401, {NONCE: nonce})


class Session:
    """Session of a client with its server.

    Args:
        url: URL of the server.
        context: TLS context; None for plain HTTP.
        state: Stored state of the client.
        audit: Audit log; None for no log.
        stop: Event that ends the client and every wait.
        tell: Listener for problems of the link.
        bytes_per_second: Bandwidth limit of transfers; None for no limit.
        moved: Listener for the progress of transfers, in bytes.
        give_up: Seconds without contact after which a request raises GaveUpError; None to retry
            forever.
    """

    def __init__(
        self,
        url: str,
        *,
        context: ssl.SSLContext | None,
        state: ClientState,
        audit: AuditLog | None,
        stop: threading.Event,
        tell: Tell = lambda text: None,
        bytes_per_second: float | None = None,
        moved: Callable[[int], None] = lambda count: None,
        give_up: float | None = DAY,
    ) -> None:
        self.url = url
        self.over: str | None = None
        """Reason why the run has ended, once the server has reported it."""
        self._give_up = give_up
        self.state = state
        self.stop = stop
        self.tell = tell
        self._context = context
        self._audit = audit
        self._pace = bytes_per_second
        self._moved = _seldom(moved)
        self._key = Key.load_or_create(state.key)
        self._signer = Signer(self._key)
        self._backoff = Backoff()
        self._link = self._made()
        self.patience = 30.0
        self.heartbeat = 10.0
        self.holds = False
        """Whether the server says that updates stay at their clients."""
        self.checks = ServerChecks()
        """Checks of the server's messages against the site's agreement."""
        self.expects: dict[str, TensorSpec] | None = None
        """Dtypes and shapes of the tensors of an assignment, by name; None if unknown.

        A model for evaluation lacks the extras of the algorithm.
        """

    def _made(self) -> HttpLink:
        about = self.state.about
        known = about is not None and about.url == self.url
        return HttpLink(
            self.url, context=self._context, signs=LinkSigner(self._signer), known=known
        )

    def close(self) -> None:
        self._link.close()

    # Channel

    @property
    def key(self) -> Key:
        """Identity key of the client."""
        return self._key

    def channel(self) -> Channel:
        """Open a channel without retries. Raises as `HttpLink` does."""
        return Channel(
            self.url, self._context, self._signer, self.stop, self.heartbeat, self._audit
        )

    def patiently(self, call: Callable[[], Channel]) -> Channel:
        """Open a channel with retries. Raises GaveUpError."""
        found: Channel = self._patiently(call, self._give_up)
        return found

    def rest(self) -> None:
        """Wait before a broken channel is reopened. Raises StoppedError."""
        if self.stop.wait(REST):
            raise StoppedError

    # Identity

    def enrol(self, token: str, name: str, wants: int | None) -> Enrolled:
        """Register the client's key at the server, with the token of an invitation."""
        proof = prove(self._key, token, name, wants)
        body = Enrol(token=token, key=self._key.public, proof=proof, name=name, wants=wants)
        enrolled: Enrolled = self._ask("/v1/enrol", body, Enrolled, "enrol")
        return enrolled

    def check_in(self, said: CheckIn) -> Welcome:
        """Introduce the client, its model and its smallest cohort, and return the run's settings.

        A `said` with `looks` set makes the client an observer. Raises PolicyError for a run that
        differs from the agreement.
        """
        asked = max(said.smallest_cohort, self.checks.smallest_cohort)
        said = replace(said, smallest_cohort=asked)
        welcome: Welcome = self._ask("/v1/check-in", said, Welcome, "check-in")
        self.checks.welcome(welcome)
        self.patience = welcome.patience
        self.heartbeat = welcome.heartbeat
        self.holds = welcome.holds
        return welcome

    def belongs(self, welcome: Welcome, name: str) -> None:
        """Bind the folder to this client. Raises StateError if the folder is another client's."""
        self.state.enter(FolderOwner(self.url, welcome.run, welcome.client, name))

    # Work

    def next(self, confirmed: Sequence[int]) -> NextAnswer:
        """Wait for work and return it, or the end of the run.

        If the watching thread has already received the end of the run, an unreachable server ends
        the run too. Raises PolicyError for a request that the site does not execute, and reports
        the refusal to the server.
        """
        ready = NextRequest(confirmed=list(confirmed))
        over = self.over
        try:
            limit = self._give_up if over is None else LAST
            timeout = self.patience + self.heartbeat
            word: NextAnswer = self._ask("/v1/next", ready, NextAnswer, "next", timeout, limit)
        except GaveUpError:
            if over is None:
                raise
            return NextAnswer(over=over)
        try:
            self.checks.word(word)
        except PolicyError:
            if word.train is not None:
                self._declines(word.train)
            raise
        return word

    def _declines(self, train: Train) -> None:
        """Report that the site does not train for this assignment; the server need not wait."""
        with suppress(OSError, DureError):
            self.failed(TrainingFailure(train.ticket, PolicyError.__name__))

    def fetch(
        self,
        round: int,
        digest: str,
        size: int,
        expected: Mapping[str, TensorSpec] | None = None,
        limit: float | None = None,
        extras: bool = True,
    ) -> dict[str, Tensor]:
        """Fetch the tensors of a model; store them as the newest model if the client has a folder.

        Args:
            round: Round of the model.
            digest: Digest of the stream.
            size: Bytes of the stream.
            expected: Dtypes and shapes of the tensors; None for those of `expects`.
            limit: Seconds of retries; None for `give_up`.
            extras: Whether the tensors include the extras of an assignment.

        Raises:
            TransferError: The tensors are not the expected tensors.
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

    def _expected(self, extras: bool) -> dict[str, TensorSpec] | None:
        if self.expects is None:
            return None
        return {name: form for name, form in self.expects.items() if extras or not is_extra(name)}

    def fetch_frozen(
        self, digest: str, size: int, expected: Mapping[str, TensorSpec]
    ) -> dict[str, Tensor]:
        """Fetch the weights that are not trained."""
        return self._down(digest, size, expected)

    def _down(
        self,
        digest: str,
        size: int,
        expected: Mapping[str, TensorSpec] | None,
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

    # Results

    def send(
        self, reserve: UploadRequest, tensors: Mapping[str, Tensor], wanted: Callable[[], bool]
    ) -> bool:
        """Send an update, or the tensors of an answer.

        Returns True if the server has the complete stream, and False if it is no longer needed.
        """
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
        """Report that an update is ready and stays here."""
        self._post("/v1/ready", UpdateReady(ticket), "ready", ticket)

    def answered(self, answer: ProtocolAnswerBody) -> None:
        """Send the answer to a step of a protocol."""
        self._post("/v1/answers", answer, "answer", answer.ticket)

    def failed(self, failed: TrainingFailure) -> None:
        """Report that there is no update, since the client's own code raised."""
        self._post("/v1/failures", failed, "failure", failed.ticket)

    def measured(self, measured: EvaluationReport) -> None:
        """Send the client's evaluation of a model."""
        self._post("/v1/measured", measured, "metrics", None, measured.round)

    @contextmanager
    def working(self, ticket: int) -> Iterator[WorkWatcher]:
        """Context manager: tell the server that the client works, and yield whether to continue."""
        watched = WorkWatcher(self, ticket)
        try:
            yield watched
        finally:
            watched.end()
        if watched.unfit is not None:
            raise watched.unfit

    # Requests

    def _ask(
        self,
        path: str,
        said: MessageBody,
        kind: Any,
        noted: Kind,
        timeout: float | None = None,
        limit: float | None = None,
    ) -> Any:
        # A query for work contains no data, so its line need not be synced immediately.
        self._note(noted, to_json(said), at_once=noted != "next")
        return self._patiently(
            lambda: self._link.ask("POST", path, said, kind, timeout), limit or self._give_up
        )

    def _post(
        self,
        path: str,
        said: MessageBody,
        noted: Kind,
        ticket: int | None,
        round: int | None = None,
    ) -> None:
        body = to_json(said)
        self._note(noted, body, ticket, round)
        headers = {"content-type": "application/json"}
        self._patiently(lambda: self._link.request("POST", path, body, headers), self._give_up)

    def _patiently(self, call: Callable[[], Any], limit: float | None) -> Any:
        with self._given_up(limit):
            return call_with_retries(call, self._backoff, self.stop, self._tells, limit)

    @contextmanager
    def _given_up(self, limit: float | None = None) -> Iterator[None]:
        """Context manager: convert the last error of the retries to GaveUpError."""
        try:
            yield
        except (LinkLostError, BusyError) as error:
            seconds = limit or self._give_up or 0.0
            raise GaveUpError(
                f"{self.url} was not reached for {_long(seconds)}: {error}; {self._kept()}"
            ) from error

    def _kept(self) -> str:
        """Describe the files that a client which ends leaves in its folder."""
        if self.state.temporary:
            return "no state is saved without --state"
        model = self.state.model_file()
        what = "no model yet" if model is None else f"the model of round {model[0]}"
        waiting = len(self.state.updates())
        updates = "update" if waiting == 1 else "updates"
        unsent = f", and {waiting} {updates} of unknown outcome" if waiting else ""
        return f"kept in {self.state.folder}: {what}{unsent}; join again to continue"

    def _note(
        self,
        kind: Kind,
        body: bytes,
        ticket: int | None = None,
        round: int | None = None,
        at_once: bool = True,
    ) -> None:
        """Write the audit line of a message before it is sent, as `AuditLog.record` does."""
        if self._audit is not None:
            self._audit.record(kind, body, ticket, round, at_once)

    def _note_update(self, reserve: UploadRequest) -> None:
        """Write the audit lines of an update or an answer: its announcement and its tensors.

        A single sync puts both lines on the disk before the first message leaves.
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

    def watch(self, ticket: int, link: HttpLink) -> WatchAnswer:
        """Ask the server whether the work is still needed."""
        said = WatchRequest(ticket)
        self._note("watch", to_json(said), ticket, at_once=False)
        return link.ask("POST", "/v1/watch", said, WatchAnswer, 2 * self.heartbeat)

    def another_link(self) -> HttpLink:
        """Open another link to the server, signed with the client's key."""
        return self._made()


class WorkWatcher:
    """Thread that asks whether work is still needed, after `QUICK` seconds, over its own link.

    The request stays open while the client works, which shows the server that the client is alive.
    """

    def __init__(self, session: Session, ticket: int) -> None:
        self._session = session
        self._ticket = ticket
        self._wanted = True
        self.reason = ""
        """Reason why the work is no longer needed."""
        self.unfit: UnfitMessageError | None = None
        """Invalid answer of the server, which ends the work."""
        self._done = threading.Event()
        self._link: HttpLink | None = None
        self._thread = threading.Thread(target=self._watch, name="dure watches", daemon=True)
        self._thread.start()

    def __call__(self) -> bool:
        """Return whether the work is still needed."""
        return self._wanted

    def end(self) -> None:
        """End the thread; an open request ends with its link."""
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
                # The transmission of the work reports problems of the connection.
                except (OSError, DureError):
                    self._done.wait(QUICK)
                if not self._wanted:
                    return


def _check_forms(tensors: Mapping[str, Tensor], expected: Mapping[str, TensorSpec] | None) -> None:
    """Compare a stored model with the expected tensors. Raises TransferError if they differ."""
    if expected is None:
        return
    try:
        check(forms_of(tensors), expected)
    except TensorsError as error:
        raise TransferError(f"the received model is invalid: {error}") from (error)


def _long(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 3600 else f"{seconds / 3600:g} h"


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        return receive(lambda memory: file.readinto(memory), size)
