"""Updates that stay with their clients, which answer the steps of secure aggregation about them.

A client holds an update from its local training until the server says what became of it. Keys and
shares live in memory alone. Once a client has helped to unmask a sum of a round, it is in no other
sum of that round: of two sums, one with it and one without, the difference is its update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from dure.federated.algorithm import Algorithm
from dure.federated.privacy.secure_aggregation.client import Client
from dure.federated.privacy.secure_aggregation.cohort import ADVERTISE, UNMASK
from dure.federated.privacy.secure_aggregation.messages import ProtocolError, context_of
from dure.federated.privacy.secure_aggregation.rounds import Roster, Sums, digest_of
from dure.protocol.messages import Answer, Assignment, Say, Update
from dure.randomness.secret import Secret
from dure.wire.signatures import Key

ANY = 3
"""As many members as any sum may have."""


@dataclass
class _Held:
    """An update, and the client's part in the protocol once that has begun.

    model: the digest of what it was sent. offer: the message that began its part.
    """

    update: Update
    asked: Assignment
    model: str
    client: Client | None = None
    offer: bytes = b""


@dataclass
class Holding:
    """What clients of this process hold.

    sums: what both sides know. algorithm: says how much an update weighs, and what extras look
    like. secret: of keys and rounding. identity, roster: of a client on a network, against a server
    that lies. minimum: the fewest clients of a sum in which a client takes part. refuses: hears
    which client takes no part in a step, and why.
    """

    sums: Sums
    algorithm: Algorithm
    secret: Secret
    identity: Key | None = None
    roster: Roster | None = None
    minimum: int = 1
    refuses: Callable[[int, str], None] = lambda client, reason: None
    _held: dict[int, _Held] = field(default_factory=dict)
    _spent: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By client: the newest round, and model, of which it has helped to unmask a sum."""
    _digested: tuple[Assignment, str] | None = None

    def hold(self, update: Update, asked: Assignment) -> None:
        """Keeps an update."""
        # All assignments of a round share their tensors.
        if self._digested is None or self._digested[0].weights is not asked.weights:
            self._digested = asked, digest_of(asked)
        self._held[update.ticket] = _Held(update, asked, self._digested[1])

    def let_go(self, tickets: Iterable[int]) -> None:
        """What became of these updates is known."""
        for ticket in tickets:
            self._held.pop(ticket, None)

    def answer(self, say: Say) -> Answer | None:
        """What the client answers to a step; None where it takes no part in it.

        It takes none where it has nothing to add, and where the server does not follow the
        protocol.
        """
        held = self._held.get(say.ticket)
        if held is None or held.update.failure is not None:
            return None
        try:
            body, masked = self._answered(held, say)
        except (ProtocolError, ValueError) as error:
            self.refuses(say.client, str(error))
            return None
        if say.stage == UNMASK:
            self._spent[say.client] = held.asked.round, held.model
        return Answer(say.ticket, say.client, say.stage, body, () if masked is None else (masked,))

    def _answered(self, held: _Held, say: Say) -> tuple[bytes, Tensor | None]:
        # A server that was started anew begins another attempt.
        if held.client is None or (say.stage == ADVERTISE and say.body != held.offer):
            if self._spent.get(say.client) == (held.asked.round, held.model):
                raise ProtocolError("it has helped to unmask a sum of this round already")
            held.client = self._begun(held, say)
            held.offer = say.body
        return held.client.answer(say.stage, say.body)

    def _begun(self, held: _Held, say: Say) -> Client:
        """The client's part in the sum that the first message offers."""
        update, asked = held.update, held.asked
        weight = self.algorithm.share(update, 0)[1]
        if not weight > 0:
            raise ValueError("its loss has counted nothing")
        extras = self.algorithm.expects(asked)
        # However many members there are, vectors have the same length.
        length = self.sums.contribution(asked, extras, ANY).length
        context = context_of(
            say.body,
            self.sums.settings,
            run=self.sums.run,
            round=asked.round,
            model=held.model,
            length=length,
            quantisation=self.sums.text(),
        )
        how = self.sums.contribution(asked, extras, len(context.members))
        position = say.client, *context.position()

        def vector() -> Tensor:
            return how.encode(
                update,
                asked,
                weight,
                lambda purpose, number: self.secret.key(purpose, *position, number),
            )

        return Client(
            say.client,
            context,
            self.secret,
            vector,
            identity=self.identity,
            roster=self.roster,
            minimum=max(self.minimum, self.sums.settings.minimum),
        )
