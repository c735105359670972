"""Secure aggregation in the rounds of a federation: groups of clients, and the means of groups.

    groups      the clients of a round; all of them, or random groups if the rule needs their means
    each group  the protocol of Bonawitz et al., for all groups at the same time, stage by stage
    then        the mean of each group, which the rule takes as an update

A group with too many dropouts has no sum: its updates are discarded, and the other groups count.
Before any client unmasks, the server saves its state of every group: a restarted server asks the
same clients for the same shares, since no client contributes to a second sum of the model. Groups
are drawn again in every round, from a secret: a client that could choose its group could join a
group of colluding clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dure.federated.aggregate.aggregator import Aggregator, Groups
from dure.federated.privacy.secure_aggregation.clipped_contribution import (
    ClippedContribution,
    ContributionClipping,
)
from dure.federated.privacy.secure_aggregation.cohort import UNMASK, SumContext, bounds
from dure.federated.privacy.secure_aggregation.contribution import (
    Contribution,
    DecodedSum,
    VectorShape,
)
from dure.federated.privacy.secure_aggregation.messages import TooFewError
from dure.federated.privacy.secure_aggregation.model_digest import digest_of as digest_of
from dure.federated.privacy.secure_aggregation.quantisation import Quantisation
from dure.federated.privacy.secure_aggregation.server import SecureSumServer
from dure.federated.privacy.secure_aggregation.settings import SecureAggregation
from dure.federated.server.combining import SummedUpdates
from dure.federated.server.secure_sums import Exchange
from dure.protocol.carrier import Draft
from dure.protocol.messages import Assignment, ProtocolStep
from dure.randomness.secret import Secret
from dure.randomness.seeds import RoundSeed

IdentityKeys = Mapping[int, str]
"""Public identity key of each client, as signed by the roster's owner."""


def grouping_of(rule: Aggregator) -> tuple[Groups, Aggregator]:
    """Return the groups of clients, and the rule for the groups' means.

    Raises ValueError for a rule that needs single updates.
    """
    found = rule.of_groups()
    if found is None:
        raise ValueError(f"{rule} looks at single updates")
    return found


@dataclass(frozen=True)
class SecureSums:
    """Facts of a run's sums that server and clients share.

    Args:
        settings: settings of secure aggregation.
        run: id of the run.
        clipping: clipping of the clients; None without user-level privacy.
    """

    settings: SecureAggregation
    run: str
    clipping: ContributionClipping | None = None

    def contribution(
        self, asked: Assignment, extras: Sequence[Tensor], members: int
    ) -> Contribution | ClippedContribution:
        """Return the encoder of updates in a sum of `members`. `extras` have the extras' shapes."""
        if self.clipping is not None:
            fewest = bounds(self.settings, members).fewest
            return ClippedContribution(self.clipping, members, fewest, f"{self.run} {asked.round}")
        quantisation = Quantisation(self.settings.range, members)
        return Contribution(
            VectorShape.of(asked, extras), quantisation, self.settings.most_examples
        )

    def text(self) -> str:
        """Return the meaning of a vector's numbers, for the context of a sum."""
        settings = self.settings
        if self.clipping is not None:
            return str(self.clipping.settings)
        return f"range {settings.range!r}, weights to {settings.most_examples}"


@dataclass
class SecureRounds:
    """Server's part of secure aggregation.

    Args:
        sums: facts of the run's sums.
        groups: function that divides clients into groups.
        secret: source of the server's randomness.
        roster: identity keys of clients; None for a server that clients must trust.
    """

    sums: SecureSums
    groups: Groups
    secret: Secret
    roster: IdentityKeys | None = None

    @property
    def fewest(self) -> int:
        """Fewest clients of a sum."""
        return self.sums.settings.minimum

    def sums_of(
        self,
        asked: Mapping[int, Assignment],
        extras: Sequence[Tensor],
        exchange: Exchange,
        draft: Draft | None = None,
    ) -> dict[str, Any]:
        """Return the sums of a round's updates, as a tree of plain values.

        The tree is {"sums": [...], "lost": {ticket: reason}, "guilty": {client: violation},
        "helped": [clients that have unmasked this model]}.

        Args:
            asked: assignments by ticket.
            extras: tensors of the shapes of an update's extras.
            exchange: function that sends messages and returns the answers.
            draft: saved state of these sums; None if the run saves none.
        """
        tickets = list(asked)
        number = next(iter(asked.values())).round
        found = _Round(asked, draft)
        if not found.goes_on(self.roster):
            turn = RoundSeed(int.from_bytes(self.secret.key("groups", number)[:7], "big"), number)
            found.begin(self, extras, self.groups(len(tickets), turn))
        found.run(self.sums, extras, exchange)
        return {
            "sums": found.done,
            "lost": found.lost,
            "guilty": found.guilty,
            "helped": sorted(found.helped),
        }

    def means(
        self, made: Mapping[str, Any], asked: Mapping[int, Assignment], extras: Sequence[Tensor]
    ) -> Iterator[SummedUpdates]:
        """Return the mean of each group that has a sum, for the rule."""
        # Weight 1 makes the mean of a single group exact to the bit.
        alone = len(made["sums"]) == 1
        for one in made["sums"]:
            tickets = list(one["tickets"])
            first = asked[tickets[0]]
            how = self.sums.contribution(first, extras, one["members"])
            total = how.decode(one["sum"], len(tickets), first, extras)
            yield _summed(tickets, total, 1.0 if alone else float(total.weight))


def _summed(tickets: list[int], total: DecodedSum, weight: float) -> SummedUpdates:
    return SummedUpdates(
        tickets=tickets,
        delta=total.delta,
        buffers=total.buffers,
        extra=total.extra,
        rises=total.rises,
        weight=weight,
        examples=total.weight,
        clipped=total.clipped,
        samples=total.samples,
        counted=total.counted,
        loss=total.loss,
        cut=total.cut,
    )


class _Round:
    """Sums of a round: all groups run the protocol at the same time."""

    def __init__(self, asked: Mapping[int, Assignment], draft: Draft | None) -> None:
        self.lost: dict[int, str] = {}
        self.done: list[dict[str, Any]] = []
        self.guilty: dict[int, str] = {}
        self.helped: set[int] = set()
        self._asked = asked
        self._draft = draft
        self._tickets = {one.client: ticket for ticket, one in asked.items()}
        self._running: list[tuple[SumContext, SecureSumServer]] = []

    def begin(
        self, rounds: SecureRounds, extras: Sequence[Tensor], groups: Sequence[Sequence[int]]
    ) -> None:
        """Begin a sum for each group."""
        asked = self._asked
        tickets = list(asked)
        model = digest_of(asked[tickets[0]])
        # A random attempt number: a restarted server that begins again begins another sum.
        number = asked[tickets[0]].round
        attempt = int.from_bytes(rounds.secret.key("attempt", number)[:5], "big")
        for group, places in enumerate(groups):
            members = sorted(asked[tickets[place]].client for place in places)
            self._begin(rounds, asked[tickets[0]], extras, model, (attempt, group), members)

    def goes_on(self, roster: IdentityKeys | None) -> bool:
        """Restore a saved draft of these sums; returns whether there was a draft."""
        kept = None if self._draft is None else self._draft.kept()
        # A folder that was restored from a backup may have a draft of other tickets.
        if kept is None or kept["tickets"] != sorted(self._asked):
            return False
        self.lost = dict(kept["lost"])
        self.done = list(kept["done"])
        self.guilty = dict(kept["guilty"])
        self.helped = set(kept["helped"])
        for state in kept["servers"]:
            server = SecureSumServer.resumed(state, roster)
            self._running.append((server.context, server))
        there = {client for context, _ in self._running for client in context.members}
        for client, ticket in self._tickets.items():
            if ticket not in self.lost and client not in there and not self._is_done(ticket):
                self.lost[ticket] = "the server was started again before its sum was unmasked"
        return True

    def _is_done(self, ticket: int) -> bool:
        return any(ticket in one["tickets"] for one in self.done)

    def _keep(self) -> None:
        """Save the state that a restarted server needs to ask for the same shares again."""
        states = [one.state() for _, one in self._running if one.stage == UNMASK]
        if self._draft is None or not states:
            return
        self._draft.keep(
            {
                "tickets": sorted(self._asked),
                "lost": self.lost,
                "done": self.done,
                "guilty": self.guilty,
                "helped": sorted(self.helped),
                "servers": states,
            }
        )

    def _begin(
        self,
        rounds: SecureRounds,
        asked: Assignment,
        extras: Sequence[Tensor],
        model: str,
        which: tuple[int, int],
        members: list[int],
    ) -> None:
        attempt, group = which
        sums = rounds.sums
        fewest = sums.settings.minimum
        if len(members) < fewest:
            why = f"its sum would have {len(members)} clients, and {fewest} are the fewest"
            self._lose(members, why)
            return
        try:
            limits = bounds(sums.settings, len(members))
        except ValueError as error:
            self._lose(members, str(error))
            return
        context = SumContext(
            run=sums.run,
            round=asked.round,
            attempt=attempt,
            group=group,
            model=model,
            length=sums.contribution(asked, extras, len(members)).length,
            quantisation=sums.text(),
            members=tuple(members),
            **limits._asdict(),
        )
        self._running.append((context, SecureSumServer(context, rounds.roster)))

    def run(self, sums: SecureSums, extras: Sequence[Tensor], exchange: Exchange) -> None:
        """Run all stages."""
        while self._running:
            self._keep()
            of = {client: server for context, server in self._running for client in context.members}
            # Missing shares are requested once more: clients that have given shares take part in no
            # other sum of this model.
            for says in (self._says, self._says_again):
                for answer in exchange(says()):
                    of[answer.client].take(answer.client, answer.body, answer.tensors)
            self._running = [one for one in self._running if self._goes_on(*one, sums, extras)]

    def _says(self) -> list[ProtocolStep]:
        """Return the messages of the current stage to all clients."""
        said = []
        for _, server in self._running:
            stage = server.stage
            assert stage is not None
            wants = server.wants(stage)
            for client, body in server.ask().items():
                said.append(ProtocolStep(self._tickets[client], client, stage, body, wants))
        return said

    def _says_again(self) -> list[ProtocolStep]:
        """Return repeated messages to the clients whose shares a sum lacks."""
        said = []
        for _, server in self._running:
            bodies = server.ask()
            for client in server.lacks():
                said.append(
                    ProtocolStep(self._tickets[client], client, UNMASK, bodies[client], waits=True)
                )
        return said

    def _goes_on(
        self,
        context: SumContext,
        server: SecureSumServer,
        sums: SecureSums,
        extras: Sequence[Tensor],
    ) -> bool:
        """Close a stage; returns False if the group has its sum, or cannot have a sum."""
        try:
            server.close_stage()
            if server.stage is not None:
                return True
            total, clients = server.result()
            self._check_sum(total, clients, sums, context, extras)
        except TooFewError as error:
            self._lose(context.members, str(error))
            self._note(server)
            return False
        self._note(server)
        for client in sorted(set(context.members) - set(clients)):
            self._lose([client], server.lost.get(client, "it was lost before the sum was there"))
        tickets = [self._tickets[client] for client in clients]
        self.done.append({"sum": total, "tickets": tickets, "members": len(context.members)})
        return False

    def _check_sum(
        self,
        total: Tensor,
        clients: Sequence[int],
        sums: SecureSums,
        context: SumContext,
        extras: Sequence[Tensor],
    ) -> None:
        """Check that the clients' vectors can have this sum; raises TooFewError if not."""
        asked = self._asked[self._tickets[clients[0]]]
        how = sums.contribution(asked, extras, len(context.members))
        try:
            how.check(total, len(clients))
        except ValueError as error:
            raise TooFewError(
                f"secure aggregation of round {context.round}: {error}; one of them has sent a "
                "vector that violates the protocol, and the server cannot determine which one"
            ) from error

    def _note(self, server: SecureSumServer) -> None:
        """Record the clients that helped to unmask this model, and violations of the protocol."""
        self.helped |= server.helped | server.spent
        self.guilty |= server.guilty

    def _lose(self, clients: Sequence[int], reason: str) -> None:
        self.lost |= {self._tickets[client]: reason for client in clients}
