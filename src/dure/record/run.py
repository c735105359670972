"""A run: the trained model and its measurements; and its folder on disk (docs/run-folder.md)."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dure.arguments import check_path
from dure.errors import RunFolderError, RunFolderWriteError, described
from dure.record.best import best_weights
from dure.record.checkpoint import (
    UNREADABLE,
    CheckpointContents,
    StoredCheckpoint,
    check_version,
    reseal,
    save_checkpoint,
    stored,
)
from dure.record.checkpoint_files import damaged
from dure.record.disk import (
    ChecksummedPieces,
    LineFile,
    disk_errors,
    retry_write,
    sync_folder,
    truncate_file,
    write_atomically,
)
from dure.record.disk_tensors import DiskTensors, Leaf, in_memory
from dure.record.history import History, Record, is_spread
from dure.record.hugging_face_folder import withdraw_configs
from dure.record.lock import Lock
from dure.record.run_files import check_config, check_run, read_config, read_json
from dure.record.seal import Seal, checksum, checksum_of, sha256
from dure.record.settings import (
    edited,
    other_run,
    settings,
    with_sums,
    without_sums,
)
from dure.record.trace import Lane, write_trace
from dure.record.untrusted_files import LARGE, contents
from dure.record.weights import TensorFile, tensors_in
from dure.tensors.buffers import load_weights
from dure.tensors.compiled import unwrap_compiled
from dure.tensors.writable import make_writable

_MAY_CHANGE = ("world", "label", "versions", "run")
"""Keys of config.json that may differ when an elastic run continues.

The number of ranks depends on the remaining ranks, and is part of the world and the label.
"""


PATIENCE = 30.0
"""Seconds for which lines of the history wait in memory while the disk rejects them."""


class RunFolder:
    """The folder of a run. `flush_seconds`: longest time that history lines wait in memory."""

    def __init__(self, path: Path, flush_seconds: float = 0.2) -> None:
        self.path = path
        self._flush_seconds = flush_seconds
        self._lines: LineFile | None = None
        self._waiting: list[bytes] = []
        self._flushed = 0.0
        self._stuck: float | None = None
        self._lock: Lock | None = None
        self._newest: StoredCheckpoint | None = None
        self._config: dict[str, Any] | None = None

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> RunFolder:
        """Make a new folder with its config.json.

        Raises RunFolderError if the folder is not empty.
        """
        folder = cls(path)
        folder._refuse_if_used()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"cannot create the run folder {path}: {error.strerror}"
            ) from error
        sync_folder(path.parent)
        folder.hold()
        try:
            # Again: another process may have made it meanwhile.
            folder._refuse_if_used()
            folder._write_config(config)
        finally:
            folder.close()
        return folder

    def _write_config(self, config: Mapping[str, Any]) -> None:
        self.write_json("config.json", with_sums(config))

    def _refuse_if_used(self) -> None:
        # An empty folder is fine: the command line makes it before anything else.
        path = self.path
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is a file, not a folder: choose another with --out")
        if path.exists() and any(path.iterdir()):
            raise RunFolderError(
                f"the run folder {path} is not empty: choose another with --out, or resume it "
                f"with --resume {path}"
            )

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return the folder of an existing run. Raises RunFolderError if there is none."""
        check_run(path)
        return cls(path)

    @classmethod
    def enter(cls, path: Path, config: Mapping[str, Any], oldest_checkpoint: int = 1) -> RunFolder:
        """Return the folder of this very run: a new folder, or the folder in which it was begun.

        Another number of ranks may have begun it. Raises RunFolderError if the folder has another
        content, and as `begin_again` does.
        """
        if not (path / "config.json").is_file():
            return cls.create(path, config)
        folder = cls(path)
        folder.begin_again(config, oldest_checkpoint, named_again=("world",), entered=True)
        return folder

    def _check_same(self, begun: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Raise RunFolderError if the folder has another run than this."""
        # Through JSON once, as it would be read: a tuple, for example, becomes a list.
        asked = json.loads(json.dumps(config))
        other = [key for key in asked if key not in _MAY_CHANGE and begun.get(key) != asked[key]]
        if other:
            raise RunFolderError(
                f"{self.path} contains another run, which differs in {', '.join(other)}: choose "
                "another folder with --out"
            )

    def hold(self) -> None:
        """Lock the run against other processes, until `close` or the end of this process.

        The lock applies to processes of this machine. Raises RunFolderError if a process still has
        the lock after a moment, which the ranks of a killed process may take to notice. On a file
        system without locks, other processes are not kept out.
        """
        # A lock on the folder itself leaves no lock file behind.
        self._lock = Lock.take(
            self.path,
            f"another process is training in {self.path}: wait until it has ended, or end it",
        )

    def begin_again(
        self,
        config: Mapping[str, Any],
        oldest_checkpoint: int = 1,
        *,
        named_again: Collection[str] = (),
        moves: Collection[str] = (),
        model: Mapping[str, Tensor] | None = None,
        entered: bool = False,
    ) -> None:
        """Prepare the folder for resuming an interrupted or ended run.

        Args:
            config: new content of config.json.
            oldest_checkpoint: first readable version of checkpoints.
            named_again: settings, or parts such as "world", that the user has given again instead
                of relying on config.json.
            moves: fields of the strategy that may differ in a resumed run.
            model: a state_dict of the model to train, for a check of shapes.
            entered: require config.json to equal `config`, except for the ranks.

        Raises:
            RunFolderError: without any change, if another process has the lock; if the checkpoint
                or history is damaged; or if the checkpoint is of another run, of other settings
                than those in config.json now, or older than `oldest_checkpoint`.
        """
        self.hold()
        try:
            written = self.read_json("config.json")
            begun = without_sums(written)
            if entered:
                self._check_same(begun, config)
            # Everything is read before any change: damage is reported with the folder intact.
            checkpoint = self._checked(oldest_checkpoint)
            # With a seal, `_check_settings` detects changes.
            if checkpoint is None or checkpoint.seal is None:
                check_config(self.path, written)
            if checkpoint is not None:
                self._check_settings(checkpoint, begun, config, named_again, moves)
                _check_shapes(checkpoint, model or {})
                # Read only for the check: the rank that resumes reads it again.
                self._history_of(checkpoint)
                if checkpoint.seal is None:
                    warnings.warn(
                        f"{checkpoint.path} has no checksums, because an older dure wrote it: "
                        "some damage would not be detected",
                        stacklevel=3,
                    )
            config = {**config, **({"run": begun["run"]} if "run" in begun else {})}
            if checkpoint is not None and checkpoint.seal is not None:
                asked = settings(json.loads(json.dumps(config)))
                # The checkpoint first: a kill in between must not make config.json look edited.
                if checkpoint.seal.config != asked:
                    reseal(checkpoint, asked)
            self._write_config(config)
            with disk_errors(self.path / "summary.json"):
                # A summary says that the run has ended, which is no longer true.
                (self.path / "summary.json").unlink(missing_ok=True)
                withdraw_configs(self.path)
        finally:
            self.close()

    def _checked(self, oldest: int) -> StoredCheckpoint | None:
        """Return the newest checkpoint, if it is complete; None without a checkpoint."""
        checkpoint = stored(self.path / "checkpoint")
        if checkpoint is None:
            return None
        state = _state_of(checkpoint)
        check_version(state, f"the checkpoint {checkpoint.path}", oldest)
        _check_step(checkpoint, state)
        return checkpoint

    def _check_settings(
        self,
        checkpoint: StoredCheckpoint,
        begun: Mapping[str, Any],
        config: Mapping[str, Any],
        named_again: Collection[str],
        moves: Collection[str],
    ) -> None:
        """Raise RunFolderError if the checkpoint is of another run, or of other settings.

        begun: content of config.json. config: its new content.
        """
        file = self.path / "config.json"
        seal = checkpoint.seal
        before = settings(begun)
        if seal is not None:
            before = seal.config
            if seal.run != begun.get("run", ""):
                raise RunFolderError(
                    f"{checkpoint.path} belongs to another run than {file}: restore the "
                    "checkpoint of this run, or remove it to train from the start"
                )
            differs = edited(before, settings(begun), named_again)
            if differs:
                raise RunFolderError(
                    f"{file} has changed since {checkpoint.path} was written "
                    f"({'; '.join(differs)}): restore it, or start a new run"
                )
        differs = other_run(before, settings(json.loads(json.dumps(config))), moves)
        if differs:
            raise RunFolderError(
                f"the settings differ from those of the run in {self.path} "
                f"({'; '.join(differs)}): give the same settings, or start a new run"
            )

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder, atomically."""
        write_atomically(self.path / name, (json.dumps(content, indent=1) + "\n").encode())

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON file's content. Raises RunFolderError if it is missing or damaged."""
        return read_json(self.path / name)

    def config(self, whole: bool = False) -> dict[str, Any]:
        """Return the content of config.json, as `read_config` does."""
        return read_config(self.path, whole)

    def append(self, record: Record) -> None:
        """Add a line to history.jsonl; the first append after `flush_seconds` writes it."""
        # Encoded at once, so that later changes of the record do not matter.
        self._waiting.append(History.encode(record))
        if time.monotonic() - self._flushed > self._flush_seconds:
            self.flush(patient=True)

    def flush(self, patient: bool = False) -> None:
        """Write the history lines that wait in memory.

        patient: while the disk is full, the lines may wait up to `PATIENCE` seconds. Raises
        RunFolderWriteError.
        """
        if self._lines is None:
            self._lines = LineFile(self.path / "history.jsonl")
        lines = self._lines
        content = b"".join(self._waiting)
        self._waiting.clear()
        self._flushed = time.monotonic()
        try:
            lines.add(content)
            self._stuck = None
        except RunFolderWriteError:
            self._stuck = self._flushed if self._stuck is None else self._stuck
            if not patient:
                retry_write(lambda: lines.add(b""))
            elif self._flushed - self._stuck > PATIENCE:
                raise

    def history(self) -> History:
        """Return the content of history.jsonl; an empty history if the file is missing.

        Raises RunFolderError if the file is damaged.
        """
        path = self.path / "history.jsonl"
        try:
            return History.decode(contents(path, most=LARGE)) if path.exists() else History()
        except (OSError, ValueError, RecursionError) as error:
            raise RunFolderError(f"cannot read {path}: {error}") from error

    def take_back(self) -> History:
        """Remove the lines of history.jsonl after the checkpoint that was read; all without one.

        Returns the remaining history. Raises RunFolderError if lines are missing, or have changed
        since the checkpoint was written.
        """
        path = self.path / "history.jsonl"
        if self._newest is None:
            history = History()
            if path.exists():
                self.rewrite_history(history)
            return history
        history = self._history_of(self._newest)
        seal = self._newest.seal
        if seal is None:
            self.rewrite_history(history)
        elif path.exists():
            truncate_file(path, seal.history[0])
        return history

    def _history_of(self, checkpoint: StoredCheckpoint) -> History:
        """Return the history up to a checkpoint, verified against its seal."""
        path = self.path / "history.jsonl"
        try:
            text = contents(path, most=LARGE) if path.exists() else b""
        except OSError as error:
            raise RunFolderError(f"cannot read {path}: {error.strerror}") from error
        if checkpoint.seal is not None:
            length, expected = checkpoint.seal.history
            text = text[:length]
            same = len(text) == length and checksum(text) == expected
        history = History.decode_until(text, checkpoint.step)
        if checkpoint.seal is None:
            # Without a seal, the check is that every step has a line.
            steps = [step.step for step in history.steps]
            same = steps == list(range(1, checkpoint.step + 1))
        if not same:
            raise RunFolderError(
                f"{path} does not contain the lines that it had when {checkpoint.path} was "
                "written: restore it from a copy, or remove the checkpoint to train from the "
                "start"
            )
        return history

    def rewrite_history(self, history: History) -> None:
        """Replace history.jsonl, when a resumed run removes the lines after its checkpoint."""
        # Before the first append of this process: an open file would be the replaced file.
        write_atomically(self.path / "history.jsonl", history.encoded())

    def save_checkpoint(self, step: int, contents: CheckpointContents, past: int = 0) -> None:
        """Write the checkpoint of `step`, and remove the older checkpoints of this run.

        past: progress within the next step (`name_of`). Raises RunFolderWriteError.
        """
        # The history first, so that it has all steps up to the checkpoint.
        self.flush()
        assert self._lines is not None
        self._lines.sync()
        config = self._asked()
        seal = Seal(
            run=str(config.get("run", "")),
            config=settings(config),
            history=(self._lines.length, self._lines.checksum),
        )
        known = () if self._newest is None else (self._newest.path.name,)
        folder = self.path / "checkpoint"
        retry_write(lambda: save_checkpoint(folder, step, contents, seal, known, past))

    def _asked(self) -> dict[str, Any]:
        """Return the content of config.json, read once: the lock excludes changes."""
        if self._config is None:
            there = (self.path / "config.json").is_file()
            self._config = without_sums(self.read_json("config.json")) if there else {}
        return self._config

    @property
    def unsealed(self) -> bool:
        """Whether the checkpoint that was read has no checksums, which would reveal damage."""
        return self._newest is not None and self._newest.seal is None

    def read_checkpoint(self) -> StoredCheckpoint | None:
        """Return the newest checkpoint, with tensors still in its files; None if there is none."""
        newest = stored(self.path / "checkpoint")
        if newest is not None:
            # Without its tensors, which would keep the files open.
            self._newest = dataclasses.replace(newest, weights={}, tensors={}, state=b"")
        return newest

    def finish(
        self,
        weights: Mapping[str, Leaf],
        summary: Mapping[str, Any],
        lanes: list[Lane],
        metadata: Mapping[str, str] | None = None,
        beside: Mapping[str, Callable[[str], Mapping[str, Any]]] | None = None,
    ) -> dict[str, Any]:
        """Write the files of an ended run: weights, summary, timeline. Return the summary.

        Args:
            weights: trained weights.
            summary: content of summary.json, to which the checksum of the weights is added.
            lanes: timelines.
            metadata: metadata of the file of weights.
            beside: further JSON files by name, each made from the SHA-256 of the file of weights.

        Raises:
            RunFolderWriteError: if a file cannot be written.
        """
        self.flush()
        model = TensorFile(weights, metadata)
        pieces = ChecksummedPieces(model)
        write_atomically(self.path / "model.safetensors", pieces)
        for name, made in (beside or {}).items():
            self.write_json(name, made(sha256(model)))
        write_trace(self.path / "trace.json", lanes, str(summary["label"]))
        # Written last: a summary means that all other files are complete.
        written = {**summary, "model_checksum": pieces.checksum}
        self.write_json("summary.json", written)
        self.close()
        return written

    def close(self) -> None:
        """Write the waiting lines, and release the lock."""
        try:
            if self._lines is not None or self._waiting:
                self.flush()
        finally:
            if self._lines is not None:
                self._lines.close()
                self._lines = None
            if self._lock is not None:
                self._lock.release()
                self._lock = None


def _state_of(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Return the state. Raises RunFolderError for a malformed checkpoint."""
    try:
        # Parsed only for the check, so that damage shows before a rank is started.
        state = checkpoint.tree
    except UNREADABLE as error:
        raise damaged(checkpoint.path, described(error)) from error
    if not isinstance(state, dict):
        raise damaged(checkpoint.path, "its state is not a mapping")
    return state


def _check_step(checkpoint: StoredCheckpoint, state: Mapping[str, Any]) -> None:
    position = state.get("position")
    step = position.get("step") if isinstance(position, Mapping) else None
    if step != checkpoint.step:
        raise damaged(checkpoint.path, f"it contains step {step}")


def _check_shapes(checkpoint: StoredCheckpoint, model: Mapping[str, Tensor]) -> None:
    """Raise RunFolderError for weights of another shape or dtype than the model's."""
    for name, weight in checkpoint.weights.items():
        mine = model.get(name)
        if mine is not None and (mine.shape, mine.dtype) != (weight.shape, weight.dtype):
            raise damaged(
                checkpoint.path,
                f"{name} is {weight.dtype} of {tuple(weight.shape)} in model.safetensors, but "
                f"{mine.dtype} of {tuple(mine.shape)} in the model",
            )


@dataclass(frozen=True, repr=False)
class Run:
    """An ended run: a Task under a Strategy in a World.

    model: the trained model. history: every step and evaluation. summary: the result as a mapping.
    folder: the run folder, None if the run was not given `out`. best_weights: weights of the best
    model, if no folder has them.
    """

    model: nn.Module
    history: History
    summary: dict[str, Any]
    folder: Path | None = None
    best_weights: Mapping[str, Leaf] | None = field(default=None, repr=False)

    @cached_property
    def best_model(self) -> nn.Module | None:
        """The model of the best evaluation on the validation set; None without a best model.

        A copy of `model` with the best weights, made on first access. Raises RunFolderError if
        best.safetensors is damaged.
        """
        weights = self.best_weights
        if weights is None and self.folder is not None:
            weights = best_weights(self.folder)
        if weights is None:
            return None
        twin = copy.deepcopy(self.model)
        try:
            tensors = {name: in_memory(one) for name, one in weights.items()}
            load_weights(twin, tensors, self.summary.get("weights_elsewhere", ()))
        except (OSError, RuntimeError, *UNREADABLE) as error:
            raise RunFolderError(f"cannot load the best model: {described(error)}") from error
        return twin

    def __repr__(self) -> str:
        """Return label, progress, metrics and folder in a line."""
        told = [repr(self.label), f"{self.summary['steps']} {self.summary['unit']}s"]
        metrics = [name for name in self.summary["best"] if not is_spread(name)]
        for name in metrics:
            value = self.summary.get(name)
            told += [] if value is None else [f"{name}={value:.4g}"]
        told.append(f"ended={self.summary['ended']!r}")
        told += [] if self.folder is None else [f"folder={str(self.folder)!r}"]
        return f"Run({', '.join(told)})"

    @property
    def label(self) -> str:
        """Name of the run in tables."""
        return str(self.summary["label"])

    @property
    def lineage(self) -> dict[str, Any] | None:
        """Signed lineage of the model of a served run (`dure.run.lineage`); else None."""
        return self.summary.get("lineage")


def trained_weights(folder: Path, summary: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return the weights of an ended run, each read on access. summary: content of summary.json.

    Raises RunFolderError if they are missing or damaged.
    """
    path = folder / "model.safetensors"
    try:
        found = checksum_of(path)
        # Older runs have no checksum.
        if summary.get("model_checksum", found) != found:
            raise RunFolderError(
                f"{path} is damaged: its checksum differs from the one in summary.json: restore "
                "it from a copy, or resume the run to write it again"
            )
        return DiskTensors(tensors_in(path))
    except (OSError, *UNREADABLE) as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error


def load_run(path: str | Path, model: Callable[[], nn.Module]) -> Run:
    """Load the ended run in a folder.

    path: of the folder. model: the task's factory; the trained weights replace those of its model.
    Raises RunFolderError if there is no ended run, or its weights do not fit the model.
    """
    check_path("path", path)
    folder = RunFolder.open(Path(path))
    summary = folder.read_json("summary.json")
    # The factory draws initial weights from the caller's generators; they are overwritten.
    network = unwrap_compiled(model())
    make_writable(network)
    weights = folder.path / "model.safetensors"
    trained = trained_weights(folder.path, summary)
    try:
        load_weights(network, trained, summary.get("weights_elsewhere", ()))
    except (OSError, RuntimeError, *UNREADABLE) as error:
        raise RunFolderError(f"cannot load {weights} into this model: {error}") from error
    return Run(network, folder.history(), summary, folder.path)
