"""Gradient of a worker's part of a batch, at the pulled weights.

The gradient of a part is that of its mean loss, and has a weight in its batch:

    staleness 0          the count of the loss in the part (`dure.tasks.loss_shares`)
    others               the part's share of the count in the batch

so that with staleness 0 the parts of a batch add up to the gradient of data parallel. With
compressed pushes the weight for staleness 0 is a share as well: of the expected count of the batch
(`compressed`). The gradient consists of flat vectors, one a dtype, in the order of the keys, and
for tables of the rows that the part has read (`embeddings`). Random draws, such as dropout's, are a
function of the batch and the part, as for ranks of data parallel. In float16 a pass is repeated
until its gradient is finite (`dure.tasks.loss_scaling`), because the servers wait for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from dure.contracts.fresh_model import examples_for
from dure.contracts.task import Task
from dure.data.batches import Batches
from dure.data.examples import reader_on
from dure.errors import LossNotFiniteError
from dure.machine.devices import pinned_like
from dure.parameter_server.embeddings import Tables, check_no_tables, dense_of, embeddings_of
from dure.parameter_server.late_counts import LateCounts
from dure.parameter_server.scheduler import BatchPart
from dure.parameter_server.tables import SparseRows
from dure.randomness.seeds import seed_generators
from dure.tasks.gradient_accumulation import AccumulatedLoss, accumulate_gradient
from dure.tasks.gradient_transforms import GradientTransforms, clip, forward_context
from dure.tasks.loss_scaling import RepeatedPasses
from dure.tasks.loss_shares import CountedLoss
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import FlatParameters, by_dtype


@dataclass
class ComputedGradients:
    """Gradient of a part.

    Args:
        gradients: flat gradient, by vector.
        weight: weight in the batch.
        loss: mean loss over `counted`.
        counted: count of the loss.
        examples: number of examples in the part.
        seconds: computing time.
        rows: gradients of tables, by shard.
    """

    gradients: list[Tensor]
    weight: float
    loss: float
    counted: float
    examples: int
    seconds: float
    rows: list[SparseRows] = field(default_factory=list)


class GradientComputation:
    """Model and data of a worker, or of all simulated workers of a process.

    Args:
        task: the task.
        model: the model.
        seed: seed of the run.
        batch_size: examples of a batch; None is all data.
        bulk: whether the parts of a batch become a single step (staleness 0).
        skips: whether a step leaves elements with a zero gradient unchanged; if not, every
            parameter
            must have a gradient.
        groups: number of groups, each with its own order of the data.
        compressed: whether pushes are compressed.
        accumulate: pieces of a part that are computed one after another.
    """

    tables: Tables | None = None
    """Tables of the model. A model with sparse embeddings and without `Tables` raises an error."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        seed: int,
        batch_size: int | None,
        bulk: bool,
        skips: bool,
        groups: int = 1,
        compressed: bool = False,
        accumulate: int = 1,
    ) -> None:
        self.model = model
        self.seed = seed
        self.bulk = bulk
        self.compressed = compressed
        self.skips = skips
        self._device = next(model.parameters()).device
        self.task = task = task.on(self._device)
        self.accumulate = accumulate
        self.trimming = GradientTransforms(task, model.named_parameters())
        trained = dense_of(model)
        self._has_sparse = bool(embeddings_of(model))
        self.flat = FlatParameters(model, trained)
        self.buffers = BufferNames(model)
        self.examples, self.test = examples_for(task)
        self._read = reader_on(self.examples, self._device)
        self.losses = CountedLoss(task.loss, self.examples)
        self._late = None
        if not bulk and self.losses.is_late:
            self._late = LateCounts(self.losses, self._read)
        self.batches = [
            Batches(len(self.examples), batch_size, seed, n, order=self.examples.order())
            for n in range(groups)
        ]
        self._names = {id(one): name for name, one in model.named_parameters()}
        self._vectors = list(by_dtype(trained).values())

    @property
    def steps_per_epoch(self) -> int:
        """Batches in a pass over the data."""
        return self.batches[0].steps_per_epoch

    def load(self, vectors: Sequence[Tensor]) -> None:
        """Set the weights, by vector."""
        self.flat.load(vectors)

    def messages(self) -> list[Tensor] | None:
        """Return vectors in the CPU's memory for the result of `of`; None if the model is there."""
        return list(map(pinned_like, self.flat.buffers)) if self.flat.is_apart else None

    def rows_of(self, work: BatchPart, group: int) -> list[Tensor]:
        """Return the table rows that a part reads, by shard of tables; empty without tables.

        The pass makes the same random draws as `of`, and leaves the model's buffers unchanged.
        """
        if self.tables is None:
            return []
        part, _, place = self._part(work, group)
        if not len(part):
            return [one.rows for one in self.tables.empty()]
        self._seed(place)
        buffers = [buffer.detach().clone() for buffer in self.buffers.of(self.model)]
        inputs, _ = self._read(part)
        rows = self.tables.asked(lambda: self.model(inputs))
        self.buffers.load(self.model, buffers)
        return self.tables.by_shard(rows)

    def examples_of(self, work: BatchPart, group: int) -> int:
        """Return the number of examples in a part."""
        return len(self._part(work, group)[0])

    def of(
        self,
        work: BatchPart,
        group: int,
        who: str,
        rows: Sequence[SparseRows] = (),
        out: Sequence[Tensor] | None = None,
    ) -> ComputedGradients:
        """Return the gradient of a part at the current weights.

        Args:
            work: the part.
            group: number of the group.
            who: name of the worker, for errors.
            rows: rows from `rows_of`, with their values.
            out: vectors for the result, in the CPU's memory; None allocates memory on the model's
                device.

        Raises LossNotFiniteError for a loss that is not finite, and ValueError for a parameter
        without a gradient that the optimizer would move nevertheless.
        """
        part, batch, place = self._part(work, group)
        # The servers clip the step of several workers, since they have the whole gradient.
        clips = not self.bulk or (work.parts == 1 and not self.compressed)
        if self.tables is None:
            found = self.mean(part, place, who, out, clips)
        else:
            with self.tables.holding(rows) as gradients:
                found = self.mean(part, place, who, out, clips)
                found.rows = self._rows(gradients(), found.counted)
        found.weight = self._weight(found, part, batch, work.parts)
        return found

    def _weight(self, found: ComputedGradients, part: Tensor, batch: Tensor, parts: int) -> float:
        """Return the weight of a part's gradient in its batch."""
        if not self.bulk:
            return 1.0 if parts == 1 else self._share(found, part, batch)
        if not self.compressed:
            return found.counted
        expected = self.losses.expected(batch)
        return found.counted / expected if expected else 0.0

    def _share(self, found: ComputedGradients, part: Tensor, batch: Tensor) -> float:
        """Return the share of a part in its batch, before other parts are computed."""
        examples = len(part) / len(batch)
        if self.losses.is_alike or not len(part):
            return examples
        if self._late is not None:
            total = self._late.in_batch(part, found.counted, batch)
        else:
            total = self.losses.expected(batch)
        # A batch without any count is an ordinary step, with a gradient of zero.
        return found.counted / total if total else examples

    def _part(self, work: BatchPart, group: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Return a part's examples, its batch's examples, and its position for random draws."""
        batch = self.batches[group].at(work.batch)
        place = (work.batch, work.part) if group == 0 else (work.batch, work.part, group)
        return batch.tensor_split(work.parts)[work.part], batch, place

    def _seed(self, place: tuple[int, ...]) -> None:
        seed_generators(self.seed, "step", *place, everything=self.examples.draws)

    def _finite_pass(self, part: Tensor) -> AccumulatedLoss:
        """Compute the gradient of a part; in float16, repeat it until the gradient is finite."""
        # A new scale for each part: workers compute the same gradient, whichever gets the part.
        passes = RepeatedPasses(self.task, self.model, self._device)
        leaves = () if self.tables is None else self.tables.leaves()
        held = [*self.model.parameters(), *leaves]
        return passes.run(
            lambda: self._pass(part, passes.backward, leaves),
            lambda _: [one.grad for one in held],
        )

    def _pass(
        self, part: Tensor, backward: Callable[[Tensor], None], leaves: Sequence[Tensor]
    ) -> AccumulatedLoss:
        """Run forward and backward over the pieces of a part. leaves: the rows of tables."""
        for parameter in (*self.model.parameters(), *leaves):
            parameter.grad = None
        return accumulate_gradient(
            self.losses,
            part,
            self.accumulate,
            read=self._read if self._late is None else self._late.read,
            forward=self.model if self._late is None else partial(self._late.forward, self.model),
            computing=lambda *given: forward_context(self.task, self._device),
            backward=backward,
            parameters=self.model.parameters(),
        )

    def mean(
        self,
        part: Tensor,
        place: tuple[int, ...],
        who: str,
        out: Sequence[Tensor] | None = None,
        clips: bool = True,
    ) -> ComputedGradients:
        """Return the gradient of the mean loss of these examples.

        The weight of the gradient is 1, or 0 without examples.

        Args:
            part: indices of the examples.
            place: position in the run, the step first; determines random draws.
            who: as in `of`.
            out: as in `of`.
            clips: whether to clip this gradient if the task asks for clipping.

        Raises the errors of `of`.
        """
        if self._has_sparse and self.tables is None:
            check_no_tables(self.model)
        self._seed(place)
        started = time.perf_counter()
        if out is None:
            out = [torch.empty_like(vector) for vector in self.flat.buffers]
        if not len(part):
            empty = [vector.zero_() for vector in out]
            return ComputedGradients(empty, 0.0, 0.0, 0.0, 0, time.perf_counter() - started)
        found = self._finite_pass(part)
        if not math.isfinite(found.loss):
            raise LossNotFiniteError(found.loss, who, f"step {place[0] + 1}")
        self.trimming.drop(place[0])
        if clips and self.trimming.norm is not None:
            clip(self.trimming.parameters, self.trimming.norm)
        for vector, room in zip(self._vectors, out, strict=True):
            self._write(vector, found.counted, room)
        return ComputedGradients(
            gradients=list(out),
            weight=1.0,
            loss=found.loss,
            counted=found.counted,
            examples=len(part),
            seconds=time.perf_counter() - started,
        )

    def _rows(self, found: Sequence[SparseRows | None], counted: float) -> list[SparseRows]:
        """Return the gradients of tables, by shard; without rows for a table without a gradient."""
        assert self.tables is not None
        gradients = []
        for one, keys, none in zip(found, self.tables.shards, self.tables.empty(), strict=True):
            if one is None:
                self._check_skipped(self.tables.tables[keys.vector].name, counted)
            gradients.append(none if one is None else one)
        return gradients

    def _check_skipped(self, name: str, counted: float) -> None:
        """Check that the optimizer does not move a parameter without a gradient.

        Raises ValueError.
        """
        if not self.skips and counted:
            raise ValueError(no_gradient(name))

    def _write(self, parameters: Sequence[nn.Parameter], counted: float, room: Tensor) -> None:
        """Write the gradients of a vector's parameters one after another."""
        for parameter in parameters:
            if parameter.grad is None:
                self._check_skipped(self._names[id(parameter)], counted)
        write_gradients(parameters, room)


def write_gradients(parameters: Sequence[nn.Parameter], room: Tensor) -> None:
    """Write the gradients of parameters into a vector; zeros for parameters without a gradient."""
    parts = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.is_sparse:  # of `F.embedding` on a parameter, such as no module has
            gradient = gradient.to_dense()
        parts.append(gradient.reshape(-1))
    if parts[0].device == room.device:
        torch.cat(parts, out=room)
    else:
        room.copy_(torch.cat(parts))


def no_gradient(name: str) -> str:
    """Return the error message for a parameter without a gradient."""
    return (
        f"{name} has no gradient, but the optimizer at the servers would change it anyway: freeze "
        "it, or use SGD without momentum and weight decay"
    )
