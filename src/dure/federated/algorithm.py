"""Hooks of a federated algorithm: the work of clients, and the use of their updates.

The default of every hook is FedAvg's. An algorithm is a file with a strategy (its hyperparameters)
and, if needed, a class with the hooks that it overrides. The hooks of both sides are in a single
class, so that a file describes the whole algorithm. The server and the clients have separate
instances: the server calls the server's hooks and the clients call the clients' hooks, and neither
side sees the other's state.

A round calls on the client side `jobs`, `objective` in each step, and `answer`; then on the server
side `share` for each update, `step`, `absorb`, and before the next round `down`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from dure.contracts.task import Task
from dure.federated.engines.job import ClientJob, JobResult
from dure.federated.engines.objective import LocalBatch
from dure.federated.engines.optimizers import optimizer_of
from dure.protocol.messages import Assignment, Update
from dure.tensors.flat import FlatParameters

ClientMemory = list[Tensor]
"""Client state between rounds; never sent."""


class PersonalisedModel(NamedTuple):
    """A client's personalised model. buffers: None for the buffers of the global model."""

    weights: Sequence[Tensor]
    buffers: Sequence[Tensor] | None = None


class AlgorithmInputs(NamedTuple):
    """Inputs from which a strategy builds its algorithm.

    weights: of the model's trained parameters (`dure.tensors.flat.trainable_parameters`), one flat
    tensor per dtype; frozen parameters are in the model alone. lr: of the clients' optimizer, NaN
    for an optimizer without a learning rate.
    """

    model: nn.Module
    weights: Sequence[Tensor]
    clients: int
    lr: float


def algorithm_inputs_of(task: Task, model: nn.Module, clients: int) -> AlgorithmInputs:
    """Return the `AlgorithmInputs` of an algorithm for the model and `clients` clients."""
    # The optimizer serves only to read the rate; the engine makes the clients' optimizers.
    optimizer = optimizer_of(task, list(model.parameters()))
    lr = float(optimizer.param_groups[0].get("lr", float("nan")))
    return AlgorithmInputs(model, FlatParameters(model).copy(), clients, lr)


class Algorithm:
    """FedAvg, with the hooks that other algorithms override."""

    mixes_models: ClassVar[bool] = False
    """Whether the server mixes in the clients' models, x_start + Δ, instead of their changes."""

    alike: bool = False
    """Whether all updates weigh the same, whatever their number of examples."""

    passes: int = 1
    """Gradients that a client computes per example of a step; scales its virtual time."""

    @property
    def answers(self) -> bool:
        """Whether the algorithm overrides `answer`: a client then sends other values."""
        return type(self).answer is not Algorithm.answer

    @property
    def divides(self) -> bool:
        """Whether a part of the model belongs to each client.

        `shared` then leaves the part out, and the algorithm overrides `kept`.
        """
        return type(self).kept is not Algorithm.kept

    @property
    def has_own_step(self) -> bool:
        """Whether the algorithm overrides `step`; the server then stores the updates of a round."""
        return type(self).step is not Algorithm.step

    @property
    def has_own_objective(self) -> bool:
        """Whether the algorithm overrides `objective`, which replaces the task's loss."""
        return type(self).objective is not Algorithm.objective

    # Hooks of the server

    def shared(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the part of the model's weights that the server holds and sends."""
        return list(weights)

    def whole(self, shared: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights of the model that is evaluated.

        By default these are the shared weights. An algorithm that divides the model adds `kept`,
        the combined parts of the clients.
        """
        return list(shared)

    def down(self) -> Sequence[Tensor]:
        """Return the tensors that the server sends besides the model."""
        return ()

    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        """Return (scale, weight) of an update: its factor, and its weight in the mean.

        staleness: number of models made since the client's start model.
        """
        return 1.0, update.weight

    def step(
        self, weights: Sequence[Tensor], mean: Sequence[Tensor], updates: Sequence[Update]
    ) -> Sequence[Tensor]:
        """Return the new weights, by default w + Δ, towards which the server optimizer steps.

        Args:
            weights: w, of the global model; may be changed in place.
            mean: Δ, the aggregate of the updates as `share` scales and weighs them; may be changed
                in place.
            updates: the aggregated updates, in order of client, as they were sent; must not be
                changed.

        The server optimizer steps along the returned weights minus w. With plain SGD and a rate of
        1, the default, the new model is the returned weights. An override keeps the updates of all
        clients of a round in memory at once.
        """
        return [w + d for w, d in zip(weights, mean, strict=True)]

    def expects(self, asked: Assignment) -> Sequence[Tensor]:
        """Return tensors with the number, shapes and dtypes of a valid update's extras."""
        return asked.extra

    def absorb(self, extra: list[Tensor], updates: float) -> None:
        """Take the mean of the extras of `updates` updates, the updates of the new model.

        With user-level differential privacy the mean is a noised sum, divided by the expected
        number of updates.
        """

    def state(self) -> Any:
        """Return the server state besides the model, as a tree for checkpoints."""
        return None

    def restore(self, state: Any) -> None:
        """Restore the result of `state`."""

    # Hooks of the clients

    def jobs(
        self, job: ClientJob, assignment: Assignment, memory: ClientMemory | None
    ) -> list[ClientJob]:
        """Return the training jobs of the client.

        job: FedAvg's job. memory: the client's state; None before its first update.
        """
        return [job]

    def objective(self, batch: LocalBatch) -> Tensor:
        """Return the loss that a client minimises on a batch, a scalar tensor: the task's loss.

        Engines compute an override for one client after another (the engines loop, loop-processes
        and loop-ray), also when they tune a client's personalised model (`fine_tune`).
        """
        return batch.loss(batch.model(batch.inputs))

    def answer(
        self,
        jobs: list[ClientJob],
        trained: list[JobResult],
        assignment: Assignment,
        memory: ClientMemory | None,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], ClientMemory | None]:
        """Return (delta, extra, memory): the client's update, its extras, and its new state.

        The client stores the new state after the server has accepted the update.
        """
        return trained[0].delta, (), memory

    def sent_buffers(self, result: JobResult, assignment: Assignment) -> Sequence[Tensor]:
        """Return the buffers that the client sends, by default those of its trained model."""
        return result.buffers

    def own(
        self, shared: Sequence[Tensor], memory: ClientMemory | None
    ) -> PersonalisedModel | None:
        """Return the client's personalised model, given the shared weights; None without any."""
        return None

    def kept(self, memories: Mapping[int, ClientMemory]) -> Sequence[Tensor]:
        """Return the clients' parts of the model, combined, for the part that `shared` leaves out.

        The result is the mean over the clients that took part. memories: state by client.
        """
        return ()
