"""Updates of a simulation, recorded for attacks: the server's view, and separately the truth.

    RUN/updates/model-00003.safetensors      weights and buffers sent to the clients of round 3
    RUN/updates/update-000041.safetensors    the client's update for assignment (ticket) 41
    RUN/updates/update-000041.json           the client, and the server's other knowledge of it
    RUN/updates/truth-000041.json            the examples of each of its steps, and nothing else

The first three files contain the view of a server that follows the protocol and stores all
messages. The truth serves comparisons, and no attack reads it. Deployments store none of this.

Cost: the bytes of a model for each round and of an update for each client, up to `MOST_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec.structs import replace
from safetensors import SafetensorError
from torch import Tensor

from dure.errors import RunFolderError, warn
from dure.protocol.carrier import ClientOrder
from dure.protocol.messages import Update
from dure.record.disk import write_atomically
from dure.record.seal import checksum, sha256, sha256_of
from dure.record.untrusted_files import LARGE, contents
from dure.record.weights import TensorFile, weights_from_bytes

UPDATES = "updates"
"""Name of the folder in a run folder."""

MOST_BYTES = 2**30
"""Largest number of bytes of tensors to record in a run; later updates are not recorded."""


class UpdateMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server's knowledge of an update besides its tensors.

    Args:
        ticket: assignment id.
        client: client number.
        round: round of the assignment.
        examples: n_k, the client's examples.
        samples: processed examples, over all epochs.
        steps: steps of local training.
        loss: the client's training loss.
        batch_size: examples in a step; None for all examples.
    """

    ticket: int
    client: int
    round: int
    examples: int
    samples: int
    steps: int
    loss: float
    batch_size: int | None = None
    files: dict[str, str] = {}
    """SHA-256 of the other files of the update, by name."""
    checksum: str | None = None
    """CRC-32 of all other fields. Recordings of dure up to 0.1 have neither `files` nor a checksum.
    A misspelled `checksum` is an unknown field, and not an old recording.
    """

    def sealed(self) -> UpdateMetadata:
        """Return a copy with the checksum of its fields."""
        plain = replace(self, checksum=None)
        return replace(plain, checksum=checksum(msgspec.json.encode(plain)))


_Place = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Index of an example; 2**53 is far above the size of any data set."""


class GroundTruth(msgspec.Struct, frozen=True):
    """Indices of the examples of each step, in the task's training data."""

    steps: list[list[_Place]]

    @property
    def examples(self) -> list[int]:
        """Indices of all steps without duplicates, ascending."""
        return sorted({index for step in self.steps for index in step})


class RecordedUpdate(NamedTuple):
    """Recorded update.

    Args:
        about: the server's knowledge of the update.
        weights: flat weights sent to the client.
        buffers: buffers sent to the client.
        delta: flat change of the weights, from the client.
        truth: examples of the client's steps.
        buffers_after: buffers from the client; empty if the client sends none.
    """

    about: UpdateMetadata
    weights: Sequence[Tensor]
    buffers: Sequence[Tensor]
    delta: Sequence[Tensor]
    truth: GroundTruth
    buffers_after: Sequence[Tensor] = ()


class UpdateRecorder:
    """Recorder that writes updates to files. Records the first `rounds` rounds."""

    def __init__(self, folder: Path, rounds: int, batch_size: int | None) -> None:
        self.folder = folder
        self.rounds = rounds
        self.batch_size = batch_size
        self.written = 0
        self._models: dict[int, str] = {}
        """SHA-256 of each round's written model."""
        self._full = False

    def __call__(self, order: ClientOrder, update: Update, steps: Sequence[Tensor]) -> None:
        asked = order.assignment
        if asked.round >= self.rounds or self._is_full(update):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if asked.round not in self._models:
            model = {"weight": asked.weights, "buffer": asked.buffers}
            self._models[asked.round] = self._write(_model(asked.round), model)
        sent = {"delta": update.delta, "buffer": update.buffers, "extra": update.extra}
        digest = self._write(_update(update.ticket), sent)
        truth = msgspec.json.encode(GroundTruth([step.tolist() for step in steps]))
        about = UpdateMetadata(
            ticket=update.ticket,
            client=update.client,
            round=update.round,
            examples=update.examples,
            samples=update.samples,
            steps=order.work.steps,
            loss=update.loss,
            batch_size=self.batch_size,
            files={
                _model(asked.round): self._models[asked.round],
                _update(update.ticket): digest,
                _truth(update.ticket): sha256([truth]),
            },
        )
        write_atomically(self.folder / _truth(update.ticket), truth)
        # This file is written last: its presence shows that the update is complete.
        write_atomically(self.folder / _about(update.ticket), msgspec.json.encode(about.sealed()))

    def _is_full(self, update: Update) -> bool:
        """Return whether the limit of bytes is reached; warns the first time."""
        if not self._full and self.written + update.nbytes > MOST_BYTES:
            self._full = True
            warn(
                f"{self.folder} has {self.written:,} bytes of updates: updates from round "
                f"{update.round} on are not stored"
            )
        return self._full

    def _write(self, name: str, groups: Mapping[str, Sequence[Tensor]]) -> str:
        """Write a file of tensors; returns its SHA-256."""
        tensors = {
            f"{kind}:{place}": tensor
            for kind, group in groups.items()
            for place, tensor in enumerate(group)
        }
        self.written += sum(tensor.nbytes for tensor in tensors.values())
        file = TensorFile(tensors)
        write_atomically(self.folder / name, file)
        return sha256(file)


def read_updates(run: Path) -> list[RecordedUpdate]:
    """Return the recorded updates of a run folder, by round, client and assignment.

    Raises RunFolderError if the folder has none, or a file is damaged.
    """
    folder = run / UPDATES
    found = sorted(folder.glob("update-*.json"))
    if not found:
        raise RunFolderError(
            f"{run} has no recorded updates: train the simulation with, for example, "
            "--keep-updates 5"
        )
    models: dict[int, Mapping[str, list[Tensor]]] = {}
    checked: set[tuple[str, str]] = set()
    updates = []
    for path in found:
        about = _about_in(path)
        # Many updates name the model of their round; each file is checked once.
        for name, digest in set(about.files.items()) - checked:
            _check(folder / name, digest)
            checked.add((name, digest))
        if about.round not in models:
            models[about.round] = _read(folder / _model(about.round), ("weight", "buffer"))
        sent = _read(folder / _update(about.ticket), ("delta", "buffer", "extra"))
        model = models[about.round]
        truth = _read_json(folder / _truth(about.ticket), GroundTruth)
        _check_alike(folder / _update(about.ticket), sent["delta"], model["weight"])
        updates.append(
            RecordedUpdate(
                about=about,
                weights=model["weight"],
                buffers=model["buffer"],
                delta=sent["delta"],
                truth=truth,
                buffers_after=sent["buffer"],
            )
        )
    return sorted(updates, key=lambda one: (one.about.round, one.about.client, one.about.ticket))


def _about_in(path: Path) -> UpdateMetadata:
    """Return the server's knowledge of an update from a file; raises RunFolderError if damaged."""
    about: UpdateMetadata = _read_json(path, UpdateMetadata)
    if about.checksum is not None:
        named = {_model(about.round), _update(about.ticket), _truth(about.ticket)}
        if (
            about.sealed() != about
            or path.name != _about(about.ticket)
            or set(about.files) != named
        ):
            raise RunFolderError(
                f"{path} is damaged: its checksum does not match its content: restore it from a "
                "copy"
            )
    return about


def _check(path: Path, digest: str) -> None:
    try:
        found = sha256_of(path)
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error
    if found != digest:
        raise RunFolderError(
            f"{path} is damaged: its SHA-256 differs from the recorded one: restore it from a copy"
        )


def _check_alike(path: Path, delta: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Check that a change fits the weights sent to the client; raises RunFolderError if not."""
    of = [one.numel() for one in weights]
    real = all(one.is_floating_point() or one.is_complex() for one in (*delta, *weights))
    if [one.numel() for one in delta] != of or not real:
        raise RunFolderError(f"{path} is damaged: it is not an update of the model that was sent")


def _read(path: Path, kinds: Sequence[str]) -> Mapping[str, list[Tensor]]:
    """Return the tensors of a file by their kind, in order."""
    try:
        tensors = weights_from_bytes(contents(path, most=LARGE))
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error
    return {kind: list(_numbered(tensors, kind)) for kind in kinds}


def _numbered(tensors: Mapping[str, Tensor], kind: str) -> Iterator[Tensor]:
    place = 0
    while f"{kind}:{place}" in tensors:
        yield tensors[f"{kind}:{place}"]
        place += 1


def _read_json(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(contents(path), type=kind)
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error


def _model(round: int) -> str:
    return f"model-{round:05}.safetensors"


def _update(ticket: int) -> str:
    return f"update-{ticket:06}.safetensors"


def _about(ticket: int) -> str:
    return f"update-{ticket:06}.json"


def _truth(ticket: int) -> str:
    return f"truth-{ticket:06}.json"
