"""Interface between a coordinator and its clients: events, actions and the carrier of messages.

The coordinator (`dure.federated.server.coordinator`) takes events with their times and returns
actions. A carrier (a simulation under a virtual clock, or a server on a network) carries out the
actions and reports their results as events. Neither side depends on the implementation of the
other. Server and clients exchange only messages of `dure.protocol.messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dure.protocol.messages import (
    Assignment,
    EvaluationRequest,
    EvaluationResults,
    JoinMessage,
    PersonalisedMean,
    ProtocolAnswer,
    ProtocolStep,
    Refuse,
    Update,
    UpdateOutcomes,
)


class Assign(NamedTuple):
    """Send the assignment to its client."""

    assignment: Assignment


class Combine(NamedTuple):
    """Make a new model of the updates with these assignment ids, added in this order."""

    tickets: list[int]


Action = Assign | Refuse | Combine


# Protocols instead of base classes: this package imports neither the server nor the clients.
class CoordinatorProtocol(Protocol):
    """Interface of a coordinator that a carrier uses.

    `wake` is the time in seconds, on the federation's clock, at which the coordinator needs the
    next `tick`. `synchronous` is True if the run has rounds; the end of a round ends all its
    assignments. A carrier that simulates its clients knows which clients are available, and does
    not send the events of arrivals and departures.
    """

    wake: float
    synchronous: bool

    @property
    def combining(self) -> list[int]:
        """Assignment ids of the last `Combine`, until the model of these updates exists."""

    def arrive(self, client: int, examples: int | None = None) -> None:
        """Register an available client with its number of examples; assign no work yet."""

    def check_in(self, client: int, now: float, examples: int | None = None) -> list[Action]:
        """Register an available client with its number of examples, and return actions."""

    def require_clients(self, fewest: int) -> None:
        """Require updates of at least `fewest` clients for every model from now on."""

    def leave(self, client: int) -> None:
        """Remove a client that has no open assignment."""

    def update(self, ticket: int, now: float) -> list[Action]:
        """Report that the carrier has received an update."""

    def failed(self, ticket: int, reason: str, now: float) -> list[Action]:
        """Report that an assignment ends without an update."""

    def missing(self, ticket: int, now: float) -> list[Action]:
        """Report that the client of an assignment has stopped responding, and may return."""

    def back(self, ticket: int, now: float) -> list[Action]:
        """Report that the client of an assignment is back and continues the same assignment."""

    def expired(self, ticket: int, now: float) -> list[Action]:
        """Report the timeout of an assignment that no deadline of a round ends."""

    def tick(self, now: float) -> list[Action]:
        """Report that the time is `now`, in seconds on the federation's clock."""

    def assignment(self, ticket: int) -> Assignment:
        """Return the assignment of a client whose assignment is still open."""

    def expects(self, asked: Assignment) -> Sequence[Tensor]:
        """Return tensors with the shapes and dtypes that the extras of an answer must have."""

    def waits_for(self, ticket: int) -> bool:
        """Return whether an update with this assignment id would count."""


class AssignmentCost(NamedTuple):
    """Cost of an assignment: optimizer steps, gradients of single examples, bytes uploaded."""

    steps: int
    examples: int
    up: int


# A class besides the message, because in a simulation the clock of the carrier decides when the
# work began and how much of the work is done before the deadline.
class ClientOrder(NamedTuple):
    """An assignment that a client works on.

    `began` is the time at which the client received the assignment. `work` is the part of the
    assignment that the client computes.
    """

    assignment: Assignment
    began: float
    work: AssignmentCost


class Clients(Protocol):
    """Clients' side of a federation whose clients live in the same process.

    `partial` is True if a client whose time runs out sends its unfinished update; otherwise it
    sends nothing. `checked` is True if the clients have checked that the numbers of their updates
    are finite, buffers excepted. An update with a failure has no numbers.
    """

    partial: bool
    checked: bool

    def join(self) -> JoinMessage:
        """Return the message that introduces the clients."""

    def work(self, assignment: Assignment, now: float, most: float | None = None) -> AssignmentCost:
        """Return the cost of the assignment at time `now`, for at most `most` examples."""

    def train(
        self, orders: Sequence[ClientOrder], ahead: Sequence[ClientOrder]
    ) -> Iterator[Update]:
        """Yield the updates of `orders`, in order.

        `ahead` are orders whose updates the carrier will request soon; an implementation may
        compute them together with `orders`.
        """

    def hold(self, update: Update, asked: Assignment) -> None:
        """Store an update at its client, which answers the steps of a protocol about the update."""

    def answer(self, say: ProtocolStep) -> ProtocolAnswer | None:
        """Return the client's answer to a protocol step; None if the client has left."""

    def settle(self, settled: UpdateOutcomes) -> None:
        """Report to the clients which updates counted."""

    def measure(self, measure: EvaluationRequest) -> EvaluationResults:
        """Evaluate the model, and the clients' own models, on the clients' held-out examples."""

    def losses(
        self,
        clients: Sequence[int],
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
        now: float,
    ) -> list[tuple[float, int]]:
        """Return (mean loss, number of examples) of a model on each client's training examples."""

    def kept(self) -> PersonalisedMean:
        """Return the clients' mean values for the personalised part of the model."""

    def facts(self) -> Mapping[str, Any]:
        """Return facts about how the clients compute, for the report."""

    def state(self) -> Any:
        """Return the clients' state as a tree for checkpoints."""

    def restore(self, state: Any) -> None:
        """Restore a tree that `state` has returned."""


class Draft(Protocol):
    """Unfinished result of `Carrier.once`, for a server that restarts before completion."""

    def kept(self) -> dict[str, Any] | None:
        """Return the tree stored last for the unfinished result; None without a stored tree."""

    def keep(self, tree: dict[str, Any]) -> None:
        """Store the tree durably, until the result is complete."""


class Carrier(Protocol):
    """Transport of messages between a server and its clients, from the server's point of view.

    Args:
        now: Seconds on the federation's clock.
        flown: Records of assignments that have ended since the list was last emptied.
        checked: Whether the sender of an update has checked that its numbers are finite, buffers
            excepted. Always False for a network, whose senders are not trusted.
        answer_timeout: Timeout in seconds of a round or of an assignment for which the pacing sets
            no deadline; None for no timeout, if clients never disappear silently.
        patient: Whether the server logs unsuccessful attempts and continues, because clients may
            arrive later, rather than raise an error.
        clock_is: Name of `now` in the history: virtual_seconds of a simulation, wall_seconds of a
            network.
    """

    answer_timeout: float | None
    patient: bool
    clock_is: str
    flown: list[AssignmentRecord]
    checked: bool

    @property
    def now(self) -> float:
        """Seconds on the federation's clock."""

    def join(self) -> JoinMessage:
        """Return the message that introduces the clients."""

    def carry(self, coordinator: CoordinatorProtocol) -> Combine:
        """Carry messages until the coordinator can make a new model."""

    def updates(self, coordinator: CoordinatorProtocol, tickets: Sequence[int]) -> Iterator[Update]:
        """Yield the updates with these assignment ids, in order."""

    def hold(self, coordinator: CoordinatorProtocol, tickets: Sequence[int]) -> None:
        """Leave the updates with these assignment ids at their clients, for `exchange`."""

    def exchange(self, says: Sequence[ProtocolStep]) -> Iterator[ProtocolAnswer]:
        """Send protocol steps to their clients and yield the answers in arrival order.

        The iterator ends when every client has answered, has left or has timed out. An answer has
        the ticket and the stage of its `ProtocolStep`, and the tensors that the `ProtocolStep`
        wants. The carrier does not store answers. May be called only within `once`.
        """

    def once(self, what: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `make`, a tree of plain values and tensors, computed exactly once.

        For results that cannot, or must not, be computed a second time with other values: random
        samples, noise, answers of clients. The carrier stores the result durably before it returns
        it. A server that resumes from an earlier checkpoint gets the stored result, and does not
        call `make`. The parameter `what` is the name of the result.
        """

    @property
    def draft(self) -> Draft | None:
        """Draft of the result of `once`; None if `make` reproduces the result bit for bit."""

    def settle(self, settled: UpdateOutcomes) -> None:
        """Report to the clients which updates counted."""

    def made(self, number: int, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Publish the newest global model."""

    def ended(self, reason: str) -> None:
        """Report that the run has ended by this limit; "interrupt" for a run that may resume."""

    def measure(self, measure: EvaluationRequest) -> EvaluationResults:
        """Have the clients evaluate a model."""

    def kept(self) -> PersonalisedMean:
        """Request the clients' mean values for the personalised part of the model."""

    def losses(
        self, clients: Sequence[int], weights: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> list[float]:
        """Request the mean loss of a model on each client's training examples.

        Returns a float per client; NaN for a client that does not answer. Raises ValueError if
        the carrier cannot request losses.
        """

    def answers_left(self, different: bool) -> float:
        """Return how many more updates may arrive before clients exceed their transfer quotas.

        `different` is True to count updates of distinct clients. Returns inf without quotas.
        """

    def facts(self) -> Mapping[str, Any]:
        """Return facts about how the clients compute, for the report."""

    def saved(self) -> None:
        """Report that the newest `state` is stored durably."""

    def state(self) -> Any:
        """Return the complete state of the carrier as a tree for checkpoints."""

    def restore(self, state: Any) -> None:
        """Restore a tree that `state` has returned."""


STEP = "step"
"""Outcome of a flight that is a step of a protocol."""


class AssignmentRecord(NamedTuple):
    """Record of an assignment that has ended.

    Args:
        client: Number of the client.
        round: Number of the global model that the client received.
        began: Time at which the assignment was sent, in seconds.
        ended: Time at which the assignment ended, in seconds.
        outcome: "accepted" (the update arrived in time), "late", or the reason of a failure. `STEP`
            marks a step of a protocol on an accepted assignment.
        down: Bytes downloaded.
        up: Bytes uploaded.
        transfer_seconds: Seconds of transfers, on the device's clock.
        compute_seconds: Seconds of computing, on the device's clock.
        examples: Gradients of single examples that the client has computed, if known.
    """

    client: int
    round: int
    began: float
    ended: float
    outcome: str
    down: int
    up: int
    transfer_seconds: float
    compute_seconds: float
    examples: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the client computed or transferred."""
        return self.transfer_seconds + self.compute_seconds
