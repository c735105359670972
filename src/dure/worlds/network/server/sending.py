"""What travels of models: an assignment as a stream that clients fetch, an update from its file.

All assignments of a model share its tensors. So what they come to (the stream, its digest, the
forms of the answer) is found once a model, and the stream lies on the shelf while somebody is to
fetch it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dure.protocol.carrier import Coordinator
from dure.protocol.messages import Assignment, Update
from dure.wire.layout import Federation
from dure.wire.requests import MeasureThis, Reserve
from dure.wire.tensors import Form, TensorsError, digest_of
from dure.worlds.network.server.desk import Desk
from dure.worlds.network.server.shelf import Shelf
from dure.worlds.network.updates import Updates


class Sent(NamedTuple):
    """What an assignment sends. forms: of the tensors that its answer has."""

    digest: str
    size: int
    forms: dict[str, Form]


class Sending:
    """Tensors between a coordinator and the shelf, and from the files of updates."""

    def __init__(self, federation: Federation, desk: Desk, shelf: Shelf, files: Updates) -> None:
        self._layout = federation.layout
        self._federation = federation
        self._desk = desk
        self._shelf = shelf
        self._files = files
        self._known: dict[int, tuple[Sequence[Tensor], Sent]] = {}
        """By the identity of a model's weights, which are held for as long."""
        self._measured: str | None = None

    def sent(self, coordinator: Coordinator, asked: Assignment) -> Sent:
        """What an assignment sends, which lies on the shelf from now on."""
        known = self._known.get(id(asked.weights))
        if known is None or known[0] is not asked.weights:
            digest, size = self._put(asked.weights, asked.buffers, asked.extra)
            known = asked.weights, Sent(digest, size, self._expected(coordinator, asked))
            self._known[id(asked.weights)] = known
        return known[1]

    def _expected(self, coordinator: Coordinator, asked: Assignment) -> dict[str, Form]:
        """What an assignment's update is like."""
        extra = coordinator.expects(asked)
        return self._layout.forms(asked.weights, asked.buffers, extra)

    def measured(
        self, round: int, weights: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> MeasureThis:
        """A model for clients to measure or to keep; it takes the place of the one before."""
        digest, size = self._put(weights, buffers, ())
        self._measured = digest
        return MeasureThis(round, digest, size)

    def digest(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> str:
        """SHA-256 of the stream of a model, as `measured` would send it."""
        return digest_of(self._layout.named(weights, buffers, ()))

    def _put(
        self, weights: Sequence[Tensor], buffers: Sequence[Tensor], extra: Sequence[Tensor]
    ) -> tuple[str, int]:
        self.forget_unwanted()
        stream = self._shelf.put(self._layout.named(weights, buffers, extra))
        return stream.digest, stream.size

    def forget_unwanted(self) -> None:
        """Lets go of models that nobody is to fetch any more."""
        wanted = {seat.train.tensors for seat in self._desk.everybody() if seat.train}
        if self._measured is not None:
            wanted.add(self._measured)
        self._shelf.keep_only(wanted)
        self._known = {key: one for key, one in self._known.items() if one[1].digest in wanted}

    def update(self, said: Reserve, asked: Assignment, coordinator: Coordinator) -> Update:
        """An update from its file; one whose bytes are something else is a failure."""
        weights: list[Tensor] = []
        buffers: list[Tensor] = []
        extra: list[Tensor] = []
        failure = said.failure
        if failure is None:
            try:
                expected = self._expected(coordinator, asked)
                tensors = self._files.read(said.ticket, expected, said.digest)
                weights, buffers, extra = self._layout.apart(tensors)
            # Its digest is that of these bytes, so this is what its client has sent.
            except TensorsError as error:
                failure = f"it is no update of this model: {error}"
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
            # One that does not say has made those that it was asked for.
            steps=said.steps or self._steps_of(said),
        )

    def _steps_of(self, said: Reserve) -> int:
        """The steps that a client was asked for; of a loop of its own, no more than can be."""
        return max(1, min(self._federation.steps(max(said.examples, 1)), said.samples))
