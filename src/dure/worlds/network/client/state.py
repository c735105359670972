"""The folder of one client on one machine: what it keeps from one start to the next.

    lock                            held by the process that is the client now
    kept.json                       the index: the federation and the client that the folder belongs
                                    to, which of the files below count, and what is unsettled
    model-ROUND-DIGEST.safetensors      the newest global model
    personal-0-DIGEST.safetensors       the client's own, trained further on its own data
    memory-TICKET-DIGEST.safetensors    what the algorithm keeps between rounds, valid or pending
    update-TICKET-DIGEST.safetensors    an update on its way to the server
    download-DIGEST                 a model on its way from the server, as far as it has come
    approved-RUN                    the user has agreed to take part in that run
    agreed-RUN.json                 the run as its server described it when the site agreed to it
    evaluations-RUN                 the models of that run that were measured here: ROUND DIGEST
    owners-roster-RUN.json          the clients of that run, as its owner has signed them
    key.pem                         the client's private key
    spent-models                    models to whose sums it contributes no more (`spent`)

What an algorithm keeps, SCAFFOLD's control say, is right only if the update that was computed with
it counts, and the server alone knows. So it is *pending* until the server has said what became of
the ticket (`settle`), and only then *valid* (`memory`). The server repeats that until it has heard
that the client has written it down (`confirmations`).

Whatever changes is one replacement of the index. A file of tensors is written whole before the
index names it, under a name that says what it holds, and is removed after no index names it. So a
kill at any moment leaves the state before or the state after, and files that are swept away when
the folder is opened next. Everything has a checksum: what a disk has damaged is named, not used.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec
from msgspec.structs import replace

from dure.errors import StateError
from dure.record.disk import opened_itself, sync_folder, told, write_atomically
from dure.record.inside import contents, opened
from dure.record.seal import checksum, sha256_of
from dure.wire.requests import Reserve, from_json, to_json
from dure.wire.signatures import Key
from dure.worlds.network.client.agreement import AgreedRun
from dure.worlds.network.client.lock import lock, unlock
from dure.worlds.network.client.quota import Quota
from dure.worlds.network.client.spent import SpentModelsFile

if TYPE_CHECKING:
    from torch import Tensor

# Functions that read or write tensors import torch by `dure.wire.tensors`: others do without.

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TENSORS = re.compile(r"(?:model|frozen|personal|memory|update)--?\d+-[0-9a-f]{16}\.safetensors")
_HALF = re.compile(r"\.(?:tensors|kept\.json)\.\d+")
"""Names of files of tensors, and of files that are not whole yet. A kill may leave some."""
_RUN = re.compile(r"\w[\w.-]{0,99}")

KEY = "key.pem"
"""The client's private key."""

_BEGIN = b'{"checksum":"'
_MIDDLE = b'","kept":'


class About(msgspec.Struct, frozen=True):
    """Whose folder it is. client: its number."""

    url: str
    run: str
    client: int
    name: str


class _File(msgspec.Struct, frozen=True):
    """A file of tensors. digest: SHA-256 of all of it. number: of the round or the ticket."""

    kind: str
    number: int
    digest: str

    @property
    def name(self) -> str:
        # The digest is part of the name: a file never has to be written over one that counts.
        return f"{self.kind}-{self.number}-{self.digest[:16]}.safetensors"


class _Helped(msgspec.Struct, frozen=True):
    """An answer by which the client has helped to unmask a sum. question: its digest."""

    question: bytes
    answer: bytes


class _Kept(msgspec.Struct, frozen=True):
    """The index. pending: by ticket, None where the algorithm keeps nothing new.

    models: by ticket, the digests of the models from which the updates were computed. helped: by
    ticket, until it is settled. spent: how many models the list of spent ones has, at least.
    """

    about: About | None = None
    model: _File | None = None
    frozen: _File | None = None
    personal: _File | None = None
    memory: _File | None = None
    pending: dict[int, _File | None] = {}
    updates: dict[int, Reserve] = {}
    models: dict[int, str] = {}
    confirmations: list[int] = []
    helped: dict[int, _Helped] = {}
    spent: int = 0

    def files(self) -> set[str]:
        """The names of those that count."""
        found = [self.model, self.frozen, self.personal, self.memory, *self.pending.values()]
        found += [_of_update(reserve) for reserve in self.updates.values()]
        return {file.name for file in found if file is not None}


def _without_update(kept: _Kept, ticket: int) -> _Kept:
    updates = {one: reserve for one, reserve in kept.updates.items() if one != ticket}
    models = {one: digest for one, digest in kept.models.items() if one != ticket}
    return replace(kept, updates=updates, models=models)


def _of_update(reserve: Reserve) -> _File:
    return _File("update", reserve.ticket, reserve.digest)


class ClientState:
    """The folder of one client, which one process at a time has open.

    folder: is made where it is missing; None takes a temporary one, which `close` removes.

    Raises StateError where another process has it or where it is damaged, and RunFolderWriteError,
    as every method that keeps something, where the disk does not take it: what was kept before then
    still is.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="dure-")) if folder is None else folder
        self.quota = Quota(self.folder)
        """What the run may store here; without bound until its site has agreed to it."""
        # Messages come on several threads: one waits for work, another watches it.
        self._turn = threading.RLock()
        self._lock = _locked(self.folder)
        try:
            self._kept = self._opened()
            self._spent = SpentModelsFile(self.folder, self._kept.spent)
            self._sweep()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Another process may have the folder now."""
        if unlock(self._lock) and self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> ClientState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def temporary(self) -> bool:
        """Whether nothing of it outlives the process."""
        return self._temporary

    @property
    def about(self) -> About | None:
        """Whose folder it is; None before it is anybody's."""
        return self._kept.about

    @property
    def key(self) -> Path:
        """Where the client's private key belongs."""
        return self.folder / KEY

    def enter(self, about: About) -> None:
        """The folder belongs to this client from now on; its server may have moved.

        Raises StateError if it belongs to another one, or to another run.
        """
        with self._turn:
            was = self.about
            if was is not None and replace(was, url="") != replace(about, url=""):
                raise StateError(
                    f"{self.folder} belongs to {_who(was)}, and not to {_who(about)}: give another "
                    "--state, or let it be forgotten"
                )
            self._change(replace(self._kept, about=about))

    # The newest global model, and the client's own

    def keep_model(self, round: int, tensors: Mapping[str, Tensor]) -> None:
        """It is the newest one, in the place of the one before."""
        with self._turn:
            self._change(replace(self._kept, model=self._written("model", round, tensors)))

    def download(self, digest: str, size: int = 0) -> Path:
        """The file in which tensors of this digest arrive. What is there of it came before a break.

        size: bytes that it will have. Raises ValueError if this is no digest, and PolicyError for
        more bytes than the site stores.
        """
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest[:80]!r} is no SHA-256")
        path = self.folder / f"download-{digest}"
        there = path.stat().st_size if path.exists() else 0
        self.quota.check(max(0, size - there), "a model on its way")
        return path

    def keep_download(self, round: int, digest: str) -> None:
        """What was downloaded whole is the newest model. Other downloads are given up.

        Raises StateError if it is not what its digest says; then it is removed.
        """
        with self._turn:
            path = self.download(digest)
            file = _File("model", round, digest)
            # The name of one that is kept already needs no second look: its content is the same.
            if self._kept.model != file:
                try:
                    _check(path, digest)
                except StateError:
                    path.unlink(missing_ok=True)
                    raise
                with told(path):
                    _sync(path)
                    os.replace(path, self.folder / file.name)
                    sync_folder(self.folder)
                self._change(replace(self._kept, model=file))
            for other in self.folder.glob("download-*"):
                other.unlink()

    def model(self) -> tuple[int, dict[str, Tensor]] | None:
        """(round, tensors) of the newest one; None before the first.

        Raises StateError if it is damaged.
        """
        with self._turn:
            file = self._kept.model
            return None if file is None else (file.number, self._tensors(file))

    def model_file(self) -> tuple[int, str, Path] | None:
        """(round, digest, file) of the newest one, unread; None before the first."""
        file = self._kept.model
        return None if file is None else (file.number, file.digest, self.folder / file.name)

    def keep_frozen(self, tensors: Mapping[str, Tensor]) -> None:
        """What no model that is fetched has, since it is not trained."""
        from dure.wire.tensors import digest_of

        with self._turn:
            was = self._kept.frozen
            # It may be large, and is the same each time.
            if was is None or was.digest != digest_of(tensors):
                self._change(replace(self._kept, frozen=self._written("frozen", 0, tensors)))

    def frozen(self) -> dict[str, Tensor]:
        """What is not trained; nothing before the first. Raises StateError if it is damaged."""
        with self._turn:
            file = self._kept.frozen
            return {} if file is None else self._tensors(file)

    def keep_personal(self, tensors: Mapping[str, Tensor]) -> None:
        """It is the client's own model, in the place of the one before."""
        with self._turn:
            self._change(replace(self._kept, personal=self._written("personal", 0, tensors)))

    def personal(self) -> dict[str, Tensor] | None:
        """The client's own model; None before the first. Raises StateError if it is damaged."""
        with self._turn:
            file = self._kept.personal
            return None if file is None else self._tensors(file)

    # What the algorithm keeps

    def memory(self) -> list[Tensor] | None:
        """What is valid; None before the first. Raises StateError if it is damaged."""
        with self._turn:
            file = self._kept.memory
            tensors = None if file is None else self._tensors(file)
        if tensors is None:
            return None
        return [tensors[str(place)] for place in range(len(tensors))]

    def keep_pending(self, ticket: int, memory: Sequence[Tensor] | None) -> None:
        """What becomes valid if the update of this ticket counts; None leaves what is valid."""
        with self._turn:
            file = None
            if memory is not None:
                named = {str(place): tensor for place, tensor in enumerate(memory)}
                file = self._written("memory", ticket, named)
            self._change(replace(self._kept, pending={**self._kept.pending, ticket: file}))

    def pending(self) -> list[int]:
        """Tickets whose outcome is not known."""
        return list(self._kept.pending)

    def settle(self, ticket: int, kept: bool) -> None:
        """Takes what was pending if the update counts; else it, and the update, are dropped.

        The server says so again until it has heard the confirmation: a ticket that is not pending
        was settled before, and is confirmed once more.
        """
        with self._turn:
            before = self._kept
            pending = dict(before.pending)
            updates = dict(before.updates)
            file = pending.pop(ticket, None)
            updates.pop(ticket, None)
            helped = {one: each for one, each in before.helped.items() if one != ticket}
            confirmations = [*dict.fromkeys([*before.confirmations, ticket])]
            self._change(
                replace(
                    before,
                    memory=file if kept and file is not None else before.memory,
                    pending=pending,
                    updates=updates,
                    confirmations=confirmations,
                    helped=helped,
                )
            )

    def confirmations(self) -> list[int]:
        """Tickets that are settled here, which the server may not have heard."""
        return list(self._kept.confirmations)

    def confirmed(self, tickets: Iterable[int]) -> None:
        """The server has heard that these are settled."""
        with self._turn:
            heard = set(tickets)
            left = [ticket for ticket in self._kept.confirmations if ticket not in heard]
            self._change(replace(self._kept, confirmations=left))

    # An update on its way

    def keep_update(self, reserve: Reserve, tensors: Mapping[str, Tensor], model: str = "") -> None:
        """What is to be sent, until the outcome of its ticket is known.

        model: the digest of the one from which it was computed. Raises ValueError if `reserve`
        cannot travel, or is not about these tensors.
        """
        # A number that is not finite could not be read again, here or by the server.
        from_json(to_json(reserve), Reserve)
        with self._turn:
            file = self._written("update", reserve.ticket, tensors)
            size = (self.folder / file.name).stat().st_size
            if (file.digest, size) != (reserve.digest, reserve.bytes):
                self._sweep()
                raise ValueError(
                    f"these tensors have {size} bytes with the digest {file.digest}, and not "
                    f"{reserve.bytes} with {reserve.digest}"
                )
            updates = {**self._kept.updates, reserve.ticket: reserve}
            models = {ticket: self._kept.models.get(ticket, "") for ticket in updates}
            models[reserve.ticket] = model
            self._change(replace(self._kept, updates=updates, models=models))

    def updates(self) -> list[Reserve]:
        """Those that are on their way."""
        return list(self._kept.updates.values())

    def computed_from(self, ticket: int) -> str:
        """The digest of the model from which an update was computed; empty where nobody knows."""
        return self._kept.models.get(ticket, "")

    def update(self, ticket: int) -> Path:
        """The file with the tensors of an update on its way.

        Raises KeyError if there is none of this ticket, StateError if it is damaged.
        """
        reserve = self._kept.updates[ticket]
        path = self.folder / _of_update(reserve).name
        _check(path, reserve.digest)
        return path

    # Sums that it has helped to unmask

    def is_spent(self, model: bytes) -> bool:
        """Whether the client has helped to unmask a sum of updates from this model."""
        with self._turn:
            return model in self._spent

    def spend(self, model: bytes, ticket: int, question: bytes, answer: bytes) -> None:
        """The client may help to unmask a sum, once, with this answer to this question.

        The update of this ticket is gone, and the model is on the list of spent ones, whatever
        becomes of the run.
        """
        with self._turn:
            self._spent.add(model)
            kept = replace(
                self._kept,
                helped={**self._kept.helped, ticket: _Helped(question, answer)},
                spent=len(self._spent),
            )
            self._change(_without_update(kept, ticket))

    def answered(self, ticket: int, question: bytes) -> bytes | None:
        """The answer that this question got; None for a question without one."""
        helped = self._kept.helped.get(ticket)
        return helped.answer if helped is not None and helped.question == question else None

    def drop_update(self, ticket: int) -> None:
        """Removes an update that goes nowhere."""
        with self._turn:
            self._change(_without_update(self._kept, ticket))

    # What the user has agreed to

    def approval(self, run: str) -> Path:
        """The file that says so, once it is there. Raises StateError for no name of a run."""
        # The name comes from the server, and is to lead to no other folder.
        if not _RUN.fullmatch(run):
            raise StateError(f"{run[:80]!r} is no name of a run")
        return self.folder / f"approved-{run}"

    def approve(self, run: str) -> None:
        """The user agrees to take part in the run."""
        write_atomically(self.approval(run), b"")

    def approved(self, run: str) -> bool:
        """Whether the user has agreed to take part in the run."""
        return self.approval(run).is_file()

    def agree(self, agreed: AgreedRun) -> None:
        """The site takes part in the run as it is described here."""
        _write(self._agreed(agreed.run), agreed)

    def agreed(self, run: str) -> AgreedRun | None:
        """The run as the site has agreed to it; None where it has not. Raises StateError if it is
        damaged."""
        return _read(self._agreed(run), AgreedRun)

    def _agreed(self, run: str) -> Path:
        self.approval(run)
        return self.folder / f"agreed-{run}.json"

    # What was measured

    def measured(self, run: str) -> list[tuple[int, str]]:
        """(round, digest) of each model that was measured, in order."""
        path = self._measured(run)
        if not path.exists():
            return []
        # A kill may leave a part of a line, of a measurement that has not begun.
        lines = path.read_bytes().rpartition(b"\n")[0].decode("ascii", "replace").splitlines()
        try:
            return [(int(round), digest) for round, digest in map(str.split, lines)]
        except ValueError as error:
            raise _damaged(path, str(error)) from error

    def note_measured(self, run: str, round: int, digest: str) -> None:
        """This model is about to be measured; that is on the disk when this returns."""
        path = self._measured(run)
        line = f"{round} {digest}\n"
        self.quota.check(len(line), "the list of evaluations")
        with told(path), open(path, "ab") as file:
            file.write(line.encode("ascii"))
            file.flush()
            os.fsync(file.fileno())

    def _measured(self, run: str) -> Path:
        self.approval(run)
        return self.folder / f"evaluations-{run}"

    def forget(self) -> None:
        """Removes all that the run has left here. The key stays, which is the machine's, with the
        list of models that it contributes to no more."""
        with self._turn:
            # The index first: nothing counts then, and a kill in between leaves nothing half.
            self._change(_Kept(spent=len(self._spent)))
            left_behind = ("download-*", "approved-*", "agreed-*", "evaluations-*")
            for left in (*left_behind, "owners-roster-*"):
                for path in self.folder.glob(left):
                    path.unlink()
            sync_folder(self.folder)

    # Files

    def _opened(self) -> _Kept:
        """The index, which is made where the folder is new. Raises StateError if it is lost."""
        path = self.folder / "kept.json"
        kept = _read(path, _Kept)
        if kept is None:
            # It is there before the first file of tensors is.
            lost = [each.name for each in self.folder.iterdir() if _TENSORS.fullmatch(each.name)]
            if lost:
                raise _damaged(path, f"it is missing, and says what {min(lost)} is")
            kept = _Kept()
            _write(path, kept)
        return kept

    def _change(self, kept: _Kept) -> None:
        """All that is kept, from now on: the one place where the index changes."""
        if kept != self._kept:
            _write(self.folder / "kept.json", kept)
            self._kept = kept
        self._sweep()

    def _sweep(self) -> None:
        """Removes files of tensors that do not count, and what a kill left half written."""
        count = self._kept.files()
        for path in self.folder.iterdir():
            mine = _TENSORS.fullmatch(path.name) or _HALF.fullmatch(path.name)
            if mine and path.name not in count:
                # What cannot be removed takes room, and does no other harm.
                with suppress(OSError):
                    path.unlink()

    def _written(self, kind: str, number: int, tensors: Mapping[str, Tensor]) -> _File:
        """A file of these tensors, on the disk but in no index yet."""
        from dure.wire.tensors import forms_of, pieces, size_of

        self.quota.check(size_of(forms_of(tensors)), f"the file of {kind} {number}")
        beside = self.folder / f".tensors.{os.getpid()}"
        digest = hashlib.sha256()
        with told(beside):
            try:
                with open(beside, "wb", opener=opened_itself) as content:
                    for piece in pieces(tensors):
                        digest.update(piece)
                        content.write(piece)
                    content.flush()
                    os.fsync(content.fileno())
                file = _File(kind, number, digest.hexdigest())
                os.replace(beside, self.folder / file.name)
            except OSError:
                # On a full disk, what was written of it takes room that others need.
                with suppress(OSError):
                    beside.unlink()
                raise
            sync_folder(self.folder)
        return file

    def _tensors(self, file: _File) -> dict[str, Tensor]:
        from dure.wire.tensors import TensorsError, receive

        path = self.folder / file.name
        try:
            with opened(path) as content:
                reading = _Reading(content)
                tensors = receive(reading, os.fstat(content.fileno()).st_size)
        except (OSError, TensorsError) as error:
            raise _damaged(path, str(error)) from error
        if reading.digest.hexdigest() != file.digest:
            raise _damaged(path, "its digest is not that of its content")
        return tensors


class _Reading:
    """Reads a file, and has the digest of what was read."""

    def __init__(self, content: BinaryIO) -> None:
        self.content = content
        self.digest = hashlib.sha256()

    def __call__(self, memory: memoryview) -> int:
        count: int = self.content.readinto(memory)  # type: ignore[attr-defined]
        self.digest.update(memory[:count])
        return count


def own_key(folder: Path) -> Key:
    """The key of a client's folder, also while the client is at work there.

    It is made, with the folder, where there is none yet. Raises StateError for a folder that can be
    no client's, and ValueError and RunFolderWriteError as `Key.kept_in`.
    """
    if (folder / KEY).exists():
        return Key.kept_in(folder / KEY)
    with ClientState(folder) as state:
        return Key.kept_in(state.key)


def _locked(folder: Path) -> int:
    """The lock of a folder, as an open descriptor."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A private key lies there, and what was learned from data that nobody else is to see.
        folder.chmod(0o700)
        return lock(folder / "lock")
    except BlockingIOError as error:
        raise StateError(
            f"{folder} is in use by another process: give each client a --state of its own"
        ) from error
    except OSError as error:
        raise StateError(f"{folder} can be no folder of a client: {error.strerror}") from error


def _who(about: About) -> str:
    return f"client {about.client} ({about.name}) of run {about.run}"


def _sync(path: Path) -> None:
    with open(path, "rb") as content:
        os.fsync(content.fileno())


def _check(path: Path, digest: str) -> None:
    """Raises StateError if the file is not what its digest says."""
    try:
        found = sha256_of(path)
    except OSError as error:
        raise _damaged(path, str(error)) from error
    if found != digest:
        raise _damaged(path, "its digest is not that of its content")


def _damaged(path: Path, reason: str) -> StateError:
    return StateError(
        f"{path} is damaged: {reason}; restore it from a copy, or begin in an empty folder"
    )


# Small files: {"checksum": of what follows, "kept": ...}

_Content = TypeVar("_Content")


def _write(path: Path, what: object) -> None:
    content = msgspec.json.encode(what)
    write_atomically(path, _BEGIN + checksum(content).encode() + _MIDDLE + content + b"}")


def _read(path: Path, kind: type[_Content]) -> _Content | None:
    """What was written there; None without the file. Raises StateError if it is damaged."""
    try:
        written = contents(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _damaged(path, str(error)) from error
    head = len(_BEGIN) + 8 + len(_MIDDLE)
    content = written[head:-1]
    if written != _BEGIN + checksum(content).encode() + _MIDDLE + content + b"}":
        raise _damaged(path, "its checksum is not that of its content")
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
