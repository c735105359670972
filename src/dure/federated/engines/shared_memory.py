"""Shared memory for weights and results of this process and its children (`processes`).

The memory is allocated once. Untouched pages cost nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dure.federated.engines.job import ClientJob, JobResult
from dure.federated.engines.products import DeferredUpdate, Sizes, UpdateProducts
from dure.protocol.messages import Failure
from dure.tensors.flat import by_dtype, trainable_parameters

LINE = 64
"""Bytes of a cache line, on which each tensor begins."""


@dataclass(frozen=True)
class WeightLayout:
    """Layout of the trained weights in flat tensors: (dtype, number of elements) of each."""

    parts: tuple[tuple[torch.dtype, int], ...]

    @staticmethod
    def of(model: nn.Module) -> WeightLayout:
        parts: list[tuple[torch.dtype, int]] = []
        for dtype, group in by_dtype(trainable_parameters(model)).items():
            parts.append((dtype, sum(each.numel() for each in group)))
        return WeightLayout(tuple(parts))

    @property
    def nbytes(self) -> int:
        """Bytes of a set of weights."""
        return sum(_on_lines(dtype.itemsize * count) for dtype, count in self.parts)

    def memory(self, count: int) -> mmap.mmap:
        """Return memory for `count` sets of weights, which forked processes share."""
        # Anonymous and shared: pages exist once touched, and a fork shares them.
        return mmap.mmap(-1, max(LINE, self.nbytes * count))

    def sets(self, memory: mmap.mmap, count: int) -> list[list[Tensor]]:
        """Return the sets of weights in the memory, as views."""
        made: list[list[Tensor]] = []
        at = 0
        for _ in range(count):
            one: list[Tensor] = []
            for dtype, elements in self.parts:
                # The tensors keep the memory alive.
                one.append(torch.frombuffer(memory, dtype=dtype, count=elements, offset=at))
                at += _on_lines(dtype.itemsize * elements)
            made.append(one)
        return made


def _on_lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


class SharedWeights:
    """Slots of weights, anchors and corrections that children read.

    A slot's content is identified by the identity and version of its tensors.
    """

    def __init__(self, layout: WeightLayout, count: int) -> None:
        self.sets = layout.sets(layout.memory(count), count)
        self.held: list[list[tuple[Tensor, int]]] = [[] for _ in range(count)]

    def put(self, values: Sequence[Tensor], needed: set[int]) -> int:
        """Return the slot with `values`, after copying them if no slot had them.

        needed: slots that must not change; the returned slot is added.
        """
        # torch counts every in-place change. With the identity, the count shows whether a slot's
        # copy is still right, without reading the numbers.
        known = [(value, value._version) for value in values]
        # In a round all jobs have the same weights: they are copied once, and found here
        # afterwards.
        for slot, held in enumerate(self.held):
            if len(held) == len(known) and all(
                a is b and v == w for (a, v), (b, w) in zip(held, known, strict=True)
            ):
                needed.add(slot)
                return slot
        slot = next(each for each in range(len(self.sets)) if each not in needed)
        for mine, value in zip(self.sets[slot], values, strict=True):
            mine.copy_(value)
        # A reference, so that no other tensor can get the same identity.
        self.held[slot] = known
        needed.add(slot)
        return slot


@dataclass
class Reply:
    """Message about results whose tensors are in shared memory.

    results: samples, loss, buffers, failure, counted weight of each. products: if all updates are
    deferred, the sizes of the parts and the learning rate of each cohort's products. places: of
    each deferred update, the index of its products and its place in them. Otherwise each update is
    in its own set.
    """

    results: list[tuple[int, float, list[Tensor], Failure | None, float | None]]
    products: list[tuple[list[Sizes], float]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)


class SharedResults:
    """Memory to which a child writes the results of a chunk of jobs."""

    def __init__(self, layout: WeightLayout, count: int) -> None:
        memory = layout.memory(count)
        self.sets = layout.sets(memory, count)
        # The same memory in one piece, for products, whose parts have other sizes than the weights;
        # all together they are not larger (`which_pay`).
        self.flat = (
            torch.frombuffer(memory, dtype=layout.parts[0][0]) if layout.parts else torch.empty(0)
        )

    def write(self, done: Sequence[JobResult]) -> Reply:
        """Write results, in the child, and return the message about them."""
        reply = Reply(
            [
                (each.samples, each.loss, list(each.buffers), each.failure, each.counted)
                for each in done
            ]
        )
        deferred = [each.delta for each in done if isinstance(each.delta, DeferredUpdate)]
        # All or none: a mixture is written as plain updates, formed one by one.
        if deferred and len(deferred) == len(done):
            self._write_products(deferred, reply)
            return reply
        # Shorter if a job failed: the others have no result.
        for output, trained in zip(self.sets, done, strict=False):
            if trained.failure is None:
                for mine, delta in zip(output, trained.delta, strict=True):
                    mine.copy_(delta)
        return reply

    def _write_products(self, deferred: Sequence[DeferredUpdate], reply: Reply) -> None:
        known: dict[int, int] = {}
        at = 0
        for delta in deferred:
            products = delta.products
            # The updates of a cohort share its factors, which are written once.
            if id(products) not in known:
                known[id(products)] = len(known)
                reply.products.append((products.write(self.flat[at:]), products.lr))
                at += products.elements
            reply.places.append((known[id(products)], delta.place))

    def read(self, reply: Reply, jobs: Sequence[ClientJob]) -> list[JobResult]:
        """Return copies of the results, in the parent."""
        cohorts: list[UpdateProducts] = []
        at = 0
        for sizes, lr in reply.products:
            cohorts.append(UpdateProducts.read(self.flat[at:], sizes, lr))
            at += cohorts[-1].elements
        deltas: list[Sequence[Tensor]] = [
            DeferredUpdate(cohorts[which], place, job.weights[0])
            for (which, place), job in zip(reply.places, jobs, strict=False)
        ]
        if not cohorts:
            for output, (*_, failure, _) in zip(self.sets, reply.results, strict=False):
                deltas.append([] if failure is not None else [part.clone() for part in output])
        return [
            JobResult(delta, buffers, samples, loss, failure, counted)
            for delta, (samples, loss, buffers, failure, counted) in zip(
                deltas, reply.results, strict=True
            )
        ]
