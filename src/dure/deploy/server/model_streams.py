"""Streams of models for clients, and updates from their files.

All assignments of a model share its tensors. The stream, its digest and the form of the answer are
therefore computed once per model, and the cache has the stream as long as a client may fetch it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dure.deploy.server.blob_cache import BlobCache
from dure.deploy.server.outbox import ClientOutbox
from dure.deploy.updates import Updates
from dure.protocol.carrier import CoordinatorProtocol
from dure.protocol.messages import Assignment, Update
from dure.wire.layout import FederationSpec
from dure.wire.requests import EvaluationTask, UploadRequest
from dure.wire.tensors import TensorsError, TensorSpec, digest_of


class AssignmentStream(NamedTuple):
    """Stream of an assignment. `forms` has the dtypes and shapes of the expected update."""

    digest: str
    size: int
    forms: dict[str, TensorSpec]


class ModelStreams:
    """Transfer of tensors from the coordinator to the cache, and from the files of updates."""

    def __init__(
        self, federation: FederationSpec, outbox: ClientOutbox, cache: BlobCache, files: Updates
    ) -> None:
        self._layout = federation.layout
        self._federation = federation
        self._outbox = outbox
        self._cache = cache
        self._files = files
        self._known: dict[int, tuple[Sequence[Tensor], AssignmentStream]] = {}
        """Streams by the identity of a model's weights, which are referenced as long."""
        self._measured: str | None = None

    def sent(self, coordinator: CoordinatorProtocol, asked: Assignment) -> AssignmentStream:
        """Return the stream of an assignment, which the cache has from now on."""
        known = self._known.get(id(asked.weights))
        if known is None or known[0] is not asked.weights:
            digest, size = self._put(asked.weights, asked.buffers, asked.extra)
            known = (
                asked.weights,
                AssignmentStream(digest, size, self._expected(coordinator, asked)),
            )
            self._known[id(asked.weights)] = known
        return known[1]

    def _expected(
        self, coordinator: CoordinatorProtocol, asked: Assignment
    ) -> dict[str, TensorSpec]:
        """Return the dtypes and shapes of an assignment's update."""
        extra = coordinator.expects(asked)
        return self._layout.forms(asked.weights, asked.buffers, extra)

    def measured(
        self, round: int, weights: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> EvaluationTask:
        """Put a model into the cache for clients to evaluate or store; drop the previous model."""
        digest, size = self._put(weights, buffers, ())
        self._measured = digest
        return EvaluationTask(round, digest, size)

    def digest(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> str:
        """Return the SHA-256 of a model's stream, as `measured` would send it."""
        return digest_of(self._layout.named(weights, buffers, ()))

    def _put(
        self, weights: Sequence[Tensor], buffers: Sequence[Tensor], extra: Sequence[Tensor]
    ) -> tuple[str, int]:
        self.forget_unwanted()
        stream = self._cache.put(self._layout.named(weights, buffers, extra))
        return stream.digest, stream.size

    def forget_unwanted(self) -> None:
        """Drop models from the cache that no client may fetch any more."""
        wanted = {session.train.tensors for session in self._outbox.everybody() if session.train}
        if self._measured is not None:
            wanted.add(self._measured)
        self._cache.keep_only(wanted)
        self._known = {key: one for key, one in self._known.items() if one[1].digest in wanted}

    def update(
        self, said: UploadRequest, asked: Assignment, coordinator: CoordinatorProtocol
    ) -> Update:
        """Read an update from its file; an update with other tensors becomes a failure."""
        weights: list[Tensor] = []
        buffers: list[Tensor] = []
        extra: list[Tensor] = []
        failure = said.failure
        if failure is None:
            try:
                expected = self._expected(coordinator, asked)
                tensors = self._files.read(said.ticket, expected, said.digest)
                weights, buffers, extra = self._layout.apart(tensors)
            # The digest matches, so these are the bytes that the client has sent.
            except TensorsError as error:
                failure = f"it is not an update of this model: {error}"
        return Update(
            ticket=said.ticket,
            client=asked.client,
            round=asked.round,
            examples=said.examples,
            samples=said.samples,
            loss=said.loss,
            delta=weights,
            buffers=buffers,
            extra=extra,
            counted=said.counted,
            failure=failure,  # type: ignore[arg-type]
            # A client that does not report its steps is assumed to have made the assigned steps.
            steps=said.steps or self._steps_of(said),
        )

    def _steps_of(self, said: UploadRequest) -> int:
        """Return the steps assigned to a client, at most its samples."""
        return max(1, min(self._federation.steps(max(said.examples, 1)), said.samples))
