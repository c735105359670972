"""DP-SGD: what a step of training tells of any single example is bounded.

    batch      every example by its own coin, with probability q = B / n     (`poisson`)
    clip       g_i <- g_i · min(1, C / ‖g_i‖)                                 (`per_example`)
    noise      sum of the g_i + N(0, z² C²) on every coordinate, but for rows of padding
    gradient   that sum / B; the optimizer and all that follows may do with it what they like

B is the expected batch, and not the one that the coins gave: how many examples were in a batch is
nobody's to know. For the same reason steps count B examples each. Every trained parameter gets
noise, also one that the batch has not used. Only rows to which no example has a gradient are left
as they are (`padding`).

epsilon after T steps is that of T releases of rate q and noise z (`dure.privacy.accountant`). It is
about the trained weights and all gradients on the way. Outside of it are losses and metrics, which
are shown without noise, and choices that were made by them, such as where to stop or which learning
rate to take.

Noise and coins come from the system (`dure.randomness.secret`): a root key is drawn when the run
begins, or goes on, and is written nowhere. With draws = seed they follow from the run's seed: the
run repeats itself, and epsilon holds only against those who do not know the seed.

Source: M. Abadi et al., "Deep Learning with Differential Privacy", CCS 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.stop import Stop
from dure.contracts.strategy import Proof, examples_for
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.privacy.accountant import (
    Releases,
    check_delta,
    check_epsilon,
    epsilon,
    noise_for,
    times_within,
)
from dure.privacy.dp_sgd import DPSGD
from dure.privacy.padding import clear, padding_rows
from dure.privacy.per_example.proof import choose
from dure.privacy.per_example.way import trained
from dure.privacy.poisson import PoissonBatches
from dure.privacy.promise import Promise
from dure.privacy.protection import check_installed
from dure.privacy.step_count import StepCount
from dure.randomness.keystream import normals, to_grid
from dure.randomness.secret import Secret
from dure.tensors.flat import trained_in


class Budget(NamedTuple):
    """What is wanted: epsilon with its delta. epsilon: None is whatever the noise gives."""

    epsilon: float | None
    delta: float


class Wanted(NamedTuple):
    """DP-SGD as a strategy asks for it."""

    settings: DPSGD
    budget: Budget


def wanted(settings: DPSGD | None, epsilon: float | None, delta: float) -> Wanted | None:
    """What the fields of a strategy ask for."""
    return None if settings is None else Wanted(settings, Budget(epsilon, delta))


def steps_within(stop: Stop, examples: int, batch_size: int | None) -> int:
    """The steps that a run has at the most. Raises ValueError where nothing says how many."""
    each = examples if batch_size is None else min(batch_size, examples)
    limits = []
    if stop.steps is not None:
        limits.append(math.ceil(stop.steps))
    if stop.epochs is not None:
        # As `Stop.reached` counts, without what floats add to whole numbers.
        limits.append(math.ceil(stop.epochs * examples * (1 - 1e-12) / each))
    if not limits:
        raise ValueError(
            "an epsilon is for a number of steps, and nothing says how many: give steps or epochs"
        )
    return min(limits)


def planned(
    settings: DPSGD | None, budget: Budget, stop: Stop, examples: int, batch_size: int | None
) -> DPSGD | None:
    """The settings with the noise that an epsilon asks for, where they have none.

    Raises ValueError for an epsilon without settings, or for a run of any length.
    """
    if settings is None:
        if budget.epsilon is not None:
            raise ValueError("an epsilon needs privacy=dp-sgd:C, with the largest norm C")
        return None
    check_installed()
    check_delta(budget.delta)
    if budget.epsilon is None:
        return settings
    check_epsilon(budget.epsilon)
    rate = 1.0 if batch_size is None else min(1.0, batch_size / examples)
    if settings.noise:
        _check_one_step(settings, budget.epsilon, budget.delta, rate)
        return settings
    times = steps_within(stop, examples, batch_size)
    return replace(settings, noise=noise_for(budget.epsilon, budget.delta, rate, times))


def _check_one_step(settings: DPSGD, most: float, delta: float, rate: float) -> None:
    """Raise ValueError where not even one step keeps to the budget."""
    told = epsilon([Releases(rate, settings.noise)], delta)
    if told > most:
        raise ValueError(
            f"one step alone tells an epsilon of {told:.4g}, and the budget is {most}: take more "
            f"noise than {settings.noise}, or leave the noise out for the one that fits"
        )


def promise(settings: DPSGD, rate: float, delta: float, repeats: bool | None = None) -> Promise:
    """What DP-SGD promises, in words.

    repeats: whether the noise follows from the run's seed; by default as the settings say.
    """
    against = "whoever sees the weights and gradients of the run, but not its losses and metrics"
    if settings.draws == "seed" if repeats is None else repeats:
        against += ", and does not know its seed, from which the noise was drawn"
    return Promise(
        unit="example",
        delta=delta,
        sampling="all" if rate == 1 else "coins",
        against=against,
    )


def root_of(settings: DPSGD, seed: int, share: Callable[[bytes], bytes]) -> Secret:
    """Where the draws of a run come from.

    share: given a key, gives the first rank's.
    """
    if settings.draws == "seed":
        return Secret.simulated(seed)
    return Secret.shared(share(Secret.system().key("dp-sgd root")))


def noised_mean(
    sums: Sequence[Tensor], settings: DPSGD, expected: float, secret: Secret, *position: int
) -> list[Tensor]:
    """The gradient of a step, of the sums of clipped gradients: (sum + noise) / expected batch.

    position: of the step, for which noise is drawn once.
    """
    if not settings.noise:
        return [total / expected for total in sums]
    deviation = settings.clip * settings.noise
    # As one: a key, and what is done with it, takes as long as thousands of numbers.
    whole = torch.cat([total.detach().reshape(-1) for total in sums])
    noised = _noised(whole, secret.key("dp-sgd noise", *position), deviation, expected)
    pieces = torch.split(noised, [total.numel() for total in sums])
    return [
        piece.view(total.shape).to(total.dtype) for piece, total in zip(pieces, sums, strict=True)
    ]


def _noised(sums: Tensor, key: bytes, deviation: float, expected: float) -> Tensor:
    """(sums + noise) / expected, a piece after the other: all that is done stays in the cache."""
    exact = sums.cpu()
    out = torch.empty_like(exact)
    at = 0
    for noise in normals(key, len(exact)):
        piece = slice(at, at + len(noise))
        noised = to_grid(noise.mul_(deviation).add_(exact[piece]), deviation)
        out[piece] = noised.mul_(1 / expected)
        at += len(noise)
    return out.to(sums.device)


class ExampleLevel:
    """DP-SGD at work on one rank.

    examples: the training data. group: the ranks, which all draw the same. folder: of the run; rank
    0 counts steps there. Raises ValueError for a model or a loss that cannot be trained so
    (`dure.privacy.per_example.proof`).
    """

    def __init__(
        self,
        wanted: Wanted,
        task: Task,
        model: nn.Module,
        examples: Examples,
        *,
        batch_size: int | None,
        seed: int,
        group: Group,
        folder: Path | None,
    ) -> None:
        self.settings, self.budget = settings, _ = wanted
        self.group = group
        self.secret = secret = root_of(settings, seed, group.broadcast_bytes)
        self.parameters = trained(model)
        self.named = trained_in(model)
        self.padding = padding_rows(task, model)
        self.way = choose(task, model, examples).made(model)
        self.batches = PoissonBatches(len(examples), batch_size, secret)
        self._within = 0
        # What a seed repeats is the same step again: it tells nothing more.
        counts = settings.draws == "system" and group.rank == 0
        self.count = StepCount(folder if counts else None, self.batches.steps_per_epoch)
        self._agree()

    def _agree(self) -> None:
        """All ranks go on from the count of rank 0."""
        self.count.spent = int(self.group.all_gather_values([float(self.count.spent)])[0][0])

    @property
    def expected(self) -> int:
        """B, the examples of a batch in the mean."""
        return self.batches.batch_size

    def clipped(self, inputs: Any, targets: Any) -> tuple[list[Tensor], float]:
        """(sums of clipped gradients, sum of losses) of some examples of a batch.

        The second is not finite where the gradient of an example is not: no clip bounds that.
        """
        found = self.way.clipped(inputs, targets, self.settings.clip)
        if not bool(found.norms.isfinite().all()):
            return found.sums, math.nan
        return found.sums, float(found.losses.double().sum())

    def nothing(self) -> list[Tensor]:
        """The sums of no examples."""
        return [torch.zeros_like(parameter) for parameter in self.parameters]

    def gradients(self, sums: Sequence[Tensor], step: int) -> None:
        """Leaves a step's gradient in the parameters, of the sums over its whole batch."""
        found = noised_mean(sums, self.settings, self.expected, self.secret, step)
        clear(self.padding, dict(zip(self.named, found, strict=True)))
        for parameter, gradient in zip(self.parameters, found, strict=True):
            parameter.grad = gradient

    def begin(self) -> None:
        """A step is about to be done."""
        self.count.begin()

    def exhausted(self) -> str | None:
        """ "epsilon" where one more step would tell more than may be told."""
        most = self.budget.epsilon
        if most is None or self.count.spent < self._within:
            return None
        # A block is looked at at once: that takes longer than many a step.
        block = self.batches.steps_per_epoch
        if self._told(self.count.spent + block) <= most:
            self._within = self.count.spent + block
        else:
            rate, noise = self.batches.rate, self.settings.noise
            self._within = times_within(
                most, [], rate, noise, self.budget.delta, self.count.spent + block
            )
        return None if self.count.spent < self._within else "epsilon"

    def _told(self, steps: int) -> float:
        """The epsilon of so many steps."""
        return epsilon([Releases(self.batches.rate, self.settings.noise, steps)], self.budget.delta)

    @property
    def epsilon(self) -> float:
        """What all steps so far have told, the lost ones too."""
        return self._told(self.count.spent)

    def state(self) -> dict[str, Any]:
        """For checkpoints: no noise, and no key."""
        return {"spent": self.count.spent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, and from what was charged after it."""
        self.count.restore(state["spent"])
        self._agree()

    def facts(self) -> dict[str, Any]:
        """For the summary and the report."""
        bound = self.epsilon if self.settings.noise else None
        return {
            **promise(self.settings, self.batches.rate, self.budget.delta).facts(bound),
            "mechanism": str(self.settings),
            "clip": self.settings.clip,
            "noise": self.settings.noise,
            "rate": self.batches.rate,
            "steps": self.count.spent,
            "gradients": self.way.name,
        }


def proven(task: Task, model: nn.Module) -> Proof:
    """What was tried of the model. Raises ValueError if DP-SGD cannot train it."""
    return choose(task, model, examples_for(task)[0]).proof


def told(wanted: Wanted | None, label: str) -> str:
    """The label of a strategy with what it protects."""
    return label if wanted is None else f"{label} {wanted.settings}"
