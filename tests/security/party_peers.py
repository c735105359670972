"""A served run of parties with different features in one process: no socket.

A party says what its site says, unless it lies: `lie` gets each frame that it is about to send, and
gives those that it sends instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from split_peers import RUN, Channels, Lie, honest

import dure
from dure.collectives.group import Group
from dure.contracts.fresh_model import examples_for, seeded_model
from dure.contracts.world import RankContext
from dure.split.network.control import Hello
from dure.split.network.frames import Frame
from dure.split.network.parties_served import ServedVerticalLearner
from dure.split.network.parties_site import PartySite
from dure.wire.boxes import BoxKey
from dure.wire.signatures import Key


class PartyPeer:
    """A party. folder: its own."""

    def __init__(self, number: int, task: dure.Task, strategy: Any, folder: Path, lie: Lie) -> None:
        self.number = number
        self.lie = lie
        folder.mkdir(parents=True, exist_ok=True)
        self.key = Key.load_or_create(folder / "key.pem")
        model = seeded_model(task, 0).train()
        train, test = examples_for(task)
        self.site = PartySite(
            task, model, train, test, strategy.plan, number, 0, folder, RUN, lambda *_: None
        )
        # Of the roster it believes everything: rosters are tested elsewhere.
        roster = SimpleNamespace(members=[], fingerprint="")
        identity: Any = SimpleNamespace(takes=lambda signed: roster)
        box = BoxKey.load_or_create(folder / "box.pem")
        member = box.member(self.key, number, f"client {number}", RUN)
        self.hello = Hello(len(self.site.known), msgspec.json.encode(member), "0" * 64)
        self.site.takes(self.hello, identity)

    def hears(self, frame: Frame) -> list[Frame]:
        return [lied for said in self.site._hears(frame) for lied in self.lie(said)]


def parties(
    folder: Path, strategy: Any, task: Callable[[], dure.Task], lies: Mapping[int, Lie]
) -> list[PartyPeer]:
    """All parties without labels."""
    count = len(strategy.plan.others(len(strategy.features)))
    return [
        PartyPeer(
            number,
            task(),
            strategy,
            folder / f"site-{number}",
            lies.get(number, honest),
        )
        for number in range(count)
    ]


def holder(
    folder: Path, strategy: Any, task: Callable[[], dure.Task], peers: list[Any], lasts: float = 0.3
) -> ServedVerticalLearner:
    """Whoever holds the labels, once all are there and aligned."""
    run = folder / "run"
    run.mkdir(parents=True, exist_ok=True)
    channels = Channels(run, peers, lasts)
    return ServedVerticalLearner(
        task(), RankContext(Group(), folder=run), 0, strategy.plan, lambda _: channels
    )
