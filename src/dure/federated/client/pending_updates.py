"""Client side of secure aggregation: stored updates, and answers to the protocol's steps.

A client stores an update from its local training until the server reports the outcome. Keys and
shares are in memory alone. Two sums of the same model, one with a client and one without, differ by
that client's update. So a client that has helped to unmask a sum contributes to no other sum of the
same model, whatever round, run, attempt or participants the server names:

    offer of a sum of a spent model     the answer is `ModelSpent`, and the client sits out
    unmask                              the model enters the list of spent models, and the update is
                                        deleted, before the answer is sent
    unmask, the same question again     the same answer, also after a restart of the client
    unmask, another question            refused
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from dure.federated.algorithm import Algorithm
from dure.federated.privacy.secure_aggregation.client import SecureSumClient
from dure.federated.privacy.secure_aggregation.cohort import ADVERTISE, MASK, UNMASK
from dure.federated.privacy.secure_aggregation.messages import (
    SPENT,
    ProtocolError,
    SpentError,
    context_of,
)
from dure.federated.privacy.secure_aggregation.model_digest import ModelDigest, digests_of
from dure.federated.privacy.secure_aggregation.rounds import IdentityKeys, SecureSums
from dure.federated.privacy.secure_aggregation.spent_models import (
    SpentInMemory,
    SpentModels,
    of_identity,
)
from dure.protocol.messages import Assignment, ProtocolAnswer, ProtocolStep, Update
from dure.randomness.secret import Secret
from dure.wire.signatures import Key

ANY = 3
"""A number of members that every sum may have."""


@dataclass
class _Held:
    """An update, and the client's run of the protocol once it has started.

    update: None after unmasking. model: the digests of the assignment's model. offer: the message
    that started the protocol.
    """

    update: Update | None
    asked: Assignment
    model: ModelDigest
    client: SecureSumClient | None = None
    offer: bytes = b""


@dataclass
class PendingUpdates:
    """Pending updates of the clients of this process.

    Args:
        sums: settings that both sides share.
        algorithm: gives the weight of an update, and the shapes of extras.
        secret: source of keys and rounding.
        identity: the identity key of a client on a network, against a malicious server.
        roster: the identities of all clients, against a malicious server.
        minimum: fewest clients of a sum in which a client takes part.
        refuses: called with a client and the reason why it takes no part in a step.
        spent: models to whose sums clients contribute no more; by default a list in memory, shared
            by all clients with this identity.
    """

    sums: SecureSums
    algorithm: Algorithm
    secret: Secret
    identity: Key | None = None
    roster: IdentityKeys | None = None
    minimum: int = 1
    refuses: Callable[[int, str], None] = lambda client, reason: None
    spent: SpentModels | None = None
    _held: dict[int, _Held] = field(default_factory=dict)
    _parts: dict[tuple[int, bytes], int] = field(default_factory=dict)
    """(client, model) -> ticket of the latest protocol run."""
    _digested: tuple[Assignment, ModelDigest] | None = None

    def __post_init__(self) -> None:
        own = SpentInMemory() if self.identity is None else of_identity(self.identity.public)
        self._spent: SpentModels = self.spent or own

    def hold(self, update: Update, asked: Assignment) -> None:
        """Store an update."""
        # All assignments of a round share their tensors.
        if self._digested is None or self._digested[0].weights is not asked.weights:
            self._digested = asked, digests_of(asked, update.delta)
        held = _Held(update, asked, self._digested[1])
        if self._spent.has(update.client, held.model.spent):
            self._unmasked(held)
        self._held[update.ticket] = held

    def sits_out(self, ticket: int) -> bool:
        """Return whether the update of this ticket will be in no sum, or is in a sum already."""
        held = self._held.get(ticket)
        return held is not None and held.update is None

    def discard(self, tickets: Iterable[int]) -> None:
        """Discard updates whose outcome is known."""
        for ticket in tickets:
            held = self._held.pop(ticket, None)
            if held is not None:
                self._parts.pop((held.asked.client, held.model.spent), None)
            self._spent.settled(ticket)

    def answer(self, say: ProtocolStep) -> ProtocolAnswer | None:
        """Return the client's answer to a step; None if the client takes no part.

        A client takes no part if it has nothing to add, or if the server violates the protocol.
        """
        question = hashlib.sha256(say.body).digest()
        if say.stage == UNMASK:
            before = self._spent.answered(say.client, say.ticket, question)
            if before is not None:
                return ProtocolAnswer(say.ticket, say.client, say.stage, before)
        held = self._held.get(say.ticket)
        if held is None or held.asked.client != say.client:
            return None
        if held.update is not None and held.update.failure is not None:
            return None
        try:
            body, masked = self._answered(held, say)
        except SpentError as error:
            self.refuses(say.client, str(error))
            return ProtocolAnswer(say.ticket, say.client, say.stage, SPENT)
        except (ProtocolError, ValueError) as error:
            self.refuses(say.client, str(error))
            return None
        if say.stage == UNMASK:
            # On disk before the answer is sent: if the list lost the entry, a server could ask
            # again.
            self._spent.spend(say.client, held.model.spent, say.ticket, question, body)
            self._unmasked(held)
        return ProtocolAnswer(
            say.ticket, say.client, say.stage, body, () if masked is None else (masked,)
        )

    def _answered(self, held: _Held, say: ProtocolStep) -> tuple[bytes, Tensor | None]:
        # A restarted server begins another attempt.
        if held.client is None or (say.stage == ADVERTISE and say.body != held.offer):
            self._begin(held, say)
        # Sums of a model may run side by side: only the first to be unmasked completes.
        elif say.stage in (MASK, UNMASK) and self._is_spent(held):
            raise ProtocolError("it has helped to unmask another sum of this model")
        assert held.client is not None
        return held.client.answer(say.stage, say.body)

    def _is_spent(self, held: _Held) -> bool:
        return self._spent.has(held.asked.client, held.model.spent)

    def _begin(self, held: _Held, say: ProtocolStep) -> None:
        """Start the client's part in the offered sum; end any other sum of this model."""
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
        """Note that the update is in a sum, and delete the update."""
        held.update = None
        held.client = None
        self._spent.drop(held.asked.ticket)

    def _begun(self, held: _Held, say: ProtocolStep) -> SecureSumClient:
        """Return the client's protocol state for the sum that the first message offers."""
        update, asked = held.update, held.asked
        if update is None:
            raise ProtocolError("it has helped to unmask the sum of this update")
        weight = self.algorithm.share(update, 0)[1]
        if not weight > 0:
            raise ValueError("its loss has counted nothing")
        extras = self.algorithm.expects(asked)
        # The length of vectors is the same for any number of members.
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

        return SecureSumClient(
            say.client,
            context,
            self.secret,
            vector,
            identity=self.identity,
            roster=self.roster,
            minimum=max(self.minimum, self.sums.settings.minimum),
        )
