"""User-level privacy of a run, built from the settings of its strategy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dure.federated.algorithm import Algorithm
from dure.federated.privacy.user_level.checks import PrivateRoundsStrategy, epsilon_account
from dure.federated.privacy.user_level.estimator import Estimator, client_population
from dure.federated.privacy.user_level.release import NoisedRounds
from dure.federated.privacy.user_level.settings import UserLevel
from dure.federated.server.poisson_sampling import CarrierOnce
from dure.privacy.guarantee import PrivacyGuarantee
from dure.privacy.ledger import Ledger
from dure.privacy.padding import PaddingRow
from dure.randomness.secret import Secret
from dure.tasks.batch_norm import statistics
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import FlatParameters, trainable_by_name


def noised_rounds(
    user: UserLevel,
    strategy: PrivateRoundsStrategy,
    *,
    model: nn.Module,
    algorithm: Algorithm,
    sizes: Sequence[int],
    keyed: bool,
    once: CarrierOnce,
    secret: Secret,
    folder: Path | None,
    padding: Sequence[PaddingRow] = (),
) -> NoisedRounds:
    """Return the object that gathers contributions and releases their noisy sum.

    Args:
        user: settings of user-level privacy.
        strategy: settings of the rounds.
        model: a model like the run's; this function may change it.
        algorithm: the server's algorithm.
        sizes: number of examples of each client; 0 if unknown.
        keyed: whether a client is a key of the data.
        once: the carrier's `CarrierOnce`.
        secret: source of the noise.
        folder: folder of the run; None without a folder.
        padding: rows of embeddings that no client trains.
    """
    here = user
    if user.where != "server":
        # Contributions arrive clipped and noisy; the server only sums them.
        here = replace(user, clip=math.inf, noise=0.0, clipping="flat")
    like, pieces = contribution(model, algorithm)
    return NoisedRounds(
        estimator=Estimator(
            here, client_population(user, strategy.fraction, sizes), pieces, here.clip
        ),
        settings=user,
        like=like,
        promise=promise(user, strategy, keyed),
        ledger=Ledger(
            strategy.delta, folder, secret.repeats, epsilon_account(user, strategy, len(sizes))
        ),
        budget=strategy.epsilon,
        secret=secret,
        once=once,
        untrained=_untrained(model, algorithm, padding, like),
    )


def promise(user: UserLevel, strategy: PrivateRoundsStrategy, keyed: bool) -> PrivacyGuarantee:
    """Return the privacy guarantee, in words."""
    unit = "client (all examples of one key)" if keyed else "client"
    if user.where == "local":
        return PrivacyGuarantee(
            unit=unit,
            delta=strategy.delta,
            relation="replace",
            sampling="all",
            against="the server, and whoever sees what the client sends",
        )
    return PrivacyGuarantee(
        unit=unit,
        delta=strategy.delta,
        sampling="all" if strategy.fraction == 1 else "coins",
        differ="all that one client contributes there, or left out; who is enrolled is public",
    )


def contribution(model: nn.Module, algorithm: Algorithm) -> tuple[list[Tensor], list[list[int]]]:
    """Return tensors shaped like a client's contribution, and the sizes of the pieces of each.

    The pieces are the parameters of the model, in order; per-layer clipping clips them separately.
    """
    flat = FlatParameters(model)
    shared = algorithm.shared(flat.copy())
    buffers = BufferNames(model)
    moving = statistics(model, buffers.names)
    statistic = [one for place, one in enumerate(buffers.of(model)) if place in moving]
    extra = list(algorithm.down())
    weights = _pieces(flat, algorithm)
    like = [
        torch.view_as_real(one) if one.is_complex() else one
        for one in [*shared, *statistic, *extra]
    ]
    # Extras are divided like the weights if they have equal sizes; else each tensor is a piece.
    same = [one.numel() for one in extra] == [one.numel() for one in shared]
    rest = weights if same else [[one.numel()] for one in extra]
    found = [*weights, *([one.numel()] for one in statistic), *rest]
    # A complex number is two real ones.
    pieces = [
        [count * (one.numel() // max(1, sum(of))) for count in of]
        for one, of in zip(like, found, strict=True)
    ]
    return like, pieces


def _untrained(
    model: nn.Module, algorithm: Algorithm, padding: Sequence[PaddingRow], like: Sequence[Tensor]
) -> list[Tensor]:
    """Return masks of the numbers of a contribution that no client trains.

    Empty without padding.
    """
    if not padding:
        return []
    trained = trainable_by_name(model).items()
    marks = {name: torch.zeros_like(one, dtype=torch.bool) for name, one in trained}
    for name, row in padding:
        marks[name][row] = True
    flat = FlatParameters(model)
    whole = [torch.cat([marks[name].reshape(-1) for name, _ in group]) for group in flat.names]
    shared = algorithm.shared(whole)
    extra = list(algorithm.down())
    same = [one.numel() for one in extra] == [one.numel() for one in shared]
    between = len(like) - len(shared) - len(extra)
    ends = shared if same else [torch.zeros_like(one, dtype=torch.bool) for one in extra]
    masks = [
        *shared,
        *(torch.zeros_like(one, dtype=torch.bool) for one in like[len(shared) :][:between]),
        *ends,
    ]
    # A complex number is two real ones.
    return [
        mask.view(-1, 1).expand_as(one) if one.ndim > mask.ndim else mask.view_as(one)
        for mask, one in zip(masks, like, strict=True)
    ]


def _pieces(flat: FlatParameters, algorithm: Algorithm) -> list[list[int]]:
    """Return the number of elements of each parameter in each flat tensor of the shared weights."""
    # Each weight is replaced by its parameter's number; the algorithm then removes the weights
    # that stay with each client.
    numbered = []
    for buffer, group in zip(flat.buffers, flat.names, strict=True):
        counts = torch.tensor([math.prod(shape) for _, shape in group])
        which = torch.repeat_interleave(torch.arange(len(group)), counts).to(buffer.device)
        numbered.append(which)
    return [
        torch.unique_consecutive(which, return_counts=True)[1].tolist()
        for which in algorithm.shared(numbered)
    ]
