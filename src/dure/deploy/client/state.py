"""Client folder: the state that a client keeps on its machine between starts.

    lock                            locked by the process that is the client now
    kept.json                       index: the federation and client of the folder, the current
                                    files of tensors, and the unsettled assignments
    model-ROUND-DIGEST.safetensors      the newest global model
    personal-0-DIGEST.safetensors       the client's personalised model
    memory-TICKET-DIGEST.safetensors    the algorithm's state between rounds, valid or pending
    update-TICKET-DIGEST.safetensors    an update not yet settled
    download-DIGEST                 a partial download of a model
    approved-RUN                    the user has agreed to take part in that run
    agreed-RUN.json                 the server's description of the run that the site agreed to
    evaluations-RUN                 the models of that run that the client evaluated: ROUND DIGEST
    owners-roster-RUN.json          the clients of that run, signed by its owner
    key.pem                         the client's private key
    spent-models                    models whose secure sums the client has helped to unmask
    (`spent`)

The algorithm's state, such as SCAFFOLD's control variate, is right only if the update computed with
it counts, which only the server knows. The state is therefore *pending* until the server reports
the outcome of the assignment (`settle`), and then becomes *valid* (`memory`). The server repeats
the outcome until the client has confirmed it (`confirmations`).

Every change replaces the index atomically. A file of tensors is complete before the index names it,
has a name with its digest, and is removed after the index no longer names it. A kill at any moment
therefore leaves the state before or after the change, and perhaps files that the next start
removes. Every file has a checksum: a damaged file raises an error that names it, and is not used.
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

from dure.deploy.client.agreement import AgreedRun
from dure.deploy.client.file_lock import lock, unlock
from dure.deploy.client.quota import Quota
from dure.deploy.client.spent_models import SpentModelsFile
from dure.errors import StateError
from dure.record.disk import disk_errors, open_regular_file, sync_folder, write_atomically
from dure.record.seal import checksum, sha256_of
from dure.record.untrusted_files import contents, opened
from dure.wire.requests import UploadRequest, from_json, to_json
from dure.wire.signatures import Key

if TYPE_CHECKING:
    from torch import Tensor

# Functions that read or write tensors import torch through `dure.wire.tensors`; other uses of this
# module do not need torch.

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TENSORS = re.compile(r"(?:model|frozen|personal|memory|update)--?\d+-[0-9a-f]{16}\.safetensors")
_HALF = re.compile(r"\.(?:tensors|kept\.json)\.\d+")
"""Names of files of tensors, and of incomplete files, which a kill may leave."""
_RUN = re.compile(r"\w[\w.-]{0,99}")

KEY = "key.pem"
"""Name of the file of the client's private key."""

_BEGIN = b'{"checksum":"'
_MIDDLE = b'","kept":'


class FolderOwner(msgspec.Struct, frozen=True):
    """Owner of a folder: the server's URL, the run, and the number and name of the client."""

    url: str
    run: str
    client: int
    name: str


class _File(msgspec.Struct, frozen=True):
    """File of tensors. `digest` is its SHA-256; `number` is a round or an assignment id."""

    kind: str
    number: int
    digest: str

    @property
    def name(self) -> str:
        # The digest in the name ensures that a new file never overwrites a current file.
        return f"{self.kind}-{self.number}-{self.digest[:16]}.safetensors"


class _Helped(msgspec.Struct, frozen=True):
    """Answer that has helped to unmask a sum. `question` is the digest of the question."""

    question: bytes
    answer: bytes


class _Kept(msgspec.Struct, frozen=True):
    """Index of the folder.

    Args:
        about: Owner of the folder.
        model: Newest global model.
        frozen: Weights that are not trained.
        personal: Personalised model.
        memory: Valid state of the algorithm.
        pending: Pending state of the algorithm by assignment id; None for no new state.
        updates: Unsettled updates by assignment id.
        models: Digests of the models from which the updates were computed, by assignment id.
        confirmations: Settled assignment ids whose confirmation the server has not acknowledged.
        helped: Answers that have helped to unmask a sum, by unsettled assignment id.
        spent: Least number of models in the file of spent models.
    """

    about: FolderOwner | None = None
    model: _File | None = None
    frozen: _File | None = None
    personal: _File | None = None
    memory: _File | None = None
    pending: dict[int, _File | None] = {}
    updates: dict[int, UploadRequest] = {}
    models: dict[int, str] = {}
    confirmations: list[int] = []
    helped: dict[int, _Helped] = {}
    spent: int = 0

    def files(self) -> set[str]:
        """Return the names of the current files of tensors."""
        found = [self.model, self.frozen, self.personal, self.memory, *self.pending.values()]
        found += [_of_update(reserve) for reserve in self.updates.values()]
        return {file.name for file in found if file is not None}


def _without_update(kept: _Kept, ticket: int) -> _Kept:
    updates = {one: reserve for one, reserve in kept.updates.items() if one != ticket}
    models = {one: digest for one, digest in kept.models.items() if one != ticket}
    return replace(kept, updates=updates, models=models)


def _of_update(reserve: UploadRequest) -> _File:
    return _File("update", reserve.ticket, reserve.digest)


class ClientState:
    """Folder of a client, opened by at most one process at a time.

    `folder` is created if it is missing; None makes a temporary folder, which `close` removes.
    Raises StateError if another process has opened the folder, or if it is damaged. Every method
    that stores data raises RunFolderWriteError if the disk refuses the write; the previous state
    then remains.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="dure-")) if folder is None else folder
        self.quota = Quota(self.folder)
        """Storage quota of the run; without limit until the site has agreed to the run."""
        # Several threads send messages: a thread waits for work while another watches it.
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
        """Release the folder for other processes; remove a temporary folder."""
        if unlock(self._lock) and self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> ClientState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def temporary(self) -> bool:
        """Whether the folder is removed when the client closes it."""
        return self._temporary

    @property
    def about(self) -> FolderOwner | None:
        """Owner of the folder; None for a new folder."""
        return self._kept.about

    @property
    def key(self) -> Path:
        """Path of the client's private key."""
        return self.folder / KEY

    def enter(self, about: FolderOwner) -> None:
        """Bind the folder to this client; only the server's URL may change later.

        Raises StateError if the folder belongs to another client or another run.
        """
        with self._turn:
            was = self.about
            if was is not None and replace(was, url="") != replace(about, url=""):
                raise StateError(
                    f"{self.folder} belongs to {_who(was)}, not to {_who(about)}: give another "
                    "--state, or remove the client at the server (dure clients forget)"
                )
            self._change(replace(self._kept, about=about))

    # Global model and personalised model

    def keep_model(self, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Store the newest global model in place of the previous model."""
        with self._turn:
            self._change(replace(self._kept, model=self._written("model", round, tensors)))

    def download(self, digest: str, size: int = 0) -> Path:
        """Return the path of a partial download, which may have bytes from before an interruption.

        `size` is the size of the complete file in bytes. Raises ValueError for an invalid digest,
        and PolicyError beyond the storage quota.
        """
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest[:80]!r} is not a SHA-256")
        path = self.folder / f"download-{digest}"
        there = path.stat().st_size if path.exists() else 0
        self.quota.check(max(0, size - there), "a model on its way")
        return path

    def keep_download(self, round: int, digest: str) -> None:
        """Make a complete download the newest model, and remove other downloads.

        Raises StateError, and removes the file, if its content does not have the digest.
        """
        with self._turn:
            path = self.download(digest)
            file = _File("model", round, digest)
            # A file with the same name has the same content and needs no check.
            if self._kept.model != file:
                try:
                    _check(path, digest)
                except StateError:
                    path.unlink(missing_ok=True)
                    raise
                with disk_errors(path):
                    _sync(path)
                    os.replace(path, self.folder / file.name)
                    sync_folder(self.folder)
                self._change(replace(self._kept, model=file))
            for other in self.folder.glob("download-*"):
                other.unlink()

    def model(self) -> tuple[int, dict[str, Tensor]] | None:
        """Return (round, tensors) of the newest model; None without a model.

        Raises StateError if the file is damaged.
        """
        with self._turn:
            file = self._kept.model
            return None if file is None else (file.number, self._tensors(file))

    def model_file(self) -> tuple[int, str, Path] | None:
        """Return (round, digest, path) of the newest model, unread; None without a model."""
        file = self._kept.model
        return None if file is None else (file.number, file.digest, self.folder / file.name)

    def keep_frozen(self, tensors: Mapping[str, Tensor]) -> None:
        """Store the weights that are not trained, which fetched models lack."""
        from dure.wire.tensors import digest_of

        with self._turn:
            was = self._kept.frozen
            # The file may be large, and rarely changes.
            if was is None or was.digest != digest_of(tensors):
                self._change(replace(self._kept, frozen=self._written("frozen", 0, tensors)))

    def frozen(self) -> dict[str, Tensor]:
        """Return the weights that are not trained; empty without any.

        Raises StateError on damage.
        """
        with self._turn:
            file = self._kept.frozen
            return {} if file is None else self._tensors(file)

    def keep_personal(self, tensors: Mapping[str, Tensor]) -> None:
        """Store the client's personalised model in place of the previous one."""
        with self._turn:
            self._change(replace(self._kept, personal=self._written("personal", 0, tensors)))

    def personal(self) -> dict[str, Tensor] | None:
        """Return the personalised model; None without a model. Raises StateError on damage."""
        with self._turn:
            file = self._kept.personal
            return None if file is None else self._tensors(file)

    # State of the algorithm

    def memory(self) -> list[Tensor] | None:
        """Return the valid state of the algorithm; None without any.

        Raises StateError on damage.
        """
        with self._turn:
            file = self._kept.memory
            tensors = None if file is None else self._tensors(file)
        if tensors is None:
            return None
        return [tensors[str(place)] for place in range(len(tensors))]

    def keep_pending(self, ticket: int, memory: Sequence[Tensor] | None) -> None:
        """Store state that becomes valid if the update counts; None leaves the valid state."""
        with self._turn:
            file = None
            if memory is not None:
                named = {str(place): tensor for place, tensor in enumerate(memory)}
                file = self._written("memory", ticket, named)
            self._change(replace(self._kept, pending={**self._kept.pending, ticket: file}))

    def pending(self) -> list[int]:
        """Return assignment ids whose outcome is unknown."""
        return list(self._kept.pending)

    def settle(self, ticket: int, kept: bool) -> None:
        """Commit the pending state if the update counts, else drop it; remove the update.

        The server repeats an outcome until it has received the confirmation: an assignment id that
        is not pending was settled before, and is confirmed again.
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
        """Return settled assignment ids whose confirmation may not have reached the server."""
        return list(self._kept.confirmations)

    def confirmed(self, tickets: Iterable[int]) -> None:
        """Remove confirmations that the server has received."""
        with self._turn:
            heard = set(tickets)
            left = [ticket for ticket in self._kept.confirmations if ticket not in heard]
            self._change(replace(self._kept, confirmations=left))

    # Unsettled updates

    def keep_update(
        self, reserve: UploadRequest, tensors: Mapping[str, Tensor], model: str = ""
    ) -> None:
        """Store an update until its outcome is known.

        `model` is the digest of the model from which the update was computed. Raises ValueError if
        `reserve` cannot be sent, or does not describe these tensors.
        """
        # A number that is not finite could not be decoded again, here or by the server.
        from_json(to_json(reserve), UploadRequest)
        with self._turn:
            file = self._written("update", reserve.ticket, tensors)
            size = (self.folder / file.name).stat().st_size
            if (file.digest, size) != (reserve.digest, reserve.bytes):
                self._sweep()
                raise ValueError(
                    f"these tensors have {size} bytes with the digest {file.digest}, not "
                    f"{reserve.bytes} with {reserve.digest}"
                )
            updates = {**self._kept.updates, reserve.ticket: reserve}
            models = {ticket: self._kept.models.get(ticket, "") for ticket in updates}
            models[reserve.ticket] = model
            self._change(replace(self._kept, updates=updates, models=models))

    def updates(self) -> list[UploadRequest]:
        """Return the unsettled updates."""
        return list(self._kept.updates.values())

    def computed_from(self, ticket: int) -> str:
        """Return the digest of the model that an update was computed from; "" if unknown."""
        return self._kept.models.get(ticket, "")

    def update(self, ticket: int) -> Path:
        """Return the file of tensors of an unsettled update.

        Raises KeyError for an unknown assignment id, and StateError if the file is damaged.
        """
        reserve = self._kept.updates[ticket]
        path = self.folder / _of_update(reserve).name
        _check(path, reserve.digest)
        return path

    # Secure sums that the client has helped to unmask

    def is_spent(self, model: bytes) -> bool:
        """Return whether the client has helped to unmask a sum of updates from this model."""
        with self._turn:
            return model in self._spent

    def spend(self, model: bytes, ticket: int, question: bytes, answer: bytes) -> None:
        """Record that the client helps to unmask a sum, with this answer to this question.

        Removes the update of this assignment, and adds the model to the spent models for good,
        whatever the outcome of the run.
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
        """Return the answer to this question; None for a question without an answer."""
        helped = self._kept.helped.get(ticket)
        return helped.answer if helped is not None and helped.question == question else None

    def drop_update(self, ticket: int) -> None:
        """Remove an update that will not be sent."""
        with self._turn:
            self._change(_without_update(self._kept, ticket))

    # Agreement of the user

    def approval(self, run: str) -> Path:
        """Return the path of the approval of a run. Raises StateError for an invalid run id."""
        # The server chooses the name, which must not lead to another folder.
        if not _RUN.fullmatch(run):
            raise StateError(f"{run[:80]!r} is not a name of a run")
        return self.folder / f"approved-{run}"

    def approve(self, run: str) -> None:
        """Record that the user agrees to take part in the run."""
        write_atomically(self.approval(run), b"")

    def approved(self, run: str) -> bool:
        """Return whether the user has agreed to take part in the run."""
        return self.approval(run).is_file()

    def agree(self, agreed: AgreedRun) -> None:
        """Record that the site takes part in the run as described."""
        _write(self._agreed(agreed.run), agreed)

    def agreed(self, run: str) -> AgreedRun | None:
        """Return the run that the site has agreed to; None without an agreement.

        Raises StateError if the file is damaged.
        """
        return _read(self._agreed(run), AgreedRun)

    def _agreed(self, run: str) -> Path:
        self.approval(run)
        return self.folder / f"agreed-{run}.json"

    # Evaluations

    def measured(self, run: str) -> list[tuple[int, str]]:
        """Return (round, digest) of each evaluated model, in order."""
        path = self._measured(run)
        if not path.exists():
            return []
        # A kill may leave a partial line, whose evaluation has not begun.
        lines = path.read_bytes().rpartition(b"\n")[0].decode("ascii", "replace").splitlines()
        try:
            return [(int(round), digest) for round, digest in map(str.split, lines)]
        except ValueError as error:
            raise _damaged(path, str(error)) from error

    def note_measured(self, run: str, round: int, digest: str) -> None:
        """Record, durably, that this model is about to be evaluated."""
        path = self._measured(run)
        line = f"{round} {digest}\n"
        self.quota.check(len(line), "the list of evaluations")
        with disk_errors(path), open(path, "ab") as file:
            file.write(line.encode("ascii"))
            file.flush()
            os.fsync(file.fileno())

    def _measured(self, run: str) -> Path:
        self.approval(run)
        return self.folder / f"evaluations-{run}"

    def forget(self) -> None:
        """Remove all files of the run; the key and the list of spent models remain."""
        with self._turn:
            # The index first: no file is current then, and a kill in between leaves no half state.
            self._change(_Kept(spent=len(self._spent)))
            left_behind = ("download-*", "approved-*", "agreed-*", "evaluations-*")
            for left in (*left_behind, "owners-roster-*"):
                for path in self.folder.glob(left):
                    path.unlink()
            sync_folder(self.folder)

    # Files

    def _opened(self) -> _Kept:
        """Read the index, or create it in a new folder. Raises StateError if it is missing."""
        path = self.folder / "kept.json"
        kept = _read(path, _Kept)
        if kept is None:
            # The index exists before the first file of tensors.
            lost = [each.name for each in self.folder.iterdir() if _TENSORS.fullmatch(each.name)]
            if lost:
                raise _damaged(path, f"the file is missing, which describes {min(lost)}")
            kept = _Kept()
            _write(path, kept)
        return kept

    def _change(self, kept: _Kept) -> None:
        """Replace the index; the only place where it changes."""
        if kept != self._kept:
            _write(self.folder / "kept.json", kept)
            self._kept = kept
        self._sweep()

    def _sweep(self) -> None:
        """Remove files of tensors outside the index, and incomplete files."""
        count = self._kept.files()
        for path in self.folder.iterdir():
            mine = _TENSORS.fullmatch(path.name) or _HALF.fullmatch(path.name)
            if mine and path.name not in count:
                # A file that cannot be removed takes space, and does no other harm.
                with suppress(OSError):
                    path.unlink()

    def _written(self, kind: str, number: int, tensors: Mapping[str, Tensor]) -> _File:
        """Write a file of these tensors durably, before the index names it."""
        from dure.wire.tensors import forms_of, pieces, size_of

        self.quota.check(size_of(forms_of(tensors)), f"the file of {kind} {number}")
        beside = self.folder / f".tensors.{os.getpid()}"
        digest = hashlib.sha256()
        with disk_errors(beside):
            try:
                with open(beside, "wb", opener=open_regular_file) as content:
                    for piece in pieces(tensors):
                        digest.update(piece)
                        content.write(piece)
                    content.flush()
                    os.fsync(content.fileno())
                file = _File(kind, number, digest.hexdigest())
                os.replace(beside, self.folder / file.name)
            except OSError:
                # On a full disk, the partial file takes space that others need.
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
            raise _damaged(path, "its digest does not match its content")
        return tensors


class _Reading:
    """Reader of a file that computes the digest of the bytes read."""

    def __init__(self, content: BinaryIO) -> None:
        self.content = content
        self.digest = hashlib.sha256()

    def __call__(self, memory: memoryview) -> int:
        count: int = self.content.readinto(memory)  # type: ignore[attr-defined]
        self.digest.update(memory[:count])
        return count


def own_key(folder: Path) -> Key:
    """Return the key of a client's folder, also while a client uses the folder.

    Creates the folder and the key if there is none. Raises StateError for a folder that cannot be a
    client's, and ValueError and RunFolderWriteError as `Key.load_or_create`.
    """
    if (folder / KEY).exists():
        return Key.load_or_create(folder / KEY)
    with ClientState(folder) as state:
        return Key.load_or_create(state.key)


def _locked(folder: Path) -> int:
    """Lock a folder and return the open descriptor."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The folder has a private key, and models trained on private data.
        folder.chmod(0o700)
        return lock(folder / "lock")
    except BlockingIOError as error:
        raise StateError(
            f"{folder} is in use by another process: give each client its own --state folder"
        ) from error
    except OSError as error:
        raise StateError(f"{folder} cannot be the folder of a client: {error.strerror}") from error


def _who(about: FolderOwner) -> str:
    return f"client {about.client} ({about.name}) of run {about.run}"


def _sync(path: Path) -> None:
    with open(path, "rb") as content:
        os.fsync(content.fileno())


def _check(path: Path, digest: str) -> None:
    """Compare a file with its digest. Raises StateError if they differ."""
    try:
        found = sha256_of(path)
    except OSError as error:
        raise _damaged(path, str(error)) from error
    if found != digest:
        raise _damaged(path, "its digest does not match its content")


def _damaged(path: Path, reason: str) -> StateError:
    return StateError(
        f"{path} is damaged: {reason}; restore it from a copy, or start with an empty folder"
    )


# Small files: {"checksum": of what follows, "kept": ...}

_Content = TypeVar("_Content")


def _write(path: Path, what: object) -> None:
    content = msgspec.json.encode(what)
    write_atomically(path, _BEGIN + checksum(content).encode() + _MIDDLE + content + b"}")


def _read(path: Path, kind: type[_Content]) -> _Content | None:
    """Return the decoded content; None without the file. Raises StateError if it is damaged."""
    try:
        written = contents(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _damaged(path, str(error)) from error
    head = len(_BEGIN) + 8 + len(_MIDDLE)
    content = written[head:-1]
    if written != _BEGIN + checksum(content).encode() + _MIDDLE + content + b"}":
        raise _damaged(path, "its checksum does not match its content")
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
