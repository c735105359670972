"""The holder of the labels and parties, with channels of the test's own between them: who is gone
and comes again at any moment, and what cannot be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.group import Group
from dure.contracts.fresh_model import examples_for, seeded_model
from dure.contracts.world import RankContext
from dure.errors import CutNotANumberError, DureError, StateError
from dure.protocol.channels import (
    Channels,
    ClientConnected,
    ClientDisconnected,
    ClientFrame,
    Event,
    HostedRun,
)
from dure.split.network.control import ClientFailed, Evaluated, Hello, Resume, Resumed, StateSaved
from dure.split.network.frames import decode, encode
from dure.split.network.parties_served import ServedVerticalLearner
from dure.split.network.parties_site import PartySite
from dure.split.network.site import Identity
from dure.split.network.vertical_split_server import PartyLostError
from dure.split.parties.messages import Activations
from dure.wire.boxes import BoxKey
from dure.wire.roster import PinnedRoster
from dure.wire.signatures import Key

RUN = "0123456789abcdef"
PEOPLE, BATCH = 22, 4
STEPS, KEEPS = 12, 3
COLUMNS = [[0, 1], [2, 5], [3, 4]]

Alter = Callable[[int, Any], Any]


def model() -> nn.Module:
    heads = [nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Dropout(0.2)) for _ in COLUMNS]
    return dure.VerticalModel(heads, nn.Linear(15, 3), "concat", COLUMNS).double()


def examples(people: int = PEOPLE) -> dure.Examples:
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(people, 6, generator=draws, dtype=torch.float64)
    keys = [f"person {number}" for number in range(people)]
    return dure.Examples(inputs, inputs[:, :3].argmax(1), keys=keys)


def task(people: int = PEOPLE) -> dure.Task:
    adam = partial(torch.optim.Adam, lr=0.01)
    return dure.Task(model, F.cross_entropy, examples(people), examples(9), optimizer=adam)


def whatever(number: int, frame: Any) -> Any:
    return frame


class Party:
    """A party in this process, whose state folder outlives it."""

    def __init__(
        self, strategy: dure.VerticalSplit, number: int, folder: Path, task: dure.Task
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        one = seeded_model(task, 0).train()
        train, test = examples_for(task)
        self.key = Key.load_or_create(folder / "key.pem")
        box = BoxKey.load_or_create(folder / "box.pem")
        member = box.member(self.key, number, f"site {number}", RUN)
        self.site = PartySite(
            task, one, train, test, strategy.plan, number, 0, folder, RUN, lambda what, about: None
        )
        hello = Hello(len(self.site.known), msgspec.json.encode(member), "0")
        pinned = PinnedRoster.load(folder, RUN)
        self.site.takes(hello, Identity(self.key, box, member, RUN, pinned, None))
        self.hello = bytes(b"".join(encode(hello)))


class Wire(Channels):
    """Carries frames at once, in order. alter: what a party says, as it arrives.

    dies: after how many frames which party is gone, and comes again.
    """

    run = RUN
    answer_timeout = 0.5

    def __init__(
        self,
        strategy: dure.VerticalSplit,
        folder: Path,
        parties: int,
        alter: Alter = whatever,
        dies: dict[int, int] | None = None,
        tasks: Callable[[int], dure.Task] = lambda number: task(),
    ) -> None:
        self.strategy = strategy
        self.folder = folder
        self.key = Key.make()
        self.alter = alter
        self.dies = dies or {}
        self.tasks = tasks
        self.events: deque[Event] = deque()
        self.parties: dict[int, Party] = {}
        self.turned_away: dict[int, str] = {}
        self.said = 0
        for number in range(parties):
            self.comes(number)

    def comes(self, number: int) -> None:
        place = self.folder / f"site-{number}"
        self.parties[number] = Party(self.strategy, number, place, self.tasks(number))
        self.events.append(ClientConnected(number, self.parties[number].hello))

    def goes(self, number: int) -> None:
        # What it has said is lost with it; what others have said is still on its way.
        self.events = deque(one for one in self.events if one.client != number)
        del self.parties[number]
        self.events.append(ClientDisconnected(number, "the connection broke"))

    def next(self, seconds: float) -> Event | None:
        return self.events.popleft() if self.events else None

    def say(self, client: int, frame: Sequence[bytes | bytearray | memoryview]) -> None:
        if client not in self.parties:
            return
        self.said += 1
        message = decode(b"".join(frame))
        try:
            replies = self.parties[client].site._hears(message)
        except (StateError, DureError, ValueError) as error:
            replies = [ClientFailed(str(error))]
        for reply in replies:
            altered = self.alter(client, reply)
            if altered is not None:
                self.events.append(ClientFrame(client, b"".join(encode(altered))))
        dying = self.dies.pop(self.said, None)
        if dying is not None:
            self.goes(dying)
            self.comes(dying)

    def identity(self, client: int) -> tuple[str, str]:
        return self.parties[client].key.public, f"site {client}"

    def allow(self, most: int) -> None:
        pass

    def reject(self, client: int, reason: str) -> None:
        self.turned_away[client] = reason

    def over(self, reason: str) -> None:
        pass


def learner(
    wire: Wire, run: Path | None = None, own: dure.Task | None = None
) -> ServedVerticalLearner:
    def connect(hosted: HostedRun) -> Channels:
        assert hosted.clients == len(wire.parties)
        return wire

    context = RankContext(Group(), kind="clients", folder=run)
    return ServedVerticalLearner(own or task(), context, 0, wire.strategy.plan, connect)


def trained(one: ServedVerticalLearner, wire: Wire, until: int = STEPS) -> tuple[Any, ...]:
    """Losses, metrics and weights of all parts."""
    losses = []
    while one.step < until:
        losses.append(one.advance(0).loss)
        if one.step % KEEPS == 0:
            one.state()
            one.saved()
    metrics = one.evaluate()
    one.state()
    heads = [party.site.part.module.state_dict() for _, party in sorted(wire.parties.items())]
    return losses, metrics, dict(one.weights()), heads


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


STRATEGIES = {
    "server": dure.VerticalSplit(batch_size=BATCH),
    "label party, aligned": dure.VerticalSplit(
        batch_size=BATCH, label_party=1, align=True, missing=0.2
    ),
    "no-peek": dure.VerticalSplit(batch_size=BATCH, defence="no-peek:0.5"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_whenever_a_party_is_gone_and_comes_again_no_bit_changes(name: str, tmp_path: Path) -> None:
    strategy = STRATEGIES[name]
    parties = 3 if strategy.label_party is None else 2
    calm = Wire(strategy, tmp_path / "calm", parties)
    right = trained(learner(calm, tmp_path), calm)
    run = dure.train(task(), strategy, dure.Simulated(), dure.Stop(steps=STEPS))
    assert [step.loss for step in run.history.steps] == right[0]
    assert run.history.evaluations[-1].metrics == right[1]
    for at in range(1, calm.said, 1 + calm.said // 14):
        dies = {at: at % parties, at + 5: (at + 1) % parties}
        folder = tmp_path / f"{at}"
        folder.mkdir()
        wire = Wire(strategy, folder, parties, dies=dies)
        assert same(trained(learner(wire, folder), wire), right), at
        assert wire.said > calm.said


def test_a_holder_that_is_killed_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    strategy = STRATEGIES["label party, aligned"]
    calm = Wire(strategy, tmp_path / "calm", 2)
    (tmp_path / "a").mkdir()
    right = trained(learner(calm, tmp_path / "a"), calm)
    wire = Wire(strategy, tmp_path / "b", 2)
    first = learner(wire, tmp_path / "b")
    losses = [first.advance(0).loss for _ in range(4)]
    state, weights = first.state(), dict(first.weights())
    first.saved()
    # What comes after the checkpoint is lost, also where all have kept more already.
    first.advance(0)
    first.advance(0)
    first.state()
    again = Wire(strategy, tmp_path / "b", 2)
    second = learner(again, tmp_path / "b")
    second.restore(weights, state)
    rest = trained(second, again)
    assert same(([*losses, *rest[0]], *rest[1:]), right)


# What cannot be, by the name of the party


def altered(kind: type, change: Callable[[Any], Any]) -> Alter:
    return lambda number, frame: change(frame) if number == 1 and type(frame) is kind else frame


def narrower(frame: Any) -> Any:
    return msgspec.structs.replace(frame, values=frame.values[:, 1:].contiguous())


def shorter(frame: Any) -> Any:
    return msgspec.structs.replace(frame, values=frame.values.float())


def with_nan(frame: Any) -> Any:
    return msgspec.structs.replace(frame, values=frame.values * float("nan"))


@pytest.mark.parametrize(
    ("alter", "error", "said"),
    [
        (altered(Activations, narrower), PartyLostError, r"of shape \[4, 4\] and torch.float64"),
        (altered(Activations, shorter), PartyLostError, r"of shape \[4, 5\] and torch.float32"),
        (altered(Activations, with_nan), CutNotANumberError, "party 1 sends activations with NaN"),
        (
            altered(Activations, lambda frame: StateSaved(0)),
            PartyLostError,
            "StateSaved was not requested",
        ),
        (
            altered(Activations, lambda frame: ClientFailed("OSError")),
            PartyLostError,
            "raised OSError",
        ),
        (altered(Activations, lambda frame: None), PartyLostError, "party 1 said nothing for 0.5"),
        (
            altered(Activations, lambda frame: Resume(1, 0)),
            PartyLostError,
            "server cannot process Resume from party 1",
        ),
        (altered(Evaluated, shorter), PartyLostError, r"test data of shape \[9, 5\]"),
    ],
)
def test_what_cannot_be_ends_the_run_by_the_name_of_the_party(
    alter: Alter, error: type[Exception], said: str, tmp_path: Path
) -> None:
    wire = Wire(STRATEGIES["server"], tmp_path, 3, alter)
    one = learner(wire)
    with pytest.raises(error, match=said) as caught:
        trained(one, wire)
    assert "party 1" in str(caught.value)
    # Parties are in the midst of a step, so nothing newer is kept than what all have kept.
    assert getattr(caught.value, "intact", False) is False


def test_what_was_said_before_all_began_anew_is_dropped(tmp_path: Path) -> None:
    """Late activations of a step that is made once more would be one too many."""
    late: list[Any] = []

    def alter(number: int, frame: Any) -> Any:
        if number == 0 and isinstance(frame, Activations) and frame.step == 1:
            late.append(frame)
        # It has been on its way for long.
        if number == 0 and isinstance(frame, Resumed) and late:
            wire.events.append(ClientFrame(0, b"".join(encode(late.pop()))))
        return frame

    strategy = STRATEGIES["server"]
    calm = Wire(strategy, tmp_path / "calm", 3)
    right = trained(learner(calm), calm)
    wire = Wire(strategy, tmp_path / "late", 3, alter, dies={16: 2})
    assert same(trained(learner(wire), wire), right)


def test_without_alignment_all_have_as_many_people(tmp_path: Path) -> None:
    wire = Wire(
        STRATEGIES["server"], tmp_path, 3, tasks=lambda number: task(PEOPLE - (number == 2))
    )
    with pytest.raises(PartyLostError, match=r"party 2 .* it has 21 people, but server has 22"):
        learner(wire)
    assert "same people in the same order, or align" in wire.turned_away[2]


def test_columns_and_labels_that_a_side_does_not_have_are_not_read(tmp_path: Path) -> None:
    """So a site may have zeros there, or what is no number."""

    def of(columns: Sequence[int], labels: bool) -> dure.Task:
        whole = task()
        for data in (whole.train, whole.test):
            assert data is not None
            mine = torch.zeros(6, dtype=torch.bool)
            mine[list(columns)] = True
            data.inputs[:, ~mine] = 0.0
            if not labels:
                data.targets.zero_()
        return whole

    strategy = STRATEGIES["server"]
    calm = Wire(strategy, tmp_path / "calm", 3)
    right = trained(learner(calm), calm)
    wire = Wire(strategy, tmp_path / "own", 3, tasks=lambda number: of(COLUMNS[number], False))
    assert same(trained(learner(wire, own=of([], True)), wire), right)


def test_a_party_that_has_lost_what_it_knew_is_named(tmp_path: Path) -> None:
    strategy = STRATEGIES["server"]
    wire = Wire(strategy, tmp_path, 3)
    one = learner(wire)
    for _ in range(3):
        one.advance(0)
    one.state()
    wire.goes(1)
    for file in (tmp_path / "site-1").glob("head-*.tree"):
        file.unlink()
    wire.comes(1)
    with pytest.raises(PartyLostError, match=r"party 1 .* use its former --state folder"):
        one.advance(0)


@pytest.mark.parametrize("defence", ["isotropic:1", "randomised-response:0.5"])
def test_what_a_defence_draws_follows_from_no_seed_that_parties_know(
    defence: str, tmp_path: Path
) -> None:
    """Whoever could draw the same could take the noise away, or the lies."""
    strategy = dure.VerticalSplit(batch_size=BATCH, defence=defence)
    key = Key.make()
    found = []
    for place, own in enumerate([key, key, Key.make()]):
        wire = Wire(strategy, tmp_path / f"{place}", 3)
        wire.key = own
        found.append(trained(learner(wire), wire))
    run = dure.train(task(), strategy, dure.Simulated(), dure.Stop(steps=STEPS))
    simulated = run.model.get_submodule("heads.0").state_dict()
    assert same(found[0], found[1])
    assert not same(found[0][-1], found[2][-1])
    assert not same(dict(found[0][-1][0]), dict(simulated))


def test_a_party_that_has_everything_needs_nobody_to_join(tmp_path: Path) -> None:
    strategy = dure.VerticalSplit(batch_size=BATCH, label_party=0)
    own = task()
    alone = dure.VerticalModel([nn.Linear(6, 3)], nn.Identity(), "concat", [range(6)]).double()
    one = dure.Task(lambda: alone, own.loss, own.train)
    wire = Wire(strategy, tmp_path, 0)
    with pytest.raises(DureError, match="party 0 has all columns and the labels"):
        learner(wire, own=one)
