"""Between a coordinator and its clients: what the one asks for, and who carries it to the others.

A coordinator answers with actions; a carrier (a simulation under a virtual clock, a server on a
network) does them and tells it what came of them. Neither knows the other's kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol


class Assign(NamedTuple):
    """Send this to its client. assignment: has ticket, client, nbytes and deadline."""

    assignment: Any


class Refuse(NamedTuple):
    """Tell the client that its update does not count, and why."""

    ticket: int
    client: int
    reason: str


class Combine(NamedTuple):
    """A new model can be made of the updates of these tickets, to be taken in this order."""

    tickets: list[int]


Action = Assign | Refuse | Combine


class Coordinator(Protocol):
    """As much of a coordinator as a carrier has to know. wake: when it wants to be told that time
    has passed."""

    wake: float

    def update(self, ticket: int, now: float) -> list[Action]: ...

    def failed(self, ticket: int, reason: str, now: float) -> list[Action]: ...

    def tick(self, now: float) -> list[Action]: ...

    def assignment(self, ticket: int) -> Any: ...

    def waits_for(self, ticket: int) -> bool: ...


class Work(NamedTuple):
    """What an assignment takes: optimizer steps, gradients of single examples, bytes sent up
    afterwards."""

    steps: int
    examples: int
    up: int


class Order(NamedTuple):
    """An assignment that a client works on. began: when it was handed out; work: as much of it as
    it does."""

    assignment: Any
    began: float
    work: Work


class Clients(Protocol):
    """The clients' side. partial: whether they send what they have when time runs out, rather than
    nothing."""

    partial: bool

    @property
    def sizes(self) -> Sequence[int]:
        """Examples of each of them."""

    def work(self, assignment: Any, now: float, most: float | None = None) -> Work:
        """What the assignment takes, of at most so many examples."""

    def train(self, orders: Sequence[Order], ahead: Sequence[Order]) -> Iterator[Any]:
        """The updates of `orders`, in their order. ahead: others that will be asked for soon."""


class Carrier(Protocol):
    """now: seconds on the federation's clock. flown: what became of assignments since it was last
    emptied."""

    now: float
    flown: list[Flight]

    def carry(self, coordinator: Coordinator) -> Combine:
        """Carries messages until the coordinator can make a new model."""

    def updates(self, coordinator: Coordinator, tickets: Sequence[int]) -> Iterator[Any]:
        """The updates of these tickets, one after another."""

    def mark(self) -> Callable[[], None]:
        """A way back to this moment, taken before each `carry`."""

    def state(self) -> Any:
        """Everything that it needs to go on, as a tree for checkpoints."""

    def restore(self, state: Any) -> None:
        """The inverse of `state`."""


class Flight(NamedTuple):
    """What became of an assignment.

    outcome: "accepted" (its update arrived in time), "late", or why it failed. down, up: bytes that
    travelled. Seconds of transfers and of computing are the device's.
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
