"""A client of split learning that sends what cannot be is refused by name, and the others go on by
the bits of a simulated run in which it drops out; no message ends the run, or stops it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_peers import Channels, Lie, Served, served
from torch import Tensor, nn

import dure
from dure.collectives.group import Group
from dure.errors import LossNotFiniteError
from dure.fleet.conditions import Conditions
from dure.protocol.server_context import ServerContext
from dure.split.availability import AvailabilityTracker
from dure.split.messages import (
    Ended,
    HeadGradients,
    Message,
    OutputGradients,
    SideState,
    Smashed,
)
from dure.split.network.checks import RULES
from dure.split.network.control import (
    ClientFailed,
    HeadRefused,
    Hello,
    MeasureModel,
    ModelMeasured,
    Query,
    RosterMembers,
    SealedHead,
)
from dure.split.network.frames import Frame
from dure.split.network.split_server import ClientsLostError
from dure.split.simulated import SimulatedSplitLearner
from small import small_task

ROUNDS = 3
LIAR = 1
replace = msgspec.structs.replace


def with_relu() -> nn.Module:
    """Its tail has no bound for what it is given."""
    return nn.Sequential(
        nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def task() -> dure.Task:
    return small_task(model=with_relu, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5))


def with_adam() -> dure.Task:
    return small_task(optimizer=partial(torch.optim.Adam, lr=0.01))


SYSTEMS: Mapping[str, Any] = {
    "in turn": dure.SplitLearning(clients=3, batch_size=4),
    "in turn, through the server": dure.SplitLearning(clients=3, batch_size=4, handover="server"),
    "in turn, U-shape": dure.SplitLearning(cut=("1", "2"), clients=3, batch_size=4),
    "parallel": dure.ParallelSplit(clients=3, batch_size=4),
    "parallel, U-shape": dure.ParallelSplit(cut=("1", "2"), clients=3, batch_size=4),
    "SplitFed v1": dure.SplitFed(clients=3, batch_size=4),
    "SplitFed v2, int8": dure.SplitFed(version=2, clients=3, batch_size=4, compression="int8"),
    "SplitFed v1, U-shape": dure.SplitFed(cut=("1", "2"), clients=3, batch_size=4),
}


def after(count: int, kind: type, change: Callable[[Any], Any]) -> Callable[[], Lie]:
    """Changes message number `count` of a kind, from 0; gives one frame or several."""

    def make() -> Lie:
        seen = [0]

        def lie(frame: Frame) -> Sequence[Frame]:
            if not isinstance(frame, kind):
                return [frame]
            seen[0] += 1
            lied = change(frame) if seen[0] == count + 1 else frame
            return lied if isinstance(lied, list) else [lied]

        return lie

    return make


def full(value: float) -> Callable[[Tensor], Tensor]:
    return lambda one: torch.full_like(one, value)


def of_values(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda m: replace(m, values=tuple(change(one) for one in m.values))


def of_targets(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda m: replace(m, targets=[change(one) for one in m.targets])


def of_head(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda m: replace(
        m, head=replace(m.head, weights=tuple(change(one) for one in m.head.weights))
    )


def remembering(state: Mapping[str, Any]) -> Callable[[Any], Any]:
    return lambda m: replace(
        m, head=replace(m.head, optimizer=tuple(dict(state) for _ in m.head.weights))
    )


VALUES: Mapping[str, Callable[[Any], Any]] = {
    "NaN": of_values(full(math.nan)),
    "another dtype": of_values(lambda one: one.float()),
    "another shape": of_values(lambda one: one[:, 1:].contiguous()),
    "one dimension more": of_values(lambda one: one[None]),
    "none": lambda m: replace(m, values=()),
    "one too many": lambda m: replace(m, values=(*m.values, *m.values, *m.values)),
    "another step": lambda m: replace(m, step=99),
    "a step below 0": lambda m: replace(m, step=-1),
    "a turn that was never": lambda m: replace(m, turn=10_000),
    "a turn below 0": lambda m: replace(m, turn=-1),
    "twice": lambda m: [m, m],
    "ended early": lambda m: Ended(m.turn, None),
    "a head instead": lambda m: Ended(m.turn, SideState((), (), ())),
    "gradients of a head instead": lambda m: HeadGradients(m.turn, m.step, ()),
    "what a server says": lambda m: RosterMembers(b""),
    "a measurement": lambda m: ModelMeasured(0, {"test_loss": 0.0}),
    "a question": lambda m: Query(1, m.values),
    "a head that nobody asked for": lambda m: SealedHead(
        m.turn, 0, torch.zeros(9, dtype=torch.uint8)
    ),
    "a head that it was not handed": lambda m: HeadRefused(m.turn, "no"),
    "failure": lambda m: ClientFailed("x" * 10_000),
    "Hello again": lambda m: Hello(1, b"", ""),
}
"""Of messages with values."""

SMASHED: Mapping[str, Callable[[Any], Any]] = {
    **VALUES,
    "gradients instead": lambda m: OutputGradients(m.turn, m.step, m.values, 0, 0.0, 1.0),
    "infinite": of_values(full(math.inf)),
    "as large as can be": of_values(full(1e308)),
    "absurd": of_values(full(1e30)),
    "one example": lambda m: replace(m, examples=1),
    "no example": lambda m: replace(m, examples=0),
    "examples below 0": lambda m: replace(m, examples=-4),
    "many examples": lambda m: replace(m, examples=1 << 40),
    "a batch of one": lambda m: replace(
        m,
        examples=1,
        values=tuple(one[:1].clone() for one in m.values),
        targets=None if m.targets is None else [one[:1].clone() for one in m.targets],
    ),
    "counted NaN": lambda m: replace(m, counted=math.nan),
    "counted below 0": lambda m: replace(m, counted=-1e30),
    "counted too much": lambda m: replace(m, counted=1e30),
}

TARGETS: Mapping[str, Callable[[Any], Any]] = {
    "no targets": lambda m: replace(m, targets=None),
    "no leaf": lambda m: replace(m, targets=[]),
    "two leaves": lambda m: replace(m, targets=[*m.targets, *m.targets]),
    "no class": of_targets(full(3)),
    "a class below 0": of_targets(full(-5)),
    "a class far off": of_targets(full(1 << 60)),
    "as floats": of_targets(lambda one: one.double()),
    "of 32 bits": of_targets(lambda one: one.int()),
    "truth values": of_targets(lambda one: one > 0),
    "two dimensions": of_targets(lambda one: one[:, None].repeat(1, 3)),
    "no dimension": of_targets(lambda one: one[0].clone()),
    "one too few": of_targets(lambda one: one[1:].clone()),
    "a text": of_targets(lambda one: "a"),
    "nothing": of_targets(lambda one: None),
    "a number": of_targets(lambda one: 1.5),
}

RETURNED: Mapping[str, Callable[[Any], Any]] = {
    **VALUES,
    "infinite": of_values(full(math.inf)),
    "absurd": of_values(full(1e30)),
    "missed below 0": lambda m: replace(m, missed=-1),
    "missed too many": lambda m: replace(m, missed=1 << 40),
    "loss NaN": lambda m: replace(m, loss=math.nan),
    "loss infinite": lambda m: replace(m, loss=math.inf),
    "loss absurd": lambda m: replace(m, loss=1e308),
    "counted NaN": lambda m: replace(m, counted=math.nan),
    "counted below 0": lambda m: replace(m, counted=-5.0),
    "counted nothing": lambda m: replace(m, counted=0.0),
    "counted too much": lambda m: replace(m, counted=1e9),
}

GRADIENTS: Mapping[str, Callable[[Any], Any]] = {
    "NaN": of_values(full(math.nan)),
    "absurd": of_values(full(1e30)),
    "another shape": of_values(lambda one: one[1:].clone()),
    "another dtype": of_values(lambda one: one.float()),
    "one too few": lambda m: replace(m, values=m.values[1:]),
    "another step": lambda m: replace(m, step=m.step + 1),
    "twice": lambda m: [m, m],
    "ended": lambda m: Ended(m.turn, None),
}

HEADS: Mapping[str, Callable[[Any], Any]] = {
    "none": lambda m: replace(m, head=None),
    "NaN": of_head(full(math.nan)),
    "infinite": of_head(full(math.inf)),
    "huge": of_head(full(1e38)),
    "another shape": of_head(lambda one: one[1:].clone()),
    "another dtype": of_head(lambda one: one.float()),
    "remembers a text": remembering({"momentum_buffer": "x"}),
    "remembers another shape": remembering({"momentum_buffer": torch.zeros(3)}),
    "remembers something else": remembering({"step": 3.0}),
    "empty": lambda m: replace(m, head=SideState((), (), ())),
}

KEPT: Mapping[str, Callable[[Any], Any]] = {
    "a head that stays": lambda m: replace(m, head=SideState((), (), ())),
    "another turn": lambda m: replace(m, turn=m.turn + 1000),
}


def table(kind: type, lies: Mapping[str, Any], systems: Sequence[str], count: int) -> list[Any]:
    return [
        pytest.param(system, after(count, kind, lie), id=f"{system}: {kind.__name__}, {name}")
        for system in systems
        for name, lie in lies.items()
    ]


U_SHAPES = [name for name in SYSTEMS if "U-shape" in name]
RETURNS = ["in turn, through the server", "SplitFed v1"]
SOME = ("NaN", "another step", "a turn that was never", "twice", "ended early", "infinite")


def some(lies: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    return {name: lies[name] for name in names}


LIES = [
    # The second step of the second round.
    *table(Smashed, SMASHED, ["parallel"], 5),
    *table(Smashed, some(SMASHED, *SOME), ["in turn", "SplitFed v1"], 5),
    *table(Smashed, some(SMASHED, *SOME[:5], "counted NaN"), ["parallel, U-shape"], 5),
    *table(Smashed, some(SMASHED, "NaN"), ["SplitFed v1, U-shape"], 5),
    *table(Smashed, some(SMASHED, "another dtype", "none"), ["SplitFed v2, int8"], 5),
    *table(Smashed, TARGETS, ["parallel"], 5),
    *table(Smashed, some(TARGETS, "no class", "as floats"), ["in turn", "SplitFed v1"], 5),
    *table(OutputGradients, RETURNED, ["parallel, U-shape"], 5),
    *table(OutputGradients, some(RETURNED, "loss NaN", "twice"), U_SHAPES, 5),
    *table(HeadGradients, GRADIENTS, ["parallel"], 5),
    *table(Ended, HEADS, RETURNS, 1),
    *table(Ended, {"twice": VALUES["twice"]}, ["SplitFed v1"], 1),
    *table(Ended, KEPT, ["in turn", "parallel"], 1),
]
"""What the liar does in the second round."""


@cache
def dropped_out(system: str, make: Callable[[], dure.Task] = task) -> Any:
    """The simulated run in which the liar drops out of the second round, and stays away."""
    strategy = SYSTEMS[system]
    with pytest.MonkeyPatch.context() as patch:
        name = f"client {LIAR}"

        def draw(self: AvailabilityTracker, one: str) -> None:
            if one == name and self.server.order.round == 1:
                self._drops[one] = 1

        def following(self: AvailabilityTracker, one: str, now: float) -> float:
            return math.inf if one == name and self.server.order.round > 1 else now

        patch.setattr(AvailabilityTracker, "_draw", draw)
        patch.setattr(AvailabilityTracker, "_next", following)
        made = make()
        context = ServerContext(Group(), conditions=Conditions(drop_out=1e-9))
        learner = SimulatedSplitLearner(made, context, 0, strategy.of(made).plan)
        losses = [learner.advance(0).loss for _ in range(ROUNDS)]
    heads = {
        number: learner._known(learner.clients[number]).own.weights
        for number in range(3)
        if number != LIAR
    }
    return losses, list(learner.order.tails[0].own.weights), heads


def check_same(found: Served, system: str, make: Callable[[], dure.Task] = task) -> None:
    """The others have trained by the bits of the simulation without the liar."""
    losses, tail, heads = dropped_out(system, make)
    assert found.losses == losses
    assert all(map(torch.equal, found.tail(), tail))
    for number, head in heads.items():
        assert all(map(torch.equal, found.head(number), head))


@pytest.mark.parametrize(("system", "lie"), LIES)
def test_a_liar_is_refused_by_name_and_the_others_go_on_without_it(
    system: str, lie: Callable[[], Lie], tmp_path: Path
) -> None:
    found = served(tmp_path, SYSTEMS[system], task, {LIAR: lie()}, ROUNDS)
    assert found.refused.keys() == {LIAR}, found.told
    assert any(text.startswith(f"client {LIAR} is left out") for text in found.told)
    check_same(found, system)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("a text", {"exp_avg": "x"}),
        ("below 0", None),
    ],
)
def test_what_an_optimizer_cannot_remember_is_refused(
    name: str, state: Mapping[str, Any] | None, tmp_path: Path
) -> None:
    def negative(m: Any) -> Any:
        states = [
            {**one, "exp_avg_sq": torch.full_like(one["exp_avg_sq"], -1.0)}
            for one in m.head.optimizer
        ]
        return replace(m, head=replace(m.head, optimizer=tuple(states)))

    lie = after(1, Ended, negative if state is None else remembering(state))
    system = "in turn, through the server"
    found = served(tmp_path, SYSTEMS[system], with_adam, {LIAR: lie()}, ROUNDS)
    assert found.refused.keys() == {LIAR}, found.told
    check_same(found, system, with_adam)


# Whatever a field says


NUMBERS = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.sampled_from([0, 1, -1, 5, 1 << 31]),
)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.int64, torch.uint8, torch.bool])


@st.composite
def some_tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    value = draw(st.sampled_from([0.0, 1.0, -1.0, 1e30, 1e300, math.inf, math.nan]))
    dtype = draw(DTYPES)
    if not dtype.is_floating_point:
        value = 1.0
    return torch.full(shape, value, dtype=torch.float64).to(dtype)


FILLINGS = st.sampled_from([0.0, 1.0, 1e10, 1e30, 1e308, -1e308, math.inf, -math.inf, math.nan])


@st.composite
def lies(draw: st.DrawFn) -> Callable[[Any], Any]:
    """Another value in one field of a message."""
    data = draw(st.integers(0, 1 << 30))
    number = draw(NUMBERS)
    real = draw(FLOATS)
    some = tuple(draw(st.lists(some_tensors(), max_size=3)))
    filling = draw(FILLINGS)
    whole = draw(st.booleans())

    def change(message: Any) -> Any:
        fields = message.__struct_fields__
        field = fields[data % len(fields)]
        before = getattr(message, field)
        if isinstance(before, bool):
            return replace(message, **{field: not before})
        if isinstance(before, int):
            return replace(message, **{field: number})
        if isinstance(before, float):
            return replace(message, **{field: real})
        if field == "values" and whole:
            return of_values(full(filling if before[0].is_floating_point() else 1.0))(message)
        if field == "values":
            return replace(message, values=some)
        if field == "targets":
            return replace(message, targets=list(some))
        if field == "head":
            return replace(message, head=SideState(some, some, tuple({} for _ in some)))
        return message

    return change


@pytest.mark.parametrize("system", [*SYSTEMS])
@given(change=lies(), kind=st.sampled_from([Smashed, OutputGradients, HeadGradients, Ended]))
@settings(max_examples=8)
def test_no_value_of_a_field_ends_the_run_or_harms_the_others(
    system: str, change: Any, kind: type, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lie = after(1, kind, change)
    found = served(tmp_path_factory.mktemp("run"), SYSTEMS[system], task, {LIAR: lie()}, 2)
    assert found.refused.keys() <= {LIAR}, found.told
    assert all(loss is not None and math.isfinite(loss) for loss in found.losses)
    assert all(bool(one.isfinite().all()) for one in found.tail())


# Evaluation


MEASURED: Mapping[str, tuple[type, Callable[[Any], Any]]] = {
    "NaN": (Query, of_values(full(math.nan))),
    "another shape": (Query, of_values(lambda one: one[:, 1:].contiguous())),
    "more examples than there are": (Query, lambda m: replace(m, examples=21)),
    "no example": (Query, lambda m: replace(m, examples=0)),
    "another number of test examples": (Query, lambda m: replace(m, of=5)),
    "the same examples again": (Query, lambda m: [m, m]),
    "a name of the history": (ModelMeasured, lambda m: replace(m, values={"loss": 0.0})),
    "a metric that the task does not have": (
        ModelMeasured,
        lambda m: replace(m, values={"test_fairness": 1.0}),
    ),
    "a metric that is no number": (
        ModelMeasured,
        lambda m: replace(m, values={"test_loss": math.nan}),
    ),
    "another round": (ModelMeasured, lambda m: replace(m, round=7)),
    "values of training": (Query, lambda m: Smashed(0, 0, 4, 4.0, m.values, None)),
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_false_measurement_is_refused_and_training_goes_on(name: str, tmp_path: Path) -> None:
    kind, change = MEASURED[name]
    lies_of = {0: after(0, kind, change)()}
    found = served(tmp_path, SYSTEMS["parallel"], task, lies_of, 2)
    assert found.refused.keys() == {0}, found.told
    assert found.measured[0] == {}
    assert found.measured[1]["test_accuracy"] > 0
    assert any("client 0 does not evaluate the model" in text for text in found.told)


def test_whoever_is_not_asked_to_measure_does_not_end_the_measurement(tmp_path: Path) -> None:
    def prepare(channels: Channels) -> None:
        says = channels.say

        def say(client: int, frame: Any) -> None:
            if client == 2 and b"Measure" in bytes(frame[0]):
                channels.says(0, ModelMeasured(0, {"test_loss": 0.0}))
            says(client, frame)

        channels.say = say  # type: ignore[method-assign]

    found = served(tmp_path, SYSTEMS["in turn"], task, {}, 1, prepare=prepare)
    assert found.refused.keys() == {0}
    assert found.measured[0]["test_loss"] > 0.1


# Heads that clients hand to each other


@pytest.mark.parametrize("change", [of_head(full(math.nan)), of_head(full(1e38))])
def test_a_head_that_cannot_be_is_not_blamed_on_the_client_that_is_handed_it(
    change: Callable[[Any], Any], tmp_path: Path
) -> None:
    def prepare(channels: Channels) -> None:
        machine = channels.peers[0].machine
        receive = machine.receive

        def receives(sender: str, message: Message, now: float) -> Any:
            said = receive(sender, message, now)
            return [(to, change(one) if to != "server" else one) for to, one in said]

        machine.receive = receives  # type: ignore[method-assign]

    found = served(tmp_path, SYSTEMS["in turn"], task, {}, 1, prepare=prepare)
    # Both were handed it, and neither is turned away.
    assert found.refused == {}
    for number in (1, 2):
        assert any(
            text.startswith(f"client {number} is left out of this round: it rejects the head")
            and "the head that it received: client 0 hands on a head" in text
            for text in found.told
        ), found.told


# Waits end


def test_a_client_that_says_nothing_is_left_out_after_the_deadline(tmp_path: Path) -> None:
    def silent(frame: Frame) -> Sequence[Frame]:
        return []

    for system in ("in turn", "parallel", "SplitFed v1", "parallel, U-shape"):
        found = served(tmp_path / system, SYSTEMS[system], task, {LIAR: silent}, 1)
        assert "said nothing for" in found.refused[LIAR]


@pytest.mark.parametrize("system", ["in turn", "parallel", "SplitFed v2, int8"])
def test_a_client_that_comes_again_and_again_is_left_out(system: str, tmp_path: Path) -> None:
    def prepare(channels: Channels) -> None:
        peer = channels.peers[LIAR]

        def lie(frame: Frame) -> Sequence[Frame]:
            if isinstance(frame, Smashed) and LIAR not in channels.turned_away:
                channels.goes(LIAR)
                channels.comes(peer)
                return []
            return [frame]

        peer.lie = lie

    found = served(tmp_path, SYSTEMS[system], task, {}, 1, prepare=prepare)
    assert "reconnected" in found.refused[LIAR]
    assert found.losses[0] is not None


@pytest.mark.parametrize("system", ["in turn", "SplitFed v1"])
def test_a_client_without_a_turn_begins_nobody_elses_anew(system: str, tmp_path: Path) -> None:
    """Refused, it comes again and lies again, as often as it likes."""
    begun: list[int] = []

    def prepare(channels: Channels) -> None:
        hall = channels.peers[0]
        says = hall.lie

        def counts(frame: Frame) -> Sequence[Frame]:
            if isinstance(frame, Smashed):
                begun.append(frame.step)
                channels.comes(channels.peers[2])
                channels.says(2, ClientFailed("no"))
            return says(frame)

        hall.lie = counts

    served(tmp_path, SYSTEMS[system], task, {}, 1, answer_timeout=5.0, prepare=prepare)
    # One that has a turn of its own takes the round back as it comes, and as it is refused.
    assert begun.count(0) <= 3


# All of them at once


def always(change: Callable[[Any], Any]) -> Lie:
    """Changes all values that it sends."""
    return lambda frame: [change(frame) if isinstance(frame, Smashed) else frame]


def test_where_everybodys_loss_is_no_number_the_run_ends_and_names_all(tmp_path: Path) -> None:
    lie = {number: always(of_values(full(math.nan))) for number in range(3)}
    for system in ("in turn", "SplitFed v1"):
        with pytest.raises(LossNotFiniteError, match="client 0 and client 1 and client 2"):
            served(tmp_path / system, SYSTEMS[system], task, lie, 3)


def test_where_everybody_lies_the_run_ends_with_an_error_that_says_why(tmp_path: Path) -> None:
    lie = {number: always(SMASHED["another step"]) for number in range(3)}
    with pytest.raises(ClientsLostError, match=r"client 0: sent an invalid message.*client 2"):
        served(tmp_path, SYSTEMS["parallel"], task, lie, 3)


# The table of checks


@pytest.mark.parametrize("kind", RULES)
def test_every_field_of_every_message_of_a_client_has_a_rule(kind: type) -> None:
    fields = kind.__struct_fields__  # type: ignore[attr-defined]
    assert sorted(rule.field for rule in RULES[kind]) == sorted(fields)


def test_the_page_has_the_table_of_checks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "split-deployment.md").read_text()
    for kind, rules in RULES.items():
        for rule in rules:
            row = f"| `{kind.__name__}` | `{rule.field}` | {rule.shown} |"
            assert row in page, row


# At the door


@pytest.mark.parametrize(
    "changes",
    [
        {"examples": 0},
        {"examples": 1 << 60},
        {"examples": -1},
        {"tests": 1 << 60},
        {"digest": "../../x"},
        {"form": b"{}"},
        {"member": b"{}"},
    ],
)
def test_a_client_that_says_of_itself_what_cannot_be_is_turned_away_and_waited_for(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    def prepare(channels: Channels) -> None:
        peer = channels.peers[LIAR]
        right = peer.hello
        peer.hello = replace(right, **changes)
        channels.events.clear()
        for one in channels.peers:
            channels.comes(one)

        def comes_again(number: int, reason: str) -> None:
            peer.hello = right
            channels.comes(peer)

        channels.after = comes_again

    found = served(tmp_path, SYSTEMS["in turn"], task, {}, 1, before=prepare)
    assert any(text.startswith(f"client {LIAR} is rejected") for text in found.told)
    assert found.refused == {}


def test_a_client_that_speaks_before_all_are_there_is_turned_away(tmp_path: Path) -> None:
    def prepare(channels: Channels) -> None:
        peer = channels.peers[LIAR]
        channels.events.clear()
        channels.comes(peer)
        channels.says(LIAR, MeasureModel(0, 0))

        def all_come(number: int, reason: str) -> None:
            channels.after = lambda number, reason: None
            for one in channels.peers:
                channels.comes(one)

        channels.after = all_come

    found = served(tmp_path, SYSTEMS["in turn"], task, {}, 1, before=prepare)
    assert any("before all clients were connected" in text for text in found.told)
