"""Split learning: which part of the model computes where, and the values that cross the cut.

The picture shows one round of the simulated clients and server (`dure.split.simulated`,
`dure.split.parties.simulated`), with the state machines that a network drives:

    vanilla          one cut; the server passes the head from client to client
    peer-to-peer     one cut; each client hands its head to the next client
    u-shaped         two cuts; the end of the model and the labels stay with the client
    parallel         one cut; the server joins the batches of all clients
    split-fed        one cut; all clients at the same time, heads and tails are averaged
    vertical         parties with different columns of the same examples

A forward of a part takes a third of its training time, and a backward two thirds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dure.drawing.lanes import LaneArrow, LanePanel, LaneSpan, lanes_picture
from dure.drawing.options import SplitDrawing
from dure.drawing.picture import Picture
from dure.drawing.virtual_run import (
    advanced,
    check_counts,
    conditions_of,
    context_of,
    random_task,
    recorded_transmissions,
)
from dure.errors import suggestion
from dure.fleet.virtual_network import Transmission
from dure.split.in_turn import SplitLearning
from dure.split.messages import SERVER
from dure.split.parallel import ParallelSplit
from dure.split.parties.simulated import SimulatedVerticalLearner
from dure.split.simulated import SimulatedSplitLearner
from dure.split.split_fed import SplitFed
from dure.split.strategy import Split
from dure.split.vertical import VerticalSplit
from dure.worlds.simulated import Simulated

VARIANTS = {
    "vanilla": "labels at the server, which passes the head on",
    "peer-to-peer": "labels at the server, clients hand the head to each other",
    "u-shaped": "labels and the end of the model at the client",
    "parallel": "the server joins the batches of all clients",
    "split-fed": "all clients at the same time, heads and tails are averaged",
    "vertical": "parties with different columns, labels at the server",
}
"""Variants of split learning."""

_EXAMPLES = 8
"""Examples of a client's step."""

_MESSAGES = {
    "Smashed": ("f", "values"),
    "Outputs": ("f", "values"),
    "Activations": ("f", "values"),
    "Gradients": ("b", "gradients"),
    "OutputGradients": ("b", "gradients"),
    "HeadGradients": ("b", "head gradients"),
    "ActivationGradients": ("b", "gradients"),
    "HeadSum": ("b", "head gradients"),
}
"""Class and content of a message by its type; all other messages carry weights of a head."""

_LEGEND = [
    ("f", "head forward; values at the cut"),
    ("b", "head backward; gradients"),
    ("s", "tail or end, both passes"),
    ("c", "link busy; head weights"),
    ("idle", "idle"),
]


@dataclass(frozen=True)
class SplitRound:
    """Round of split learning: its panel, and its transmissions."""

    panel: LanePanel
    transmissions: tuple[Transmission, ...]


def split_round(variant: str, how: SplitDrawing) -> SplitRound:
    """Simulate a round, or the steps of vertical split learning. variant: its name."""
    if variant not in VARIANTS:
        raise ValueError(
            f"there is no picture of split learning {variant!r}{suggestion(variant, VARIANTS)}"
        )
    check_counts(12, clients=how.clients, steps=how.steps)
    if variant == "vertical":
        return _vertical_round(how)
    task = random_task(_EXAMPLES * how.clients * how.steps)
    strategy = _strategy(variant, how.clients)
    strategy.check(task, Simulated())
    conditions = conditions_of(how.clients, _EXAMPLES, how.transfer)
    learner = strategy.learner(task, context_of(conditions), 0)
    assert isinstance(learner, SimulatedSplitLearner)
    found = recorded_transmissions(learner.network)
    activities: list[tuple[str, str, float, float]] = []
    _watch(learner.server.busy, SERVER, activities)
    for one in learner.clients:
        _watch(one.busy, one.name, activities)
    numbers = advanced(learner)
    names = tuple(one.name for one in learner.clients)
    end = float(numbers["virtual_seconds"])
    return _round(variant, (SERVER, *names), activities, found, end)


def _strategy(variant: str, clients: int) -> Split:
    if variant == "parallel":
        return ParallelSplit(clients=clients, batch_size=_EXAMPLES, cut=("1",))
    if variant == "split-fed":
        return SplitFed(clients=clients, batch_size=_EXAMPLES, cut=("1",))
    return SplitLearning(
        clients=clients,
        batch_size=_EXAMPLES,
        cut=("1", "2") if variant == "u-shaped" else ("1",),
        handover="server" if variant == "vanilla" else "peer",
    )


def _vertical_round(how: SplitDrawing) -> SplitRound:
    task = random_task(_EXAMPLES * how.steps)
    strategy = VerticalSplit(parties=how.clients, batch_size=_EXAMPLES)
    strategy.check(task, Simulated())
    conditions = conditions_of(how.clients, _EXAMPLES, how.transfer)
    learner = strategy.learner(task, context_of(conditions), 0)
    assert isinstance(learner, SimulatedVerticalLearner)
    found = recorded_transmissions(learner.network)
    activities: list[tuple[str, str, float, float]] = []
    _watch(learner.holder.busy, SERVER, activities)
    for one in learner.members:
        _watch(one.busy, one.name, activities)
    for _ in range(how.steps):
        learner.advance(0)
    names = tuple(one.name for one in learner.members)
    return _round("vertical", (SERVER, *names), activities, found, learner.network.now)


def _watch(busy: Any, name: str, activities: list[tuple[str, str, float, float]]) -> None:
    """Add the activities of a participant to the list, besides its own record."""
    busy.watch = partial(_note, busy.watch, name, activities)


def _note(
    before: Any,
    name: str,
    activities: list[tuple[str, str, float, float]],
    part: str,
    began: float,
    seconds: float,
) -> None:
    before(part, began, seconds)
    activities.append((name, part, began, began + seconds))


def _round(
    variant: str,
    lanes: tuple[str, ...],
    activities: Sequence[tuple[str, str, float, float]],
    found: Sequence[Transmission],
    end: float,
) -> SplitRound:
    spans = []
    arrows = []
    forward: dict[str, bool] = {}
    for name, part, began, over in activities:
        kind = "s"
        if part == "head":
            # A head's passes alternate: forward, then backward of the same batch.
            forward[name] = not forward.get(name, False)
            kind = "f" if forward[name] else "b"
        spans.append(LaneSpan(name, kind, began, over, part))
    for one in found:
        kind, content = _MESSAGES.get(type(one.message).__name__, ("c", "head weights"))
        arrows.append(LaneArrow(one.sender, one.receiver, kind, one.left, one.there, content))
        spans.append(LaneSpan(one.sender, "c", one.left, one.gone))
        spans.append(LaneSpan(one.receiver, "c", one.arriving, one.there))
    panel = LanePanel("", lanes, tuple(spans), tuple(arrows), lanes[1:], end)
    waiting = panel.waiting_share()
    crossing = sum(one.nbytes for one in found)
    title = (
        f"{variant}: {end:.4g} units, {crossing:,} bytes in {len(found)} messages, clients idle "
        f"for {100 * waiting:.1f} % of the time"
    )
    return SplitRound(replace(panel, title=title), tuple(found))


def split_picture(variants: Sequence[str], how: SplitDrawing, width: int = 100) -> Picture:
    """Draw a round of each variant. width: columns of a terminal."""
    drawn = [split_round(variant, how) for variant in variants]
    figures = (
        f"{how.clients} clients, {how.steps} step{'s' * (how.steps != 1)} each; the whole model "
        "trains a batch in 1 on a client and in 0.5 on the server; a message of the model's size "
        f"takes {how.transfer:g}."
    )
    caption = [f"{variant}: {VARIANTS[variant]}." for variant in variants]
    caption.append("A run of the clients and the server under the virtual clock.")
    panels = [one.panel for one in drawn]
    return lanes_picture("Split learning", figures, _LEGEND, panels, caption, width)
