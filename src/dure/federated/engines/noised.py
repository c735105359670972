"""DP-SGD in a client's local training: noise on every step, before any other party sees a result.

    batch     Poisson sampling of the client's examples, with q = B / n of the client
    gradient  (sum of clipped gradients + N(0, z² C²)) / B         (`dure.privacy.example_level`)

An update consists of such gradients alone, so that it reveals no more of an example than they do,
to the server or to any other party. The client's number of steps is public, and so is n, by which
updates weigh. The loss on the client's batches is reported without noise.

Noise and samples are drawn for (client, turn, step), once each. In a simulation they follow from
the seed; a deployed client draws them from its operating system.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.federated.engines.job import ClientJob
from dure.privacy.dp_sgd import DPSGD
from dure.privacy.example_level import noised_mean
from dure.privacy.padding import clear, padding_rows
from dure.privacy.per_example.clipping import trained
from dure.privacy.per_example.proof import choose
from dure.privacy.poisson import PoissonBatches
from dure.randomness.secret import Secret
from dure.tensors.flat import trainable_by_name


class StepNoise(NamedTuple):
    """Settings of DP-SGD, and the secret source of noise and samples."""

    settings: DPSGD
    secret: Secret


class NoisedSteps:
    """Gradients of DP-SGD for an engine whose model all clients share.

    Args:
        noised: settings of DP-SGD, and the secret.
        task: the task of the run.
        model: the engine's model.
        examples: training examples of all clients.
        batch_size: expected size of a client's batch; None is all of its data.

    Raises:
        ValueError: the model or the loss does not support DP-SGD.
    """

    def __init__(
        self,
        noised: StepNoise,
        task: Task,
        model: nn.Module,
        examples: Examples,
        batch_size: int | None,
    ) -> None:
        self.settings, self.secret = noised
        self.parameters = trained(model)
        self.named = trainable_by_name(model)
        self.padding = padding_rows(task, model)
        self.way = choose(task, model, examples).made(model)
        self.batch_size = batch_size

    def batches(self, job: ClientJob) -> PoissonBatches:
        """Return the Poisson-sampled batches of a job: positions in its indices."""
        examples = job.indices.numel()
        return PoissonBatches(examples, self.batch_size, self.secret, job.client, job.turn)

    def clipped(self, batch: tuple[Any, Any] | None) -> tuple[list[Tensor], float]:
        """Return (sums of clipped gradients, mean loss); batch None is an empty sample.

        The loss is not finite if the gradient of an example is not.
        """
        if batch is None:
            return [torch.zeros_like(parameter) for parameter in self.parameters], 0.0
        found = self.way.clipped(*batch, self.settings.clip)
        finite = bool(found.norms.isfinite().all())
        return found.sums, float(found.losses.double().mean()) if finite else math.nan

    def leave(self, sums: Sequence[Tensor], expected: int, job: ClientJob, step: int) -> None:
        """Store the noised gradient of a job's step in the parameters."""
        position = (job.client, job.turn, step)
        found = noised_mean(sums, self.settings, expected, self.secret, *position)
        clear(self.padding, dict(zip(self.named, found, strict=True)))
        for parameter, gradient in zip(self.parameters, found, strict=True):
            parameter.grad = gradient


def check_noised(wanted: str) -> None:
    """Raise ValueError for an engine that cannot clip per-example gradients."""
    if wanted not in ("auto", "loop", "loop-processes"):
        raise ValueError(
            f"dp-sgd: the engine {wanted} does not clip per-example gradients: use loop, "
            "loop-processes or auto"
        )
