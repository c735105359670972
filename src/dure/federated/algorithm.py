"""What makes one federated algorithm differ from another.

It is what clients are asked to do, and what their answers mean.

The default of every hook is FedAvg's. An algorithm is a file with a strategy (its hyperparameters)
and, where it needs one, a class with the hooks that it changes. The two sides live in one class so
that a file tells the whole story. Each half of a federation has an instance of its own: the server
calls the server's hooks and the clients call the clients', and neither finds there what the other
has put in.

A round calls, on the clients' side, `jobs`, `objective` in each step, and `answer`; then on the
server's `share` for each update, `step`, `absorb`, and before the next round `down`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from dure.contracts.task import Task
from dure.federated.engines.job import Job, Trained
from dure.federated.engines.objective import LocalBatch
from dure.federated.engines.optimizers import optimizer_of
from dure.protocol.messages import Assignment, Update
from dure.tensors.flat import FlatParameters

Memory = list[Tensor]
"""What a client keeps between its rounds; it never travels."""


class Own(NamedTuple):
    """A client's own model. buffers: None where they are the global model's."""

    weights: Sequence[Tensor]
    buffers: Sequence[Tensor] | None = None


class Start(NamedTuple):
    """What an algorithm begins with.

    weights: of the model's trained parameters (`dure.tensors.flat.trained_of`), one flat tensor a
    dtype; what is frozen is in the model alone. lr: of the clients' optimizer, NaN where it has
    none.
    """

    model: nn.Module
    weights: Sequence[Tensor]
    clients: int
    lr: float


def start_of(task: Task, model: nn.Module, clients: int) -> Start:
    """With what an algorithm for the model and so many clients begins."""
    # Only to read the rate; clients' optimizers are made by their engine.
    optimizer = optimizer_of(task, list(model.parameters()))
    lr = float(optimizer.param_groups[0].get("lr", float("nan")))
    return Start(model, FlatParameters(model).copy(), clients, lr)


class Algorithm:
    """FedAvg, and the hooks in which others differ from it."""

    mixes_models: ClassVar[bool] = False
    """Whether the server mixes in the clients' models, x_start + Δ, instead of their changes."""

    alike: bool = False
    """Whether all updates weigh the same, however many examples they are of."""

    passes: int = 1
    """Gradients that a client computes of each example of a step, for its virtual time."""

    @property
    def answers(self) -> bool:
        """Whether `answer` is its own: a client then sends something else than what it computed."""
        return type(self).answer is not Algorithm.answer

    @property
    def divides(self) -> bool:
        """Whether a part of the model belongs to each client.

        Then `shared` leaves it out, and `kept`, its own, tells of it.
        """
        return type(self).kept is not Algorithm.kept

    @property
    def has_own_step(self) -> bool:
        """Whether `step` is its own: the server then keeps the updates of a round."""
        return type(self).step is not Algorithm.step

    @property
    def has_own_objective(self) -> bool:
        """Whether `objective` is its own, which clients minimise in place of the task's loss."""
        return type(self).objective is not Algorithm.objective

    # The server's side

    def shared(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """What of the model's weights the server has, and sends."""
        return list(weights)

    def whole(self, shared: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
        """The model that is measured.

        It is the shared weights and, where there is more, what clients have `kept` there.
        """
        return list(shared)

    def down(self) -> Sequence[Tensor]:
        """What is sent besides the model."""
        return ()

    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        """(scale, weight): the update is scaled, and has this weight in the mean.

        staleness: models made meanwhile.
        """
        return 1.0, update.weight

    def step(
        self, weights: Sequence[Tensor], mean: Sequence[Tensor], updates: Sequence[Update]
    ) -> Sequence[Tensor]:
        """The new weights: w + Δ, along which the strategy's server optimizer goes on.

        weights: w, of the global model. mean: Δ, what the rule of aggregation has made of the
        updates as `share` scales and weighs them. updates: those that made it, in order of client,
        as they were sent. Weights and mean may be changed in place, updates may not. The optimizer
        moves along what comes of this less w; as it is by default, with a rate of 1, the new model
        is what comes of this.

        One of its own needs the updates of all clients of a round in memory at once.
        """
        return [w + d for w, d in zip(weights, mean, strict=True)]

    def expects(self, asked: Assignment) -> Sequence[Tensor]:
        """What an update's extras look like: as many tensors, of the same shapes and types."""
        return asked.extra

    def absorb(self, extra: list[Tensor], updates: float) -> None:
        """Takes the mean of the extras of so many updates, those that made the new model.

        With differential privacy of clients it is a mean over as many as are expected, with noise.
        """

    def state(self) -> Any:
        """What the server keeps besides the model, as a tree for checkpoints."""
        return None

    def restore(self, state: Any) -> None:
        """The inverse of `state`."""

    # The client's side

    def jobs(self, job: Job, assignment: Assignment, memory: Memory | None) -> list[Job]:
        """What the client computes.

        job: FedAvg's; memory: what it kept, None if it has not taken part yet.
        """
        return [job]

    def objective(self, batch: LocalBatch) -> Tensor:
        """What a client minimises on a batch, a tensor of one number: the task's loss.

        One of its own is computed for one client after another (the engines loop, loop-processes
        and loop-ray), also where a client's own model is tuned (`fine_tune`).
        """
        return batch.loss(batch.model(batch.inputs))

    def answer(
        self, jobs: list[Job], trained: list[Trained], assignment: Assignment, memory: Memory | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Memory | None]:
        """(delta, extra, memory): what the client sends of what it computed, and what it keeps.

        It keeps the memory once the update is accepted.
        """
        return trained[0].delta, (), memory

    def own(self, shared: Sequence[Tensor], memory: Memory | None) -> Own | None:
        """The client's own model, given the shared weights; None where it has none."""
        return None

    def kept(self, memories: Mapping[int, Memory]) -> Sequence[Tensor]:
        """What clients have in place of what `shared` leaves out.

        It is the mean over those that took part. memories: of each of them.
        """
        return ()
