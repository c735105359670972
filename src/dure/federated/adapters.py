"""Adapters in a federation: clients of unlike ranks, and the merge of their factors.

    server    holds B, A of the largest rank r, with the scaling s
    client i  takes the first r_i columns of B and rows of A, with its scaling s_i:
                  B_i = (s / s_i) B[:, :r_i],  A_i = A[:r_i]         s_i·B_i A_i = s·B A, cut to r_i
              trains them, and sends the changes of (s_i / s) B_i and A_i, padded with zeros
    server    stack, svd    B, A <- best approximation of Σ_i p_i·s_i·B_i A_i that has the rank r
              factors       B <- Σ_i p_i·(s_i / s) B_i,  A <- Σ_i p_i·A_i
              freeze_a      B <- Σ_i p_i·(s_i / s) B_i: exact, because all clients have the same A

s_i is PEFT's scaling of rank r_i. A client's model has its rank by the buffers `mask`
(`dure.contracts.adapter`), which the server's model has too, filled with ones.

Other trained parameters, and buffers, are combined by the mean. Cost of a merge:
`dure.federated.aggregate.low_rank`, layer by layer in float64; the updates of all clients of a
round are in memory at once. Messages have the padded factors, whatever the rank of a client.

Source: Cho et al. 2024, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation
Models" (HetLoRA: truncate and pad); Z. Wang et al. 2024, "FLoRA" (stack); Y. Sun et al. 2024,
"Improving LoRA in Privacy-preserving Federated Learning" (FFA-LoRA: freeze_a).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from dure.contracts.adapter import LoRA, lora_names
from dure.contracts.task import Task
from dure.errors import TooFewUpdatesError
from dure.federated.aggregate import Aggregator, Mean
from dure.federated.aggregate.low_rank import (
    LowRank,
    SingularTriples,
    mean_matrix,
    split,
    stacked,
    svd_of_matrix,
    svd_of_product,
)
from dure.federated.algorithm import Algorithm, ClientMemory
from dure.federated.engines.job import ClientJob, JobResult
from dure.federated.privacy.privacy_settings import Privacy
from dure.federated.server.pacing import Pacing
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.protocol.messages import Assignment, Update
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import by_dtype, trainable_parameters

ROW_NORM = 1 / math.sqrt(3)
"""Least norm of the rows of a merged A: the root mean square of the rows that PEFT draws."""

_OTHERS = ("answer", "step", "shared", "whole", "down", "expects", "absorb", "own", "kept")
"""Hooks whose overrides expect the whole update of a client, or parts of it."""


class FlatPlace(NamedTuple):
    """Place of a parameter in the flat weights: the tensor, the first element, and the shape."""

    group: int
    start: int
    shape: tuple[int, ...]

    def of(self, weights: Sequence[Tensor]) -> Tensor:
        """Return the parameter, as a view of the flat weights."""
        size = math.prod(self.shape)
        return weights[self.group][self.start : self.start + size].view(self.shape)


class FactorPlaces(NamedTuple):
    """Places of an adapted layer's factors. a: None if A is frozen. scaling: s of the layer."""

    a: FlatPlace | None
    b: FlatPlace
    scaling: float


def places_of(model: nn.Module) -> list[FactorPlaces]:
    """Return the places of the factors of each adapted layer, in the model's order."""
    names = {id(one): name for name, one in model.named_parameters()}
    found: dict[str, FlatPlace] = {}
    for group, parameters in enumerate(by_dtype(trainable_parameters(model)).values()):
        start = 0
        for one in parameters:
            found[names[id(one)]] = FlatPlace(group, start, tuple(one.shape))
            start += one.numel()
    layers = lora_names(model)
    return [FactorPlaces(found.get(one.a), found[one.b], one.scaling) for one in layers]


class AdapterRounds(Algorithm):
    """Algorithm whose clients train adapters of their own ranks.

    inner: the strategy's algorithm, which trains the client's adapter.
    """

    def __init__(self, inner: Algorithm, adapter: LoRA, model: nn.Module) -> None:
        self.inner = inner
        self.adapter = adapter
        self.places = places_of(model)
        masks = {one.mask for one in lora_names(model)}
        buffers = BufferNames(model).names
        self.masks = [place for place, name in enumerate(buffers) if name in masks]
        self.mixes_models = inner.mixes_models  # type: ignore[misc]
        self.alike = inner.alike

    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        return self.inner.share(update, staleness)

    def jobs(
        self, job: ClientJob, assignment: Assignment, memory: ClientMemory | None
    ) -> list[ClientJob]:
        if not self.adapter.has_unlike_ranks:
            return self.inner.jobs(job, assignment, memory)
        rank, ratio = self._of(job.client)
        weights = [one.clone() for one in job.weights]
        self._convert(weights, rank, 1 / ratio)
        buffers = list(job.buffers)
        for place in self.masks:
            buffers[place] = torch.zeros_like(buffers[place])
            buffers[place][:rank] = ratio
        own = replace(job, weights=weights, buffers=buffers)
        return self.inner.jobs(own, assignment, memory)

    def answer(
        self,
        jobs: list[ClientJob],
        trained: list[JobResult],
        assignment: Assignment,
        memory: ClientMemory | None,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], ClientMemory | None]:
        delta = trained[0].delta
        if not self.adapter.has_unlike_ranks:
            return delta, (), memory
        own = [w + d for w, d in zip(jobs[0].weights, delta, strict=True)]
        # Noise of DP-SGD reaches the rows beyond the rank, which are no part of the adapter.
        self._convert(own, *self._of(assignment.client))
        return [w - w0 for w, w0 in zip(own, assignment.weights, strict=True)], (), memory

    def sent_buffers(self, result: JobResult, assignment: Assignment) -> Sequence[Tensor]:
        buffers = list(result.buffers)
        for place in self.masks:
            buffers[place] = assignment.buffers[place]
        return buffers

    def _of(self, client: int) -> tuple[int, float]:
        """Return (rank of a client, s_i / s)."""
        rank = self.adapter.rank_of(client)
        adapter = self.adapter
        return rank, adapter.scaling(rank) / adapter.scaling(adapter.largest)

    def _convert(self, weights: Sequence[Tensor], rank: int, ratio: float) -> None:
        """Multiply B by the ratio, and fill the factors beyond the rank with zeros, in place."""
        for places in self.places:
            b = places.b.of(weights)
            b[:, rank:] = 0
            b *= ratio
            if places.a is not None:
                places.a.of(weights)[rank:] = 0


class MergedRounds(AdapterRounds):
    """Algorithm whose server multiplies the factors of each client, and factors the mean."""

    @torch.no_grad()
    def step(
        self, weights: Sequence[Tensor], mean: Sequence[Tensor], updates: Sequence[Update]
    ) -> Sequence[Tensor]:
        merged = [w + d for w, d in zip(weights, mean, strict=True)]
        shares = [self.share(update, 0)[1] for update in updates]
        for places in self.places:
            assert places.a is not None, "with a frozen A the mean of B is exact"
            factors = [self._factors(places, weights, update) for update in updates]
            triples = self._triples(factors, shares)
            b, a = places.b.of(weights), places.a.of(weights)
            now = LowRank(b.double(), a.double(), places.scaling)
            new = split(triples, now, ROW_NORM, torch.finfo(b.dtype).eps)
            places.b.of(merged).copy_(new.b)
            places.a.of(merged).copy_(new.a)
        return merged

    def _triples(self, factors: Sequence[LowRank], shares: Sequence[float]) -> SingularTriples:
        """Return the singular triples of the mean of the updates.

        Raises TooFewUpdatesError if the product of the factors overflows.
        """
        try:
            if self.adapter.merge == "stack":
                return svd_of_product(stacked(factors, shares))
            return svd_of_matrix(mean_matrix(factors, shares))
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise TooFewUpdatesError(
                "the clients' adapters are too large to multiply; did training diverge?"
            ) from error

    def _factors(self, places: FactorPlaces, weights: Sequence[Tensor], update: Update) -> LowRank:
        """Return a client's factors, of its own rank, whatever it sent beyond it."""
        assert places.a is not None
        rank = self.adapter.rank_of(update.client)
        b, a = (
            place.of(weights).double() + place.of(update.delta).double()
            for place in (places.b, places.a)
        )
        return LowRank(b[:, :rank], a[:rank], places.scaling)


def with_adapter(inner: Algorithm, task: Task, model: nn.Module) -> Algorithm:
    """Return the algorithm of a run with the task's adapter; `inner` itself if nothing differs."""
    adapter = task.adapter
    if adapter is None or not (adapter.merges or adapter.has_unlike_ranks):
        return inner
    kind = MergedRounds if adapter.merges else AdapterRounds
    return kind(inner, adapter, model)


class MergingStrategy(Protocol):
    """Settings of a strategy that a merge depends on."""

    @property
    def name(self) -> str: ...
    @property
    def privacy(self) -> Privacy: ...
    def rule(self) -> Aggregator: ...
    def optimizer(self) -> ServerOptimizer: ...
    def pacing(self, clients: int) -> Pacing: ...


def check_adapter(strategy: MergingStrategy, task: Task, inner: Algorithm, clients: int) -> None:
    """Raise ValueError if the strategy cannot combine the adapters of clients.

    inner: the strategy's algorithm.
    """
    adapter = task.adapter
    if adapter is None or not (adapter.merges or adapter.has_unlike_ranks):
        return
    reason = _own_hooks(inner)
    if adapter.has_unlike_ranks and reason is not None:
        raise ValueError(
            f"LoRA(rank={adapter.rank}): {strategy.name} {reason}, which has one rank: give one "
            "rank, or use fed-avg or fed-prox"
        )
    reason = _cannot_merge(strategy, clients) or (
        None if reason is None else f"{strategy.name} {reason}"
    )
    if adapter.merges and reason is not None:
        raise ValueError(
            f"LoRA(merge={adapter.merge!r}) multiplies the factors of each client, but {reason}: "
            "use LoRA(freeze_a=True), whose mean is exact, or merge='factors'"
        )


def _cannot_merge(strategy: MergingStrategy, clients: int) -> str | None:
    """Return why the server cannot multiply the factors of single clients; None if it can."""
    secure, user = strategy.privacy.secure, strategy.privacy.user
    if secure is not None:
        return f"{secure.name} shows the server only sums"
    if user is not None:
        return "user-level privacy releases only noised sums"
    if not strategy.pacing(clients).synchronous:
        return f"{strategy.name} combines updates of different times"
    if strategy.rule() != Mean():
        return f"the rule {strategy.rule()} combines single numbers or whole updates"
    if not strategy.optimizer().follows:
        return f"the server optimizer of {strategy.name} steps along the mean of the factors"
    return None


def _own_hooks(inner: Algorithm) -> str | None:
    """Return what in an algorithm does not fit adapters of several clients; None if all fits."""
    hooks: Mapping[str, object] = vars(Algorithm)
    if any(getattr(type(inner), name) is not hooks[name] for name in _OTHERS):
        return "sends or keeps more than the change of one model"
    if inner.has_own_objective or inner.passes != 1:
        return "trains more than one model"
    return None
