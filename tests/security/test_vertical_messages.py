"""A party that sends what cannot be ends the run by its name, and nothing of it is counted; a party
that asks too often about ids gets no answer, whoever is started anew in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from party_peers import holder, parties
from split_peers import Lie
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.errors import CutNotANumberError, LossNotFiniteError
from dure.split.alignment import Blinded, Common, DoubleBlinded, EmptyIntersectionError
from dure.split.network.control import Aligned, ClientFailed, Evaluated, Resumed, StateSaved
from dure.split.network.frames import Frame
from dure.split.network.parties_checks import RULES
from dure.split.network.vertical_split_server import PartyLostError
from dure.split.parties.messages import Activations

replace = msgspec.structs.replace
FEATURES = [[0, 1], [2, 5], [3, 4]]
STRATEGY = dure.VerticalSplit(features=("0,1", "2,5", "3,4"), batch_size=8)
ALIGNED = dure.VerticalSplit(features=("0,1", "2,5", "3,4"), batch_size=8, align=True)
LIAR = 1


def model() -> nn.Module:
    heads = [nn.Sequential(nn.Linear(2, 5), nn.ReLU()) for _ in FEATURES]
    return dure.VerticalModel(heads, nn.Linear(15, 3), "concat", FEATURES).double()


def examples(people: int, first: int = 0) -> dure.Examples:
    draws = torch.Generator().manual_seed(people)
    inputs = torch.randn(people, 6, generator=draws, dtype=torch.float64)
    keys = [f"person {first + number}" for number in range(people)]
    return dure.Examples(inputs, inputs[:, :3].argmax(1), keys=keys)


def task(first: int = 0) -> dure.Task:
    return dure.Task(model, F.cross_entropy, examples(20, first), examples(7))


def after(count: int, kind: type, change: Callable[[Any], Any]) -> Lie:
    """Changes message number `count` of a kind, from 0; gives one frame or several."""
    seen = [0]

    def lie(frame: Frame) -> Sequence[Frame]:
        if not isinstance(frame, kind):
            return [frame]
        seen[0] += 1
        lied = change(frame) if seen[0] == count + 1 else frame
        return lied if isinstance(lied, list) else [lied]

    return lie


def of_values(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda m: replace(m, values=change(m.values))


def full(value: float) -> Callable[[Any], Any]:
    return of_values(lambda one: torch.full_like(one, value))


WRONG: Mapping[str, Callable[[Any], Any]] = {
    "another shape": of_values(lambda one: one[1:].clone()),
    "another dtype": of_values(lambda one: one.float()),
    "no dimension": of_values(lambda one: one.sum()),
    "twice": lambda m: [m, m],
    "what nobody asked for": lambda m: [StateSaved(0), m],
    "what is long over": lambda m: [Aligned(), m],
    "ids": lambda m: [Blinded(0, 1, torch.zeros(1, 32, dtype=torch.uint8)), m],
    "a turn to come": lambda m: [Resumed(99), m],
    "a turn twice": lambda m: [Resumed(1), m],
    "what a holder says": lambda m: Common(torch.tensor([0])),
    "failure": lambda m: ClientFailed("x" * 10_000),
}


def steps(folder: Path, lie: Lie, strategy: Any = STRATEGY, count: int = 3) -> dict[str, float]:
    """Trains some steps, and measures."""
    served = holder(folder, strategy, task, parties(folder, strategy, task, {LIAR: lie}))
    for _ in range(count):
        served.advance(0)
    served.state()
    return served.evaluate()


ACTIVATIONS = {
    **WRONG,
    "another step": lambda m: replace(m, step=m.step + 1),
    "a step below 0": lambda m: replace(m, step=-1),
}
EVALUATED = {
    **WRONG,
    "NaN": full(math.nan),
    "infinite": full(math.inf),
    "absurd": full(1e300),
    "other rows": lambda m: replace(m, first=m.first + 1),
    "a step instead": lambda m: StateSaved(3),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_that_cannot_be_end_the_run_by_the_name_of_the_party(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(PartyLostError, match=r"^party 1 (sent an invalid message|cannot continue)"):
        steps(tmp_path, after(1, Activations, ACTIVATIONS[name]))


@pytest.mark.parametrize("name", EVALUATED)
def test_test_activations_that_cannot_be_end_the_run_by_the_name_of_the_party(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(PartyLostError, match=r"^party 1 (sent an invalid message|cannot continue)"):
        steps(tmp_path, after(0, Evaluated, EVALUATED[name]))


@pytest.mark.parametrize("change", [lambda m: replace(m, step=7), lambda m: [m, m]])
def test_a_false_word_that_all_is_kept_ends_the_run_by_the_name_of_the_party(
    change: Callable[[Any], Any], tmp_path: Path
) -> None:
    with pytest.raises(PartyLostError, match=r"^party 1 sent an invalid message"):
        steps(tmp_path, after(0, StateSaved, change))


@pytest.mark.parametrize(
    ("value", "error"),
    [(math.nan, CutNotANumberError), (math.inf, LossNotFiniteError), (1e308, LossNotFiniteError)],
)
def test_a_loss_that_is_no_number_names_the_party_whose_activations_made_it(
    value: float, error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error, match="party 1"):
        steps(tmp_path, after(1, Activations, full(value)))


def test_a_party_that_says_nothing_ends_the_run_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(PartyLostError, match=r"^party 1 said nothing for"):
        steps(tmp_path, after(1, Activations, lambda m: []))


@given(
    change=st.sampled_from([Activations, Evaluated, StateSaved, Resumed]),
    number=st.integers(-(1 << 63), (1 << 63) - 1),
    shape=st.lists(st.integers(0, 9), max_size=3),
    value=st.sampled_from([0.0, 1.0, 1e30, math.inf, math.nan]),
    which=st.integers(0, 5),
)
@settings(max_examples=25)
def test_whatever_a_field_says_only_the_liar_is_named(
    change: type,
    number: int,
    shape: list[int],
    value: float,
    which: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def lie(message: Any) -> Any:
        fields = message.__struct_fields__
        field = fields[which % len(fields)]
        before = getattr(message, field)
        if isinstance(before, Tensor):
            return replace(message, values=torch.full(shape, value, dtype=before.dtype))
        given = not before if isinstance(before, bool) else number
        return replace(message, **{field: given})

    try:
        steps(tmp_path_factory.mktemp("run"), after(0, change, lie))
    except (PartyLostError, LossNotFiniteError) as error:
        assert "party 1" in str(error)  # noqa: PT017
        assert "party 0" not in str(error)  # noqa: PT017


# Alignment


def test_one_value_for_all_places_ends_the_run_by_the_name_of_the_party(tmp_path: Path) -> None:
    def lie(message: Any) -> Any:
        return replace(message, points=message.points[:1].repeat(len(message.points), 1))

    with pytest.raises(PartyLostError, match=r"^party 1 sent an invalid message: .*a point twice"):
        steps(tmp_path, after(0, DoubleBlinded, lie), ALIGNED)


def test_more_ids_than_at_check_in_end_the_run_by_the_name_of_the_party(tmp_path: Path) -> None:
    peers = parties(tmp_path, ALIGNED, task, {})
    peers[LIAR].hello = replace(peers[LIAR].hello, examples=3)
    with pytest.raises(PartyLostError, match=r"party 1 has 20 ids, but has to have 1 to 3"):
        holder(tmp_path, ALIGNED, task, peers)


@pytest.mark.parametrize("says", [lambda m: [Aligned(), m], lambda m: [m, m]])
def test_who_says_too_early_or_twice_that_it_is_aligned_is_refused(
    says: Callable[[Any], Any], tmp_path: Path
) -> None:
    kind = Blinded if says(0)[0] == Aligned() else Aligned
    with pytest.raises(PartyLostError, match=r"^party 1 sent an invalid message"):
        steps(tmp_path, after(0, kind, says), ALIGNED)


def test_nobody_who_is_with_all_is_nobodys_lie(tmp_path: Path) -> None:
    peers = parties(tmp_path, ALIGNED, lambda: task(100), {})
    with pytest.raises(EmptyIntersectionError, match="no id is common to all parties"):
        holder(tmp_path, ALIGNED, task, peers)


class CrashError(Exception):
    """The holder's process is gone."""


def crashing(message: Any) -> Any:
    raise CrashError


def crashed(folder: Path) -> list[Any]:
    """The parties of a run whose holder is killed when the second one has its answer."""
    peers = parties(folder, ALIGNED, task, {2: after(0, Aligned, crashing)})
    with pytest.raises(CrashError):
        holder(folder, ALIGNED, task, peers)
    for one in peers:
        one.lie = lambda frame: [frame]
    return peers


def test_an_alignment_that_was_interrupted_is_made_again_by_the_same_points(tmp_path: Path) -> None:
    crashed(tmp_path)
    served = holder(tmp_path, ALIGNED, task, parties(tmp_path, ALIGNED, task, {}))
    assert served.examples == 20
    for _ in range(2):
        assert served.advance(0).loss is not None
    # Nobody needs the secrets any more, and nobody reads them later.
    assert not list(tmp_path.rglob("align*.pem"))


def test_a_party_that_comes_again_with_other_ids_is_refused(tmp_path: Path) -> None:
    crashed(tmp_path)
    peers = parties(tmp_path, ALIGNED, task, {})
    peers[LIAR].site.ids = [f"guess {number}" for number in range(20)]
    with pytest.raises(PartyLostError, match=r"^party 1 .*sends another list of ids"):
        holder(tmp_path, ALIGNED, task, peers)


def test_a_holder_that_comes_again_with_other_ids_gets_no_answer(tmp_path: Path) -> None:
    crashed(tmp_path)
    # The party's error ends the holder's process here, for both are one.
    with pytest.raises(PartyLostError, match="server sends another list of ids"):
        holder(tmp_path, ALIGNED, lambda: task(5), parties(tmp_path, ALIGNED, task, {}))


# The table of checks


@pytest.mark.parametrize("kind", RULES)
def test_every_field_of_every_message_of_a_party_has_a_rule(kind: type) -> None:
    fields = kind.__struct_fields__  # type: ignore[attr-defined]
    assert sorted(rule.field for rule in RULES[kind]) == sorted(fields)


def test_the_page_has_the_table_of_checks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vertical-split.md").read_text()
    for kind, rules in RULES.items():
        for rule in rules:
            row = f"| `{kind.__name__}` | `{rule.field}` | {rule.shown} |"
            assert row in page, row
