"""Trainer engine: clients are trained by a trainer of another library, one after another.

    w <- the job's weights;   the trainer's own steps on the job's batches;   update = w after - w

The engine sets what the round consists of: weights, batches, the algorithm's terms and the seed.
Everything else is the trainer's own (`dure.contracts.trainer`). The batches are those of
`dure.data.batches`, as in every engine: a trainer that computes the same steps as dure's loop has
its bits.

Cost: beside the trainer's own, a copy of the weights into its model and one out of it, each round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dure.contracts.trainer import (
    ClientTrainer,
    ClientTrainers,
    GradientTerms,
    TrainerResult,
    TrainerRound,
)
from dure.data.batches import batches_per_epoch
from dure.data.examples import Examples
from dure.errors import DureError
from dure.federated.engines.job import ClientEngine, ClientJob, JobResult, loss_failure, not_finite
from dure.federated.engines.loop import client_error
from dure.federated.engines.plan import batches
from dure.randomness.seeds import seed_generators
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import FlatParameters
from dure.tensors.frozen import frozen_of


class TrainerEngine(ClientEngine):
    """Engine that lets trainers train.

    Args:
        trainers: of the clients.
        model: a model like the trainers', with the run's frozen weights, which becomes the
            engine's.
        examples: of all clients.
        batch_size: of a client's step; None is all of its data.
        seed: of the run.
    """

    name = "trainer"
    why = "the task has a trainer of its own"

    def __init__(
        self,
        trainers: ClientTrainers,
        model: nn.Module,
        examples: Examples,
        batch_size: int | None,
        seed: int,
    ) -> None:
        self.trainers = trainers
        self.examples = examples
        self.batch_size = batch_size
        self.seed = seed
        self._frozen = frozen_of(model)
        self._buffers = BufferNames(model).names
        flat = FlatParameters(model)
        self._names = flat.names
        self._dtypes = [buffer.dtype for buffer in flat.buffers]
        self._started: set[int] = set()

    def train(self, jobs: Iterable[ClientJob]) -> Iterator[JobResult]:
        """Yield the results in the jobs' order, each computed on demand.

        A client whose loss or weights are not finite has a failure as its result. Raises
        WorkerFailedError, with the client's name, if the trainer raises, and ValueError if it
        cannot train such a job.
        """
        return map(self._train, jobs)

    def close(self) -> None:
        self.trainers.close()

    def _train(self, job: ClientJob) -> JobResult:
        trainer = self.trainers.of(job.client)
        round = self._round(job)
        check_round(trainer, round, self.batch_size, job)
        try:
            if job.client not in self._started:
                trainer.load(self._frozen)
                self._started.add(job.client)
            buffers = dict(zip(self._buffers, job.buffers, strict=True))
            trainer.load({**self._named(job.weights), **buffers})
            seed_generators(self.seed, "client", job.turn, job.client, everything=True)
            found = trainer.run(round)
        except (DureError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise client_error(job, error) from error
        return self._result(job, trainer, found)

    def _round(self, job: ClientJob) -> TrainerRound:
        order, sizes = batches(job, self.batch_size, self.seed, sampling=self.examples.sampling)
        local = self.trainers.local(job.client, order)
        count = job.indices.numel()
        size = count if self.batch_size is None else min(self.batch_size, count)
        per_epoch = batches_per_epoch(count, size, job.joins)
        return TrainerRound(
            number=job.turn,
            batches=torch.split(local, sizes),
            per_epoch=per_epoch,
            first_step=job.first_step % per_epoch,
            terms=self._terms(job),
            look=self.look,
        )

    def _terms(self, job: ClientJob) -> GradientTerms | None:
        anchor = (job.anchor if job.anchor is not None else job.weights) if job.mu else None
        if anchor is None and job.correction is None:
            return None
        return GradientTerms(
            job.mu,
            {} if anchor is None else self._named(anchor),
            {} if job.correction is None else self._named(job.correction),
        )

    def _named(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return flat weights as tensors by the names of their parameters."""
        found: dict[str, Tensor] = {}
        for vector, named in zip(flat, self._names, strict=True):
            start = 0
            for name, shape in named:
                size = torch.Size(shape)
                found[name] = vector[start : start + size.numel()].view(size)
                start += size.numel()
        return found

    def _result(self, job: ClientJob, trainer: ClientTrainer, found: TrainerResult) -> JobResult:
        failure = loss_failure([found.loss])
        if failure is not None:
            return not_finite(failure)
        names = [name for named in self._names for name, _ in named]
        now = trainer.tensors([*names, *self._buffers])
        delta = []
        for before, named in zip(job.weights, self._names, strict=True):
            parts = [now[name].reshape(-1) for name, _ in named]
            delta.append(torch.cat(parts).to(before.device, before.dtype) - before)
        if not all(bool(one.isfinite().all()) for one in delta):
            return not_finite("its weights became not finite")
        return JobResult(
            delta=delta,
            buffers=[
                now[name].to(before.device, before.dtype).clone()
                for name, before in zip(self._buffers, job.buffers, strict=True)
            ],
            samples=found.samples,
            loss=found.loss,
            counted=found.counted,
            steps=found.steps,
        )


def check_round(
    trainer: ClientTrainer, round: TrainerRound, batch_size: int | None, job: ClientJob
) -> None:
    """Check that a trainer can train a job as the run asks.

    Raises ValueError for another batch size, and for what the trainer says that it cannot do.
    """
    if job.measures is not None:
        raise ValueError(f"{trainer.name} trains, and cannot measure a {job.measures}")
    if job.lr_factor != 1:
        raise ValueError(
            f"{trainer.name} has a schedule of its own: leave lr_schedule out of the task"
        )
    check_step(trainer, batch_size, job.indices.numel())
    why = trainer.cannot(round)
    if why is not None:
        raise ValueError(f"{trainer.name} cannot train this: {why}")


def check_trained(strategy: Any, trainer: ClientTrainer) -> None:
    """Check that a system trains its clients by steps of a trainer. Raises ValueError."""
    if not strategy.trains_by_steps:
        raise ValueError(
            f"{strategy.name} does not train its clients by plain steps, and {trainer.name} makes "
            "no others: use fed-avg, fed-prox, scaffold or another system of local training"
        )


def check_step(trainer: ClientTrainer, batch_size: int | None, count: int) -> None:
    """Check that a trainer's steps have as many examples as the run asks for.

    count: examples of the client. Raises ValueError.
    """
    asked = count if batch_size is None else min(batch_size, count)
    if min(trainer.batch_size, count) != asked:
        raise ValueError(
            f"the run asks for steps of {asked} examples, but a step of {trainer.name} has "
            f"{trainer.batch_size} (batch size · accumulation · ranks): give the run "
            f"batch_size={trainer.batch_size}, or change the trainer's"
        )
