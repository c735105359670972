"""DP-SGD: training with a bound on the influence of any single example.

    batch      Poisson sampling of examples, with probability q = B / n       (`poisson`)
    clip       g_i <- g_i · min(1, C / ‖g_i‖)                                 (`per_example`)
    noise      sum of the g_i + N(0, z² C²) on every coordinate, except rows of padding
    gradient   that sum / B; the optimizer and all later steps are post-processing

B is the expected batch size, not the sampled size: the number of examples in a batch must stay
secret. For the same reason steps count B examples each. Every trained parameter gets noise, also a
parameter that the batch has not used. Only rows to which no example has a gradient are left
unchanged (`padding`).

epsilon after T steps is that of T releases of rate q and noise z (`dure.privacy.accountant`). The
guarantee covers the trained weights and all gradients on the way. It excludes losses and metrics,
which are shown without noise, and choices based on them, such as the stopping time or the learning
rate.

Noise and samples come from the system (`dure.randomness.secret`): a root key is drawn when the run
begins or resumes, and is never saved. With draws = seed they follow from the run's seed: the run is
reproducible, and epsilon holds only against parties that do not know the seed.

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
from dure.contracts.fresh_model import examples_for
from dure.contracts.learner import Proof
from dure.contracts.stop import Stop
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
from dure.privacy.guarantee import PrivacyGuarantee
from dure.privacy.padding import clear, padding_rows
from dure.privacy.per_example.clipping import trained
from dure.privacy.per_example.proof import choose
from dure.privacy.poisson import PoissonBatches
from dure.privacy.protection import check_installed
from dure.privacy.step_count import StepCount
from dure.randomness.keystream import normals, to_grid
from dure.randomness.secret import Secret
from dure.tensors.flat import trainable_by_name


class PrivacyBudget(NamedTuple):
    """Requested epsilon with its delta. epsilon: None for no limit."""

    epsilon: float | None
    delta: float


class PrivacyRequest(NamedTuple):
    """Request of a strategy for DP-SGD."""

    settings: DPSGD
    budget: PrivacyBudget


def privacy_request(
    settings: DPSGD | None, epsilon: float | None, delta: float
) -> PrivacyRequest | None:
    """Return the request in the fields of a strategy; None without settings."""
    return None if settings is None else PrivacyRequest(settings, PrivacyBudget(epsilon, delta))


def steps_within(stop: Stop, examples: int, batch_size: int | None) -> int:
    """Return the maximum number of steps of a run. Raises ValueError if there is no limit."""
    each = examples if batch_size is None else min(batch_size, examples)
    limits = []
    if stop.steps is not None:
        limits.append(math.ceil(stop.steps))
    if stop.epochs is not None:
        # As `Stop.reached` counts; the factor removes float errors above whole numbers.
        limits.append(math.ceil(stop.epochs * examples * (1 - 1e-12) / each))
    if not limits:
        raise ValueError("an epsilon needs a number of steps: give steps or epochs")
    return min(limits)


def planned(
    settings: DPSGD | None, budget: PrivacyBudget, stop: Stop, examples: int, batch_size: int | None
) -> DPSGD | None:
    """Return the settings, with the noise for the requested epsilon if they have none.

    Args:
        settings: settings of DP-SGD; None without DP-SGD.
        budget: requested epsilon and delta.
        stop: limits of the run.
        examples: number of training examples.
        batch_size: B; None for all examples.

    Raises:
        ValueError: there is an epsilon without settings, or no limit on the number of steps.
    """
    if settings is None:
        if budget.epsilon is not None:
            raise ValueError("an epsilon needs privacy=dp-sgd:C, with the clipping norm C")
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
    """Raise ValueError if a single step exceeds the budget."""
    told = epsilon([Releases(rate, settings.noise)], delta)
    if told > most:
        raise ValueError(
            f"one step alone costs an epsilon of {told:.4g}, but the budget is {most}: give more "
            f"noise than {settings.noise}, or leave the noise out to choose it automatically"
        )


def dp_sgd_guarantee(
    settings: DPSGD, rate: float, delta: float, repeats: bool | None = None
) -> PrivacyGuarantee:
    """Return the guarantee of DP-SGD.

    repeats: whether the noise follows from the run's seed; by default from the settings.
    """
    against = "whoever sees the weights and gradients of the run, but not its losses and metrics"
    if settings.draws == "seed" if repeats is None else repeats:
        against += ", and does not know its seed, from which the noise was drawn"
    return PrivacyGuarantee(
        unit="example",
        delta=delta,
        sampling="all" if rate == 1 else "coins",
        against=against,
    )


def root_of(settings: DPSGD, seed: int, share: Callable[[bytes], bytes]) -> Secret:
    """Return the source of a run's random numbers.

    share: given a key, returns the key of rank 0.
    """
    if settings.draws == "seed":
        return Secret.simulated(seed)
    return Secret.shared(share(Secret.system().key("dp-sgd root")))


def noised_mean(
    sums: Sequence[Tensor], settings: DPSGD, expected: float, secret: Secret, *position: int
) -> list[Tensor]:
    """Return the gradient of a step from sums of clipped gradients: (sum + noise) / expected batch.

    position: of the step, for which noise is drawn once.
    """
    if not settings.noise:
        return [total / expected for total in sums]
    deviation = settings.clip * settings.noise
    # Concatenated, because setting up a key takes as long as drawing thousands of numbers.
    whole = torch.cat([total.detach().reshape(-1) for total in sums])
    noised = _noised(whole, secret.key("dp-sgd noise", *position), deviation, expected)
    pieces = torch.split(noised, [total.numel() for total in sums])
    return [
        piece.view(total.shape).to(total.dtype) for piece, total in zip(pieces, sums, strict=True)
    ]


def _noised(sums: Tensor, key: bytes, deviation: float, expected: float) -> Tensor:
    """Return (sums + noise) / expected, piece by piece, so that each piece stays in the cache."""
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
    """DP-SGD at a rank.

    Args:
        wanted: settings and budget.
        task: the task.
        model: the model.
        examples: the training data.
        batch_size: B; None for all examples.
        seed: the run's seed.
        group: the ranks, which all draw the same numbers.
        folder: of the run; rank 0 counts steps there.

    Raises:
        ValueError: DP-SGD cannot train the model or the loss (`dure.privacy.per_example.proof`).
    """

    def __init__(
        self,
        wanted: PrivacyRequest,
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
        self.named = trainable_by_name(model)
        self.padding = padding_rows(task, model)
        self.way = choose(task, model, examples).made(model)
        self.batches = PoissonBatches(len(examples), batch_size, secret)
        self._within = 0
        # With a seed, a repeated step has the same noise and costs no further privacy.
        counts = settings.draws == "system" and group.rank == 0
        self.count = StepCount(folder if counts else None, self.batches.steps_per_epoch)
        self._agree()

    def _agree(self) -> None:
        """Set the count of steps to that of rank 0, at all ranks."""
        self.count.spent = int(self.group.all_gather_values([float(self.count.spent)])[0][0])

    @property
    def expected(self) -> int:
        """B, the expected number of examples of a batch."""
        return self.batches.batch_size

    def clipped(self, inputs: Any, targets: Any) -> tuple[list[Tensor], float]:
        """Return (sums of clipped gradients, sum of losses) of some examples of a batch.

        The loss is NaN if the gradient of an example is not finite, because no clipping bounds it.
        """
        found = self.way.clipped(inputs, targets, self.settings.clip)
        if not bool(found.norms.isfinite().all()):
            return found.sums, math.nan
        return found.sums, float(found.losses.double().sum())

    def nothing(self) -> list[Tensor]:
        """Return the sums for a batch without examples."""
        return [torch.zeros_like(parameter) for parameter in self.parameters]

    def gradients(self, sums: Sequence[Tensor], step: int) -> None:
        """Set the parameters' gradients to a step's noisy gradient, from its sums."""
        found = noised_mean(sums, self.settings, self.expected, self.secret, step)
        clear(self.padding, dict(zip(self.named, found, strict=True)))
        for parameter, gradient in zip(self.parameters, found, strict=True):
            parameter.grad = gradient

    def begin(self) -> None:
        """Charge the next step."""
        self.count.begin()

    def exhausted(self) -> str | None:
        """Return "epsilon" if a further step would exceed the budget, else None."""
        most = self.budget.epsilon
        if most is None or self.count.spent < self._within:
            return None
        # Check a block of steps at once, because a check takes longer than a step may.
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
        """Return the epsilon of this number of steps."""
        return epsilon([Releases(self.batches.rate, self.settings.noise, steps)], self.budget.delta)

    @property
    def epsilon(self) -> float:
        """Epsilon of all steps so far, including steps lost in a crash."""
        return self._told(self.count.spent)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without noise and keys."""
        return {"spent": self.count.spent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, and from steps charged after it."""
        self.count.restore(state["spent"])
        self._agree()

    def facts(self) -> dict[str, Any]:
        """Return the facts for the summary and the report."""
        bound = self.epsilon if self.settings.noise else None
        return {
            **dp_sgd_guarantee(self.settings, self.batches.rate, self.budget.delta).facts(bound),
            "mechanism": str(self.settings),
            "clip": self.settings.clip,
            "noise": self.settings.noise,
            "rate": self.batches.rate,
            "steps": self.count.spent,
            "gradients": self.way.name,
        }


def proven(task: Task, model: nn.Module) -> Proof:
    """Return the proof that DP-SGD can train the model. Raises ValueError if it cannot."""
    return choose(task, model, examples_for(task)[0]).proof


def label_with_privacy(wanted: PrivacyRequest | None, label: str) -> str:
    """Return the label of a strategy with its privacy settings."""
    return label if wanted is None else f"{label} {wanted.settings}"
