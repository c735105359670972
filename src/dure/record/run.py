"""A run: the trained model and what was measured; and its folder on disk (docs/run-folder.md)."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from torch import Tensor, nn

from dure.errors import RunFolderError
from dure.record.checkpoint import (
    check_version,
    read_checkpoint,
    save_checkpoint,
    unpack_checkpoint,
    write_atomically,
)
from dure.record.history import History, Record
from dure.record.trace import Lane, write_trace
from dure.record.weights import weights_from_bytes, weights_to_bytes
from dure.tensors.buffers import load_weights

_MAY_CHANGE = ("world", "label", "versions")
"""What config.json may say otherwise when a run goes on.

How many ranks there are follows from which are left, and the world and the label say it.
"""


MOMENT = 2.0
"""Seconds in which the ranks of a process that was killed have noticed it."""


class RunFolder:
    """The folder of one run. `flush_seconds`: how long a line of the history may wait in memory."""

    def __init__(self, path: Path, flush_seconds: float = 0.2) -> None:
        self.path = path
        self._flush_seconds = flush_seconds
        self._file: IO[bytes] | None = None
        self._waiting: list[bytes] = []
        self._flushed = 0.0
        self._lock: int | None = None

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> RunFolder:
        """A new folder with its config.json.

        Raises RunFolderError if there is something in it already.
        """
        # An empty folder will do: the command line makes it before anything else.
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunFolderError(
                f"the run folder {path} is not empty: choose another with --out, or go on with "
                f"--resume {path}"
            )
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.write_json("config.json", config)
        except OSError as error:
            raise RunFolderError(f"cannot make the run folder {path}: {error.strerror}") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run. Raises RunFolderError if there is none."""
        if not (path / "config.json").is_file():
            raise RunFolderError(f"{path} is not a run folder: it has no config.json")
        return cls(path)

    @classmethod
    def enter(cls, path: Path, config: Mapping[str, Any]) -> RunFolder:
        """The folder of this very run: a new one, or one in which it was begun.

        Perhaps another number of ranks began it. Raises RunFolderError if something else is in it.
        """
        if not (path / "config.json").is_file():
            return cls.create(path, config)
        folder = cls(path)
        begun = folder.read_json("config.json")
        # As it would be read again: a tuple, for one, comes back as a list.
        asked = json.loads(json.dumps(config))
        other = [key for key in asked if key not in _MAY_CHANGE and begun.get(key) != asked[key]]
        if other:
            raise RunFolderError(
                f"{path} holds another run, which differs in {', '.join(other)}: choose another "
                f"folder with --out"
            )
        folder.write_json("config.json", config)
        # A summary says that the run has ended, which is no longer so.
        (path / "summary.json").unlink(missing_ok=True)
        return folder

    def hold(self) -> None:
        """Keeps other processes from going on with this run, until `close` or the end of this one.

        Other processes of this machine, that is. Raises RunFolderError if one of them still holds
        it after `MOMENT`, which the ranks of a process that was killed just now may take to notice.
        Where the file system has no locks, nobody is kept off.
        """
        # A lock on the folder itself leaves no lock file behind. The kernel takes it back when the
        # process ends, however it ends.
        descriptor = os.open(self.path, os.O_RDONLY)
        until = time.monotonic() + MOMENT
        try:
            while not _locked(descriptor):
                if time.monotonic() > until:
                    raise RunFolderError(
                        f"another process is training in {self.path}: wait until it has ended, or "
                        f"end it"
                    )
                time.sleep(0.01)
        except BaseException:
            os.close(descriptor)
            raise
        self._lock = descriptor
        _HELD.add(descriptor)

    def begin_again(self, config: Mapping[str, Any], oldest_checkpoint: int = 1) -> None:
        """Before a run that was interrupted, or has ended, goes on.

        Raises RunFolderError, and changes nothing, while somebody holds it or if its checkpoint or
        history is damaged, or the checkpoint of an older version than `oldest_checkpoint`.
        """
        self.hold()
        try:
            # Both are read before anything is changed: damage is told while all is as it was.
            self.history()
            self._check_checkpoint(oldest_checkpoint)
            self.write_json("config.json", config)
            (self.path / "summary.json").unlink(missing_ok=True)
        finally:
            self.close()

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a file of the folder, at once or not at all."""
        write_atomically(self.path / name, (json.dumps(content, indent=1) + "\n").encode())

    def read_json(self, name: str) -> dict[str, Any]:
        """Raises RunFolderError if the file is missing or damaged."""
        try:
            content = json.loads((self.path / name).read_bytes())
        except (OSError, ValueError) as error:
            raise RunFolderError(f"cannot read {self.path / name}: {error}") from error
        if not isinstance(content, dict):
            raise RunFolderError(f"{self.path / name} is damaged: it holds no JSON object")
        return content

    def append(self, record: Record) -> None:
        """Adds a line to history.jsonl; it is on disk within `flush_seconds` of the next append."""
        # Encoded at once, so that nothing changes in it while it waits.
        self._waiting.append(History.encode(record))
        if time.monotonic() - self._flushed > self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Writes the lines of the history that wait in memory."""
        if self._file is None:
            # Unbuffered, one write a flush: a kill cuts off no more than the end.
            self._file = open(self.path / "history.jsonl", "ab", buffering=0)  # noqa: SIM115, closed in close()
        if self._waiting:
            self._file.write(b"".join(self._waiting))
        self._waiting.clear()
        self._flushed = time.monotonic()

    def history(self) -> History:
        """What history.jsonl holds; nothing if there is no such file.

        Raises RunFolderError if it is damaged.
        """
        path = self.path / "history.jsonl"
        try:
            return History.decode(path.read_bytes()) if path.exists() else History()
        except (OSError, ValueError) as error:
            raise RunFolderError(f"cannot read {path}: {error}") from error

    def rewrite_history(self, history: History) -> None:
        """Replaces history.jsonl, when a resumed run takes back what came after its checkpoint."""
        # Before the first append of this process: an open file would be the replaced one.
        write_atomically(self.path / "history.jsonl", history.encoded())

    def save_checkpoint(self, step: int, parts: tuple[bytes, bytes, bytes]) -> None:
        """Writes the checkpoint of `step`, whose files are `parts`, and removes the older ones."""
        # The history first: whoever resumes finds in it all steps up to the checkpoint.
        self.flush()
        save_checkpoint(self.path / "checkpoint", step, parts)

    def read_checkpoint(self) -> tuple[bytes, bytes, bytes] | None:
        """The files of the newest checkpoint; None if there is none."""
        return read_checkpoint(self.path / "checkpoint")

    def _check_checkpoint(self, oldest: int) -> None:
        parts = self.read_checkpoint()
        if parts is None:
            return
        try:
            # Read whole and thrown away: damage is to show before a rank is started.
            _, state = unpack_checkpoint(parts)
        except (SafetensorError, ValueError, LookupError, TypeError) as error:
            raise RunFolderError(
                f"the newest checkpoint in {self.path / 'checkpoint'} is damaged "
                f"({type(error).__name__}: {error}): "
                "put back a copy of it, or remove it to train from the start"
            ) from error
        check_version(state, f"the newest checkpoint in {self.path / 'checkpoint'}", oldest)

    def finish(
        self, weights: Mapping[str, Tensor], summary: Mapping[str, Any], lanes: list[Lane]
    ) -> None:
        """Writes what an ended run leaves: weights, summary, timeline."""
        self.flush()
        write_atomically(self.path / "model.safetensors", weights_to_bytes(weights))
        write_trace(self.path / "trace.json", lanes, str(summary["label"]))
        # Last: where there is a summary, everything else is there too.
        self.write_json("summary.json", summary)
        self.close()

    def close(self) -> None:
        """Writes what waits, and lets others go on with the run."""
        try:
            if self._file is not None or self._waiting:
                self.flush()
            if self._file is not None:
                self._file.close()
                self._file = None
        finally:
            if self._lock is not None:
                # Out of the set before it is closed: its number may be another file's right after.
                _HELD.discard(self._lock)
                os.close(self._lock)
                self._lock = None


_HELD: set[int] = set()
"""Descriptors of the folders that this process holds.

A child that is forked closes them: it may live longer.
"""


def _locked(descriptor: int) -> bool:
    """Whether the folder is now this process's, or can be nobody's."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Somebody else has it. Any other error: the file system knows no locks.
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _let_go() -> None:
    # A lock belongs to the open folder, which a forked child shares: it lasts until both close it.
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_let_go)


@dataclass(frozen=True)
class Run:
    """A Task under a Strategy in a World, done.

    model: the trained model. history: every step and evaluation. summary: the result in one
    mapping. folder: where it all lies, None if the run was not given `out`.
    """

    model: nn.Module
    history: History
    summary: dict[str, Any]
    folder: Path | None = None

    @property
    def label(self) -> str:
        """What tables call the run."""
        return str(self.summary["label"])


def load_run(path: str | Path, model: Callable[[], nn.Module]) -> Run:
    """The ended run in a folder.

    model: the task's factory, whose weights are then replaced by the trained ones.

    Raises RunFolderError if there is no ended run, or its weights are not those of this model.
    """
    folder = RunFolder.open(Path(path))
    summary = folder.read_json("summary.json")
    # The factory draws its first weights from the caller's generators; they are replaced.
    network = model()
    weights = folder.path / "model.safetensors"
    try:
        load_weights(network, weights_from_bytes(weights.read_bytes()))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise RunFolderError(f"cannot load {weights} into this model: {error}") from error
    return Run(network, folder.history(), summary, folder.path)
