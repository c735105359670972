"""Clients that hold updates, and servers that ask them for sums, in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dure.deploy.client.state import ClientState
from dure.deploy.client.stored_spent_models import StoredSpentModels
from dure.federated.client.pending_updates import PendingUpdates
from dure.federated.privacy.secure_aggregation.cohort import SumContext, bounds
from dure.federated.privacy.secure_aggregation.messages import TooFewError
from dure.federated.privacy.secure_aggregation.rounds import SecureSums, digest_of
from dure.federated.privacy.secure_aggregation.server import SecureSumServer
from dure.federated.privacy.secure_aggregation.settings import SecureAggregation
from dure.protocol.messages import Assignment, ProtocolStep, Update
from dure.randomness.secret import Secret
from dure.wire.signatures import Key

D = 6
SETTINGS = SecureAggregation()


class Averages:
    """As much of FedAvg as a client asks of it."""

    alike = False

    def share(self, update: Update, staleness: int) -> tuple[Update, float]:
        return update, float(update.examples)

    def expects(self, asked: Assignment) -> Sequence[Tensor]:
        return asked.extra


class Site:
    """One client. folder: where its list of spent models is; None keeps it in memory."""

    def __init__(
        self, number: int, sums: SecureSums, key: Key | None, roster: Any, folder: Path | None
    ) -> None:
        self._given = number, sums, key, roster, folder
        self.state: ClientState | None = None
        self.refused: list[str] = []
        self.start()

    def start(self) -> None:
        """A process of this client begins, or begins again."""
        number, sums, key, roster, folder = self._given
        self.number = number
        if self.state is not None:
            self.state.close()
        if folder is not None:
            self.state = ClientState(folder)
        self.holding = PendingUpdates(
            sums,
            Averages(),  # type: ignore[arg-type]
            Secret.system(),
            identity=key,
            roster=roster,
            minimum=3,
            refuses=lambda client, reason: self.refused.append(reason),
            spent=None if self.state is None else StoredSpentModels(self.state),
        )

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


@cache
def key_of(number: int) -> Key:
    return Key.make()


def asked_of(client: int, ticket: int, weights: Sequence[Tensor], **fields: Any) -> Assignment:
    given: dict[str, Any] = {"round": 1, "turn": 1, "buffers": [], "nbytes": 0, **fields}
    return Assignment(ticket=ticket, client=client, weights=weights, **given)


def update_of(asked: Assignment, delta: Sequence[Tensor]) -> Update:
    return Update(
        ticket=asked.ticket,
        client=asked.client,
        round=asked.round,
        examples=100,
        samples=100,
        loss=1.0,
        delta=delta,
        buffers=list(asked.buffers),
        extra=[torch.zeros_like(one) for one in asked.extra],
    )


def hand_out(
    sites: Mapping[int, Site], tickets: int, model: Sequence[Tensor], **fields: Any
) -> Any:
    """All train from this model, and hold what they have learned."""
    for number, site in sites.items():
        asked = asked_of(number, tickets + number, model, **fields)
        torch.manual_seed(number)
        delta = [torch.randn(one.shape).to(torch.float32) * 0.1 for one in model]
        site.holding.hold(update_of(asked, delta), asked)
    return asked_of(0, tickets, model, **fields)


def sum_of(
    sites: Mapping[int, Site],
    tickets: int,
    asked: Assignment,
    attempt: int,
    *,
    lost: Collection[int] = (),
    roster: Any = None,
    at: Callable[[int], None] = lambda stage: None,
) -> list[int]:
    """The clients in a sum that an honest server's code gets; none where it gets no sum."""
    sums = SecureSums(SETTINGS, "run")
    members = tuple(sorted(sites))
    context = SumContext(
        run="run",
        round=asked.round,
        attempt=attempt,
        group=0,
        model=digest_of(asked),
        length=sums.contribution(asked, asked.extra, 3).length,
        quantisation=sums.text(),
        members=members,
        **bounds(SETTINGS, len(members))._asdict(),
    )
    server = SecureSumServer(context, roster)
    with suppress(TooFewError):
        while server.stage is not None:
            stage = server.stage
            at(stage)
            for number, body in server.ask().items():
                if number in lost:
                    continue
                say = ProtocolStep(tickets + number, number, stage, body, server.wants(stage))
                answer = sites[number].holding.answer(say)
                if answer is not None:
                    server.take(number, answer.body, list(answer.tensors))
            server.close_stage()
        return server.result()[1]
    return []
