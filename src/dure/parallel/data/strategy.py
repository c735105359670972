"""Data parallel: every rank holds the model, the joint batch is divided, gradients are added before
each update.

Rank r of N computes the gradient g_r of the mean loss over its b_r of the B examples; all apply the
sum of (b_r/B)·g_r, which is the gradient of the joint batch, so N ranks walk the same path as one
worker.

The d gradients travel in buckets while backward goes on (`dure.parallel.data.reducer`), by an
all-reduce of choice. Behind those of the last bucket rides a tail of numbers, `elements_in_step`,
so that a step has no other message. It carries what all ranks have to agree on anyway: rank 0's
wishes, the loss of every rank, the times at which each rank came to each bucket (from which idle
time is known: the wait for the last one), and which parameters were used and which buffers changed.

With `accumulate` = k each rank computes its part in k pieces, one after another, and sums once:
less memory, the same gradient. Clipping is by the norm of the joint gradient, which all ranks have.

Buffers such as batch-norm statistics are rank 0's, as in torch's DistributedDataParallel: those
that rank 0's forward has changed are broadcast after backward. Batch norm sees the rank's own part,
or piece, of the batch.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dure.collectives.all_reduce import Algorithm
from dure.collectives.compression import Compression, NoCompression
from dure.contracts.strategy import Kind, Learner, Place, Progress, Strategy, World
from dure.contracts.task import Task
from dure.data.batches import check_joint_batch
from dure.errors import LossNotFiniteError
from dure.parallel.data.how import NO_COMPRESSION, How, Overlap
from dure.parallel.data.reducer import Reducer
from dure.parallel.local.replicas import ReplicasLearner
from dure.parallel.local.single import SingleLearner, check_gradient
from dure.parallel.speaker import Speaker, check_weights_stay
from dure.randomness.seeds import derive
from dure.tasks.loss_shares import loss_of

Precision = Literal["full", "bf16"]


@dataclass(frozen=True)
class DataParallel(Strategy):
    """Every rank trains the same model on its part of each batch.

    Args:
        batch_size: examples of a step over all workers together; None is all the data.
        all_reduce: how gradients are summed: ring, master (through rank 0), one_shot, tree,
            halving_doubling, hierarchical, native (the backend's own), or auto, which chooses by
            size, ranks and hosts. In a world of threads the master adds them
            (`dure.parallel.local.replicas`).
        bucket_bytes: of gradients that share a message; by default dure chooses.
        overlap: all-reduces run beside backward, on a thread, are begun in it and ended behind it
            (split-phase), or run after it; auto chooses.
        compression: what travels in place of gradients, as top-k:0.01 or power-sgd:2.
        accumulate: pieces in which a worker computes its part of a batch, one after another.
        clip_norm: the largest norm that a step's gradient may have; by default any.
        precision: full, or bf16: forward and backward under autocast, weights and sums as they are.
    """

    batch_size: int | None = 64
    all_reduce: Algorithm = "ring"
    bucket_bytes: int | None = None
    overlap: Overlap = "auto"
    compression: Compression = NO_COMPRESSION
    accumulate: int = 1
    clip_norm: float | None = None
    precision: Precision = "full"

    name: ClassVar[str] = "data-parallel"
    kind: ClassVar[Kind] = "ranks"
    also: ClassVar[Mapping[Kind, str]] = {"threads": "data parallel in threads"}
    unit: ClassVar[str] = "step"

    @property
    def label(self) -> str:
        compresses = not isinstance(self.compression, NoCompression)
        return f"data parallel {self.compression if compresses else self.all_reduce}"

    def how(self, seed: int = 0) -> How:
        """How gradients are summed. Raises ValueError for what there is not."""
        seed = derive(seed, "compression")
        return How(
            self.all_reduce, "sum", self.bucket_bytes, self.overlap, self.compression, seed=seed
        )

    def check(self, task: Task, workers: int | None) -> None:
        check_joint_batch(self.batch_size, len(task.train), workers)
        self.how()
        check_gradient(self.accumulate, self.clip_norm)
        if self.precision not in ("full", "bf16"):
            raise ValueError(f"there is no precision {self.precision!r}: it is full or bf16")

    def check_model(self, task: Task, model: nn.Module, workers: int | None) -> None:
        """Raises ValueError for a model that replicas cannot train."""
        check_weights_stay(model, workers)

    def check_in(self, world: World) -> None:
        """Raises ValueError for fields that say something about messages, where there are none."""
        default = DataParallel()
        for name in ("all_reduce", "bucket_bytes", "overlap", "compression", "accumulate"):
            if world.kind == "threads" and getattr(self, name) != getattr(default, name):
                raise ValueError(
                    f"in threads DataParallel has no use for {name}, for nothing is sent: choose "
                    f"Processes"
                )

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        if place.kind == "threads":
            return ReplicasLearner(
                task, place, seed, self.batch_size, self.clip_norm, self.precision
            )
        return DataParallelLearner(task, place, seed, self)


def elements_in_step(
    parameters: int, trainable_tensors: int, ranks: int, buffers: int = 0, messages: int = 1
) -> int:
    """Elements of all messages of a step: the gradients, and the tail.

    The tail has 1 + 3N numbers, N for each message but the last, and a flag a parameter tensor and
    a buffer.
    """
    return parameters + 1 + 3 * ranks + ranks * (messages - 1) + trainable_tensors + buffers


class DataParallelLearner(SingleLearner):
    """SGD whose gradient is summed over the ranks of a group."""

    def __init__(self, task: Task, place: Place, seed: int, strategy: DataParallel) -> None:
        super().__init__(task, place, seed, strategy.batch_size)
        self.strategy = strategy
        # for models whose first weights do not follow from the seed alone, such as those read from
        # a file
        self.group.broadcast_values(
            [*self.model.parameters(), *self.model.buffers()], counted=False
        )
        self.speaking = Speaker(self.model)
        how = strategy.how(seed)
        self.reducer = Reducer(list(self.model.parameters()), self.group, how, self)
        self.parted = how.compresses
        self.clock_offset = place.clock_offset
        self.started = self.group.all_gather_values([self._now()])[0][0]
        self._loss, self._asked = 0.0, 0

    def _now(self) -> float:
        """Seconds on rank 0's clock."""
        return time.perf_counter() + self.clock_offset

    def gradients(self, indices: Tensor, wish: int) -> Progress:
        self._loss, self._asked = 0.0, wish
        self.optimizer.zero_grad(set_to_none=True)
        part = indices.tensor_split(self.group.size)[self.group.rank]
        pieces = [piece for piece in part.tensor_split(self.strategy.accumulate) if len(piece)]
        for piece in pieces[:-1]:
            with self.reducer.paused():
                self.backward(piece, self.shares.of(piece, indices))
        if pieces:
            self.backward(pieces[-1], self.shares.of(pieces[-1], indices))
        else:
            self.reducer.take_part()
        losses, wish = self._arrived()
        self._clip()
        return Progress(sum(losses), len(indices), wish)

    def backward(self, indices: Tensor, share: float) -> float:
        """Forward and backward over `indices`; gradients are those of share x mean loss. Returns
        the mean loss.

        Gradients leave as backward makes them, unless the reducer is paused because there are more
        to add.
        """
        inputs, targets = self.read(indices)
        started = time.perf_counter()
        with self._autocast():
            loss = loss_of(self.task.loss, self.model(inputs), targets, share)
        value = float(loss.item())
        self._loss += share * value
        forwarded = time.perf_counter()
        meter, step = self.group.meter, self.step + 1
        meter.compute("forward", started, forwarded, step)
        self.reducer.look_at([loss])
        if self.reducer.enabled:
            self.reducer.begin()
        (loss if share == 1.0 else loss * share).backward()  # type: ignore[no-untyped-call]
        if self.reducer.enabled:
            self.reducer.finish()
            meter.compute("backward", forwarded, self.reducer.computed, step)
        else:
            meter.compute("backward", forwarded, time.perf_counter(), step)
        return value

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.strategy.precision == "full":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _arrived(self) -> tuple[list[float], int]:
        """Reads the tail: the losses of all ranks, and rank 0's wish. Buffers follow it."""
        size, numbers = self.group.size, self.reducer.numbers
        per_rank = [numbers[1 + 3 * rank : 4 + 3 * rank] for rank in range(size)]
        arrivals = [whole + rest + self.started - self.clock_offset for _, whole, rest in per_rank]
        earlier, changed = numbers[1 + 3 * size :], numbers[len(numbers) - len(self.speaking) :]
        messages = (len(earlier) - len(self.speaking)) // size + 1
        last = {
            number: max(
                arrivals[rank] - earlier[rank * (messages - 1) + number] for rank in range(size)
            )
            for number in range(messages - 1)
        }
        self.reducer.account(self.step + 1, {**last, messages - 1: max(arrivals)})
        losses = [loss for loss, _, _ in per_rank]
        for rank, value in enumerate(losses):
            if not math.isfinite(value):
                raise LossNotFiniteError(value, f"rank {rank}", f"step {self.step + 1}")
        if any(changed):
            started = time.perf_counter()
            self.speaking.take(self.group, [bool(one) for one in changed])
            self.group.meter.communication(
                "broadcast of buffers", started, time.perf_counter(), self.step + 1
            )
        return losses, int(numbers[0])

    def part(self) -> dict[str, Any]:
        """What compressors remember of what they have not sent."""
        return {"compressors": self.reducer.state()["compressors"]}

    def tail_length(self, messages: int) -> int:
        return elements_in_step(0, 0, self.group.size, len(self.speaking), messages)

    def tail_numbers(self, entered: Sequence[float]) -> list[float]:
        """Each is written by one rank and zero elsewhere, so that the sum is what was written.

        A time is split into whole seconds and the rest, which float32 holds to less than a
        microsecond; that of an earlier bucket is told by its distance.
        """
        size, rank, now = self.group.size, self.group.rank, time.perf_counter()
        per_rank = [0.0] * (3 * size)
        per_rank[3 * rank : 3 * rank + 3] = (
            self._loss,
            *divmod(now + self.clock_offset - self.started, 1.0),
        )
        count = len(entered) - 1
        earlier = [0.0] * (size * count)
        earlier[rank * count : (rank + 1) * count] = [
            now - at if at else 0.0 for at in entered[:count]
        ]
        changed = self.speaking.changed() if rank == 0 else [False] * len(self.speaking)
        return [float(self._asked) if rank == 0 else 0.0, *per_rank, *earlier, *map(float, changed)]

    def backward_begins(self) -> None:
        """`backward` says so itself."""
        self.reducer.begin()

    def _clip(self) -> None:
        if self.strategy.clip_norm is not None:
            started = time.perf_counter()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.strategy.clip_norm)
            self.group.meter.compute("clip", started, time.perf_counter(), self.step + 1)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "order": self.reducer.order}

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        super().restore(weights, state)
        own = state["parts"][self.group.rank] if "parts" in state else {}
        self.reducer.restore(
            {"order": state.get("order"), "compressors": own.get("compressors", [])}
        )
