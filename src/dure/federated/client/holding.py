"""Updates that stay with their clients, which answer the steps of secure aggregation about them.

A client holds an update from its local training until the server says what became of it. Keys and
shares live in memory alone. Of two sums of one model, one with a client and one without, the
difference is that client's update. So a client that has helped to unmask a sum contributes to no
other sum of the same model, whatever round, run, attempt or participants the server names:

    offer of a sum of a spent model     the answer is `Spent`, and the client sits out
    unmask                              the model is on the list of spent models, and the update is
                                        deleted, before the answer leaves
    unmask, the same question again     the same answer, also after a restart of the client
    unmask, another question            refused
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from dure.federated.algorithm import Algorithm
from dure.federated.privacy.secure_aggregation.client import Client
from dure.federated.privacy.secure_aggregation.cohort import ADVERTISE, MASK, UNMASK
from dure.federated.privacy.secure_aggregation.messages import (
    SPENT,
    ProtocolError,
    SpentError,
    context_of,
)
from dure.federated.privacy.secure_aggregation.model_digest import ModelDigest, digests_of
from dure.federated.privacy.secure_aggregation.rounds import Roster, Sums
from dure.federated.privacy.secure_aggregation.spent_models import (
    SpentInMemory,
    SpentModels,
    of_identity,
)
from dure.protocol.messages import Answer, Assignment, Say, Update
from dure.randomness.secret import Secret
from dure.wire.signatures import Key

ANY = 3
"""As many members as any sum may have."""


@dataclass
class _Held:
    """An update, and the client's part in the protocol once that has begun.

    update: None once it was unmasked. model: the digests of what it was sent. offer: the message
    that began its part.
    """

    update: Update | None
    asked: Assignment
    model: ModelDigest
    client: Client | None = None
    offer: bytes = b""


@dataclass
class Holding:
    """What clients of this process hold.

    sums: what both sides know. algorithm: says how much an update weighs, and what extras look
    like. secret: of keys and rounding. identity, roster: of a client on a network, against a server
    that lies. minimum: the fewest clients of a sum in which a client takes part. refuses: hears
    which client takes no part in a step, and why. spent: models to whose sums clients contribute no
    more; by default a list in memory, which is one for all that have this identity.
    """

    sums: Sums
    algorithm: Algorithm
    secret: Secret
    identity: Key | None = None
    roster: Roster | None = None
    minimum: int = 1
    refuses: Callable[[int, str], None] = lambda client, reason: None
    spent: SpentModels | None = None
    _held: dict[int, _Held] = field(default_factory=dict)
    _parts: dict[tuple[int, bytes], int] = field(default_factory=dict)
    """By client and model: the ticket whose part in a sum has begun last."""
    _digested: tuple[Assignment, ModelDigest] | None = None

    def __post_init__(self) -> None:
        own = SpentInMemory() if self.identity is None else of_identity(self.identity.public)
        self._spent: SpentModels = self.spent or own

    def hold(self, update: Update, asked: Assignment) -> None:
        """Keeps an update."""
        # All assignments of a round share their tensors.
        if self._digested is None or self._digested[0].weights is not asked.weights:
            self._digested = asked, digests_of(asked, update.delta)
        held = _Held(update, asked, self._digested[1])
        if self._spent.has(update.client, held.model.spent):
            self._unmasked(held)
        self._held[update.ticket] = held

    def sits_out(self, ticket: int) -> bool:
        """Whether the update of this ticket will be in no sum, or is in one already."""
        held = self._held.get(ticket)
        return held is not None and held.update is None

    def let_go(self, tickets: Iterable[int]) -> None:
        """What became of these updates is known."""
        for ticket in tickets:
            held = self._held.pop(ticket, None)
            if held is not None:
                self._parts.pop((held.asked.client, held.model.spent), None)
            self._spent.settled(ticket)

    def answer(self, say: Say) -> Answer | None:
        """What the client answers to a step; None where it takes no part in it.

        It takes none where it has nothing to add, and where the server does not follow the
        protocol.
        """
        question = hashlib.sha256(say.body).digest()
        if say.stage == UNMASK:
            before = self._spent.answered(say.client, say.ticket, question)
            if before is not None:
                return Answer(say.ticket, say.client, say.stage, before)
        held = self._held.get(say.ticket)
        if held is None or held.asked.client != say.client:
            return None
        if held.update is not None and held.update.failure is not None:
            return None
        try:
            body, masked = self._answered(held, say)
        except SpentError as error:
            self.refuses(say.client, str(error))
            return Answer(say.ticket, say.client, say.stage, SPENT)
        except (ProtocolError, ValueError) as error:
            self.refuses(say.client, str(error))
            return None
        if say.stage == UNMASK:
            # On the disk before the answer leaves: what the list forgets, a server may ask again.
            self._spent.spend(say.client, held.model.spent, say.ticket, question, body)
            self._unmasked(held)
        return Answer(say.ticket, say.client, say.stage, body, () if masked is None else (masked,))

    def _answered(self, held: _Held, say: Say) -> tuple[bytes, Tensor | None]:
        # A server that was started anew begins another attempt.
        if held.client is None or (say.stage == ADVERTISE and say.body != held.offer):
            self._begin(held, say)
        # Sums of one model may go on side by side: the first that is unmasked is the only one.
        elif say.stage in (MASK, UNMASK) and self._is_spent(held):
            raise ProtocolError("it has helped to unmask another sum of this model")
        assert held.client is not None
        return held.client.answer(say.stage, say.body)

    def _is_spent(self, held: _Held) -> bool:
        return self._spent.has(held.asked.client, held.model.spent)

    def _begin(self, held: _Held, say: Say) -> None:
        """Begins the client's part in the sum that the message offers; any other of this model
        ends."""
        if say.stage == ADVERTISE and self._is_spent(held):
            raise SpentError("it has helped to unmask a sum of this model, and sits out")
        client = self._begun(held, say)
        model = held.asked.client, held.model.spent
        before = self._held.get(self._parts.get(model, -1))
        if before is not None:
            before.client = None
            before.offer = b""
        self._parts[model] = held.asked.ticket
        held.client = client
        held.offer = say.body

    def _unmasked(self, held: _Held) -> None:
        """The update is in a sum, and will be in no other."""
        held.update = None
        held.client = None
        self._spent.drop(held.asked.ticket)

    def _begun(self, held: _Held, say: Say) -> Client:
        """The client's part in the sum that the first message offers."""
        update, asked = held.update, held.asked
        if update is None:
            raise ProtocolError("it has helped to unmask the sum of this update")
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
            model=held.model.agreed,
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
