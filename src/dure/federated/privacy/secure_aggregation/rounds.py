"""Secure aggregation in the rounds of a federation: who sums with whom, and what comes of it.

    groups      the clients of a round; all of them, or random groups where a rule wants their means
    each group  Bonawitz et al.'s protocol, all groups at the same time, step by step
    then        the mean of each group, which the rule gets as one update

A group of which too many clients are lost has no sum: its updates are refused, and the others
count. Before anybody unmasks, the server keeps all that it has of every group: a server that is
started again asks the same clients for the same shares, since none of them contributes to another
sum of the model. Groups are drawn anew in every round, by a secret: a client that could choose its
group would be alone with others of its kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dure.federated.aggregate.aggregator import Aggregator, Groups
from dure.federated.privacy.secure_aggregation.clipped_contribution import (
    ClippedContribution,
    Clipping,
)
from dure.federated.privacy.secure_aggregation.cohort import UNMASK, Context, bounds
from dure.federated.privacy.secure_aggregation.contribution import Contribution, Shape, Total
from dure.federated.privacy.secure_aggregation.messages import TooFewError
from dure.federated.privacy.secure_aggregation.model_digest import digest_of as digest_of
from dure.federated.privacy.secure_aggregation.quantisation import Quantisation
from dure.federated.privacy.secure_aggregation.server import Server
from dure.federated.privacy.secure_aggregation.settings import SecureAggregation
from dure.federated.server.combining import Summed
from dure.federated.server.summing import Exchange
from dure.protocol.carrier import Draft
from dure.protocol.messages import Assignment, Say
from dure.randomness.secret import Secret
from dure.randomness.turn import Turn

Roster = Mapping[int, str]
"""The public identity of each client, as its owner has signed it."""


def parted(rule: Aggregator) -> tuple[Groups, Aggregator]:
    """(who is in which group, the rule for the groups' means).

    Raises ValueError for a rule that needs single updates.
    """
    found = rule.of_groups()
    if found is None:
        raise ValueError(f"{rule} looks at single updates")
    return found


@dataclass(frozen=True)
class Sums:
    """What server and clients know of the sums of a run.

    run: its id. clipping: with differential privacy of clients, how they clip.
    """

    settings: SecureAggregation
    run: str
    clipping: Clipping | None = None

    def contribution(
        self, asked: Assignment, extras: Sequence[Tensor], members: int
    ) -> Contribution | ClippedContribution:
        """How updates become vectors, in a sum of so many. extras: what theirs look like."""
        if self.clipping is not None:
            fewest = bounds(self.settings, members).fewest
            return ClippedContribution(self.clipping, members, fewest, f"{self.run} {asked.round}")
        quantisation = Quantisation(self.settings.range, members)
        return Contribution(Shape.of(asked, extras), quantisation, self.settings.most_examples)

    def text(self) -> str:
        """What a vector's numbers mean, so that nobody adds others to them."""
        settings = self.settings
        if self.clipping is not None:
            return str(self.clipping.settings)
        return f"range {settings.range!r}, weights to {settings.most_examples}"


@dataclass
class SecureRounds:
    """The server's part.

    groups: who sums with whom. roster: who clients are; None for a server that has to be believed.
    """

    sums: Sums
    groups: Groups
    secret: Secret
    roster: Roster | None = None

    @property
    def fewest(self) -> int:
        """The fewest clients of a sum."""
        return self.sums.settings.minimum

    def sums_of(
        self,
        asked: Mapping[int, Assignment],
        extras: Sequence[Tensor],
        exchange: Exchange,
        draft: Draft | None = None,
    ) -> dict[str, Any]:
        """The sums of a round's updates, as a tree: {"sums": [...], "lost": {ticket: reason},
        "guilty": {client: what it has done}, "helped": [clients that have unmasked this model]}.

        asked: what was sent, by ticket. extras: what an update's look like. draft: of these sums.
        """
        tickets = list(asked)
        number = next(iter(asked.values())).round
        found = _Round(asked, draft)
        if not found.goes_on(self.roster):
            turn = Turn(int.from_bytes(self.secret.key("groups", number)[:7], "big"), number)
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
    ) -> Iterator[Summed]:
        """What the rule gets: the mean of each group that has a sum."""
        # A mean that is alone is the mean, to the bit, whatever its weight.
        alone = len(made["sums"]) == 1
        for one in made["sums"]:
            tickets = list(one["tickets"])
            first = asked[tickets[0]]
            how = self.sums.contribution(first, extras, one["members"])
            total = how.decode(one["sum"], len(tickets), first, extras)
            yield _summed(tickets, total, 1.0 if alone else float(total.weight))


def _summed(tickets: list[int], total: Total, weight: float) -> Summed:
    return Summed(
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
    """One round: all groups go through the protocol at the same time."""

    def __init__(self, asked: Mapping[int, Assignment], draft: Draft | None) -> None:
        self.lost: dict[int, str] = {}
        self.done: list[dict[str, Any]] = []
        self.guilty: dict[int, str] = {}
        self.helped: set[int] = set()
        self._asked = asked
        self._draft = draft
        self._tickets = {one.client: ticket for ticket, one in asked.items()}
        self._running: list[tuple[Context, Server]] = []

    def begin(
        self, rounds: SecureRounds, extras: Sequence[Tensor], groups: Sequence[Sequence[int]]
    ) -> None:
        """Begins a sum of each group."""
        asked = self._asked
        tickets = list(asked)
        model = digest_of(asked[tickets[0]])
        # Whatever a server that was started anew asks is another sum.
        number = asked[tickets[0]].round
        attempt = int.from_bytes(rounds.secret.key("attempt", number)[:5], "big")
        for group, places in enumerate(groups):
            members = sorted(asked[tickets[place]].client for place in places)
            self._begin(rounds, asked[tickets[0]], extras, model, (attempt, group), members)

    def goes_on(self, roster: Roster | None) -> bool:
        """Whether there is a draft of these sums, with which it goes on."""
        kept = None if self._draft is None else self._draft.kept()
        # A folder that was restored from a copy may have that of other tickets.
        if kept is None or kept["tickets"] != sorted(self._asked):
            return False
        self.lost = dict(kept["lost"])
        self.done = list(kept["done"])
        self.guilty = dict(kept["guilty"])
        self.helped = set(kept["helped"])
        for state in kept["servers"]:
            server = Server.resumed(state, roster)
            self._running.append((server.context, server))
        there = {client for context, _ in self._running for client in context.members}
        for client, ticket in self._tickets.items():
            if ticket not in self.lost and client not in there and not self._is_done(ticket):
                self.lost[ticket] = "the server was started again before its sum was unmasked"
        return True

    def _is_done(self, ticket: int) -> bool:
        return any(ticket in one["tickets"] for one in self.done)

    def _keep(self) -> None:
        """Keeps what a server needs to ask for the same shares again."""
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
        context = Context(
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
        self._running.append((context, Server(context, rounds.roster)))

    def run(self, sums: Sums, extras: Sequence[Tensor], exchange: Exchange) -> None:
        """Goes through all stages."""
        while self._running:
            self._keep()
            of = {client: server for context, server in self._running for client in context.members}
            # Shares that are missing in the end are asked for once more: there will be no other sum
            # of this model with those who have given theirs.
            for says in (self._says, self._says_again):
                for answer in exchange(says()):
                    of[answer.client].take(answer.client, answer.body, answer.tensors)
            self._running = [one for one in self._running if self._goes_on(*one, sums, extras)]

    def _says(self) -> list[Say]:
        """What is said to everybody at this stage."""
        said = []
        for _, server in self._running:
            stage = server.stage
            assert stage is not None
            wants = server.wants(stage)
            for client, body in server.ask().items():
                said.append(Say(self._tickets[client], client, stage, body, wants))
        return said

    def _says_again(self) -> list[Say]:
        """What is said again to those without whom sums cannot be unmasked."""
        said = []
        for _, server in self._running:
            bodies = server.ask()
            for client in server.lacks():
                said.append(Say(self._tickets[client], client, UNMASK, bodies[client], waits=True))
        return said

    def _goes_on(
        self, context: Context, server: Server, sums: Sums, extras: Sequence[Tensor]
    ) -> bool:
        """Closes a stage; False where the group has its sum, or will have none."""
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
        sums: Sums,
        context: Context,
        extras: Sequence[Tensor],
    ) -> None:
        """Raises TooFewError for what the vectors of so many clients cannot come to."""
        asked = self._asked[self._tickets[clients[0]]]
        how = sums.contribution(asked, extras, len(context.members))
        try:
            how.check(total, len(clients))
        except ValueError as error:
            raise TooFewError(
                f"secure aggregation of round {context.round}: {error}; one of them has sent "
                f"another vector than the protocol has, and it cannot be told which"
            ) from error

    def _note(self, server: Server) -> None:
        """Who has helped to unmask a sum of this model, and who has not followed the protocol."""
        self.helped |= server.helped | server.spent
        self.guilty |= server.guilty

    def _lose(self, clients: Sequence[int], reason: str) -> None:
        self.lost |= {self._tickets[client]: reason for client in clients}
