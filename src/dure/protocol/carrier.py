"""What lies between a coordinator and its clients: actions, and who carries them out.

A coordinator answers with actions; a carrier (a simulation under a virtual clock, a server on a
network) does them and tells it what came of them. Neither knows the other's kind. All that passes
between the two halves is a message of `dure.protocol.messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dure.protocol.messages import (
    Answer,
    Assignment,
    Join,
    Kept,
    Measure,
    Measured,
    Refuse,
    Say,
    Settled,
    Update,
)


class Assign(NamedTuple):
    """Send this to its client."""

    assignment: Assignment


class Combine(NamedTuple):
    """A new model can be made of the updates of these tickets, to be taken in this order."""

    tickets: list[int]


Action = Assign | Refuse | Combine


# Protocols, and not base classes: this package imports neither of the halves that it joins.
class Coordinator(Protocol):
    """What a carrier has to know of a coordinator.

    wake: when it wants to be told that time has passed. synchronous: whether there are rounds,
    which end all their tickets. Those who simulate clients know where they are, and need none of
    the events that tell of their coming and going.
    """

    wake: float
    synchronous: bool

    @property
    def combining(self) -> list[int]:
        """The tickets of the last `Combine`, until a model was made of them."""

    def arrive(self, client: int, examples: int | None = None) -> None:
        """A client is there, of so many examples; nobody is asked yet."""

    def check_in(self, client: int, now: float, examples: int | None = None) -> list[Action]:
        """A client is there, of so many examples."""

    def keep_to(self, fewest: int) -> None:
        """No model is made of updates of fewer clients from now on."""

    def leave(self, client: int) -> None:
        """A client without a ticket has gone again."""

    def update(self, ticket: int, now: float) -> list[Action]:
        """An update has arrived, and lies with the carrier."""

    def failed(self, ticket: int, reason: str, now: float) -> list[Action]:
        """There will be none."""

    def missing(self, ticket: int, now: float) -> list[Action]:
        """Its client has fallen silent, and may come back."""

    def back(self, ticket: int, now: float) -> list[Action]:
        """Its client has come back, and goes on with the same ticket."""

    def expired(self, ticket: int, now: float) -> list[Action]:
        """Its time is up, where no deadline of a round ends it."""

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""

    def assignment(self, ticket: int) -> Assignment:
        """What a client with an open ticket was sent."""

    def expects(self, asked: Assignment) -> Sequence[Tensor]:
        """What the extras of an answer look like."""

    def waits_for(self, ticket: int) -> bool:
        """Whether an update with this ticket would count."""


class Work(NamedTuple):
    """What an assignment takes: optimizer steps, gradients of single examples, bytes sent up."""

    steps: int
    examples: int
    up: int


# More than the message: in a simulation it is the carrier's clock that says when work began, and
# how much of it is done in time.
class Order(NamedTuple):
    """An assignment that a client works on.

    began: when it was handed out; work: as much of it as it does.
    """

    assignment: Assignment
    began: float
    work: Work


class Clients(Protocol):
    """The clients' side, where all clients live in one process.

    partial: whether they send what they have when time runs out, rather than nothing. checked:
    whether the numbers of what they send are finite, but for buffers; an update with a failure has
    none.
    """

    partial: bool
    checked: bool

    def join(self) -> Join:
        """Their introduction."""

    def work(self, assignment: Assignment, now: float, most: float | None = None) -> Work:
        """What the assignment takes, of at most so many examples."""

    def train(self, orders: Sequence[Order], ahead: Sequence[Order]) -> Iterator[Update]:
        """The updates of `orders`, in their order. ahead: others that will be asked for soon."""

    def hold(self, update: Update, asked: Assignment) -> None:
        """An update stays with its client, which answers steps of a protocol about it."""

    def answer(self, say: Say) -> Answer | None:
        """What a client answers to a step of a protocol; None where it is not in it any more."""

    def settle(self, settled: Settled) -> None:
        """What became of updates."""

    def measure(self, measure: Measure) -> Measured:
        """The model, and their own, on what they have held out."""

    def losses(
        self,
        clients: Sequence[int],
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
        now: float,
    ) -> list[tuple[float, int]]:
        """(mean loss, examples) of a model on the training examples of each of these."""

    def kept(self) -> Kept:
        """What they have in place of a part of the model."""

    def facts(self) -> Mapping[str, Any]:
        """How they compute, for the report."""

    def state(self) -> Any:
        """What clients keep, as a tree for checkpoints."""

    def restore(self, state: Any) -> None:
        """The inverse of `state`."""


class Draft(Protocol):
    """What `Carrier.once` has come to, for a server that is started again before it is made."""

    def kept(self) -> dict[str, Any] | None:
        """The tree that was kept last for what is being made; None where there is none."""

    def keep(self, tree: dict[str, Any]) -> None:
        """The tree is on the disk when this returns, until what is being made is there."""


class Carrier(Protocol):
    """What takes messages between a server and its clients, as the server sees it.

    now: seconds on the federation's clock. flown: what became of assignments since it was last
    emptied. checked: whether whoever computed an update has seen to it that its numbers are finite,
    but for buffers; never true of what comes over a network. lasts: seconds that a round or a
    ticket takes at the most, where the pacing names no deadline; None for no end, where no client
    is ever away without a word. patient: whether the server tells of attempts in vain and goes on,
    rather than to give up: clients may come tomorrow. clock_is: what the history calls `now`:
    virtual_seconds of a simulation, wall_seconds of a network.
    """

    lasts: float | None
    patient: bool
    clock_is: str
    flown: list[Flight]
    checked: bool

    @property
    def now(self) -> float:
        """As above."""

    def join(self) -> Join:
        """Who the clients are."""

    def carry(self, coordinator: Coordinator) -> Combine:
        """Carries messages until the coordinator can make a new model."""

    def updates(self, coordinator: Coordinator, tickets: Sequence[int]) -> Iterator[Update]:
        """The updates of these tickets, one after another."""

    def hold(self, coordinator: Coordinator, tickets: Sequence[int]) -> None:
        """The updates of these tickets are combined, and stay with their clients (`exchange`)."""

    def exchange(self, says: Sequence[Say]) -> Iterator[Answer]:
        """Says these to their clients, and gives what they answer, as it comes.

        It ends once all have answered, are gone, or have taken too long. An answer is one of the
        same ticket and stage, with the tensors that were wanted. What is answered is written
        nowhere. Only within `once`.
        """

    def once(self, what: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `make` gives, a tree of plain values and tensors: once, whatever happens.

        For what cannot be made again to the bit, or must not be: coins, noise, what clients have
        answered. It is on the disk before it is returned, and a server that goes on from an earlier
        state gets the same, and `make` is not called. what: names it.
        """

    @property
    def draft(self) -> Draft | None:
        """Of what is being made; None where it is made again to the bit."""

    def settle(self, settled: Settled) -> None:
        """Tells clients what became of their updates."""

    def made(self, number: int, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """The newest model is this one."""

    def ended(self, reason: str) -> None:
        """The run has ended by this limit; "interrupt" where it may go on."""

    def measure(self, measure: Measure) -> Measured:
        """Has clients measure a model."""

    def kept(self) -> Kept:
        """Asks clients what they have in place of a part of the model."""

    def losses(
        self, clients: Sequence[int], weights: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> list[float]:
        """Asks each of these for the mean loss of a model on its training examples.

        NaN of one that does not answer. Raises ValueError where clients cannot be asked.
        """

    def answers_left(self, different: bool) -> float:
        """How many more updates may come before clients have used up what they may transfer.

        different: of as many clients. inf where nothing is used up.
        """

    def facts(self) -> Mapping[str, Any]:
        """What is known here of how clients compute, for the report."""

    def saved(self) -> None:
        """The newest `state` is on the disk."""

    def state(self) -> Any:
        """Everything that it needs to go on, as a tree for checkpoints."""

    def restore(self, state: Any) -> None:
        """The inverse of `state`."""


STEP = "step"
"""The outcome of a flight that is a step of a protocol."""


class Flight(NamedTuple):
    """What became of an assignment.

    outcome: "accepted" (its update arrived in time), "late", or why it failed; STEP is no
    assignment, but a step of a protocol on one that was accepted. down, up: bytes that
    travelled. Seconds of transfers and of computing are the device's. examples: gradients of single
    examples that it has computed, where that is known.
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
