"""A server that lies, with an owner's roster, gets no two sums of one model from one client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sums_of_clients import SETTINGS, D, Site, asked_of, hand_out, key_of, sum_of, update_of
from torch import Tensor

from dure.federated.privacy.secure_aggregation.cohort import UNMASK
from dure.federated.privacy.secure_aggregation.model_digest import digests_of
from dure.federated.privacy.secure_aggregation.rounds import SecureSums
from dure.protocol.messages import ProtocolStep

N = 5


@pytest.fixture(params=["memory", "folder"])
def sites(request: Any, tmp_path: Path) -> Iterator[dict[int, Site]]:
    made = sites_of(tmp_path if request.param == "folder" else None)
    yield made
    for site in made.values():
        site.close()


def sites_of(folder: Path | None) -> dict[int, Site]:
    sums = SecureSums(SETTINGS, "run")
    # Lists in memory are one for each identity: others for each test.
    key_of.cache_clear()
    keys = {number: key_of(number) for number in range(N)}
    roster = {number: key.public for number, key in keys.items()}
    return {
        number: Site(
            number, sums, keys[number], roster, None if folder is None else folder / f"{number}"
        )
        for number in range(N)
    }


def roster() -> dict[int, str]:
    return {number: key_of(number).public for number in range(N)}


def numbers() -> Tensor:
    """A model: some zeros, and one number that is none."""
    return torch.tensor([0.0, 1.5, -2.25, 0.0, 1e-30, 3.0])


def negative_zeros(model: Tensor) -> list[Tensor]:
    return [torch.where(model == 0, -0.0, model)]


def wider(model: Tensor) -> list[Tensor]:
    return [model.double()]


def wider_than_is_trained(model: Tensor) -> list[Tensor]:
    """More digits than float32 has: training from it is training from the model."""
    return [model.double() * (1 + 1e-12)]


DISGUISES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "another round": {"round": 7},
    "another turn": {"turn": 7},
    "other extras": {"extra": [torch.full((3,), 0.5)]},
    "other buffers": {"buffers": [torch.full((3,), 0.5)]},
    "negative zeros": {"model": negative_zeros},
    "another dtype": {"model": wider},
    "more digits": {"model": wider_than_is_trained},
}


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("name", DISGUISES)
def test_one_model_has_one_sum_whatever_it_is_called(
    name: str, restarted: bool, sites: dict[int, Site]
) -> None:
    first = hand_out(sites, 100, [numbers()])
    assert sum_of(sites, 100, first, 1, roster=roster()) == list(range(N))
    # A round in between, of which the first one is not told.
    second = hand_out(sites, 200, [numbers() + 1], round=2)
    assert sum_of(sites, 200, second, 2, roster=roster()) == list(range(N))
    if restarted:
        for site in sites.values():
            site.start()
    disguise = dict(DISGUISES[name])
    model = disguise.pop("model", lambda model: [model])(numbers())
    again = hand_out(sites, 300, model, **disguise)
    assert sum_of(sites, 300, again, 3, lost=[0], roster=roster()) == []
    assert sum_of(sites, 300, again, 4, roster=roster()) == []
    for site in sites.values():
        assert "it has helped to unmask a sum of this model, and sits out" in site.refused


def test_another_model_has_another_sum(sites: dict[int, Site]) -> None:
    hand_out(sites, 100, [numbers()])
    one = asked_of(0, 100, [numbers()])
    assert sum_of(sites, 100, one, 1, roster=roster()) == list(range(N))
    moved = numbers()
    moved[1] = torch.nextafter(moved[1], torch.tensor(2.0))
    # A digest cannot stop this, and the page says so.
    two = hand_out(sites, 200, [moved])
    assert sum_of(sites, 200, two, 2, lost=[0], roster=roster()) == [1, 2, 3, 4]


def test_of_two_sums_of_one_model_side_by_side_one_is_unmasked(sites: dict[int, Site]) -> None:
    one = hand_out(sites, 100, [numbers()])
    done: list[list[int]] = []

    def other(stage: int) -> None:
        # All vectors of the first sum are there; now comes one without client 0, and is finished.
        if stage == UNMASK and not done:
            done.append([])
            two = hand_out(sites, 300, [numbers()], round=2)
            done[0] = sum_of(sites, 300, two, 9, lost=[0], roster=roster())

    assert sum_of(sites, 100, one, 1, roster=roster(), at=other) == []
    assert done == [[1, 2, 3, 4]]


def test_a_server_that_is_started_again_before_anybody_unmasks_begins_again(
    sites: dict[int, Site],
) -> None:
    asked = hand_out(sites, 100, [numbers()])

    class KilledError(Exception):
        pass

    def killed(stage: int) -> None:
        if stage == UNMASK:
            raise KilledError

    for attempt in (1, 2):
        with pytest.raises(KilledError):
            sum_of(sites, 100, asked, attempt, roster=roster(), at=killed)
    assert sum_of(sites, 100, asked, 3, roster=roster()) == list(range(N))


@pytest.mark.parametrize("restarted", [False, True])
def test_the_same_question_has_the_same_answer_and_another_has_none(
    restarted: bool, tmp_path: Path
) -> None:
    sites = sites_of(tmp_path)
    asked = hand_out(sites, 100, [numbers()])
    one = sites[1]
    said: list[tuple[ProtocolStep, Any]] = []
    answered = one.holding.answer

    def noted(say: ProtocolStep) -> Any:
        answer = answered(say)
        said.append((say, answer))
        return answer

    one.holding.answer = noted  # type: ignore[method-assign]
    assert sum_of(sites, 100, asked, 1, roster=roster()) == list(range(N))
    question, answer = said[-1]
    another = ProtocolStep(question.ticket, 1, UNMASK, said[-2][0].body)
    assert question.stage == UNMASK
    if restarted:
        one.start()
    assert one.holding.answer(question) == answer
    assert one.holding.answer(another) is None
    # What became of the update is known: nobody has anything to ask any more.
    if one.state is not None:
        one.state.settle(question.ticket, kept=True)
    one.holding.discard([question.ticket])
    assert one.holding.answer(question) is None
    for site in sites.values():
        site.close()


def test_an_update_that_an_earlier_process_has_unmasked_is_not_held_again(tmp_path: Path) -> None:
    sites = sites_of(tmp_path)
    asked = hand_out(sites, 100, [numbers()])
    assert sum_of(sites, 100, asked, 1, roster=roster()) == list(range(N))
    site = sites[1]
    site.start()
    own = asked_of(1, 100 + 1, [numbers()])
    site.holding.hold(update_of(own, [torch.zeros(D)]), own)
    assert site.holding.sits_out(101)
    for one in sites.values():
        one.close()


@settings(max_examples=100)
@given(
    st.lists(
        st.floats(width=32) | st.sampled_from([0.0, -0.0, float("nan"), float("inf")]),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(["signs", "payloads", "wider", "shape", "order", "buffers"]),
)
def test_what_is_the_same_to_training_has_the_same_digest(values: list[float], change: str) -> None:
    model = torch.tensor(values, dtype=torch.float32)
    other: Sequence[Tensor] = [model, model + 1]
    first = digests_of(asked_of(0, 1, other)).spent
    buffers: list[Tensor] = []
    if change == "signs":
        other = [torch.where(model == 0, -model, model), model + 1]
    elif change == "payloads":
        bits = model.numpy().view(np.uint32).copy()
        bits[np.isnan(bits.view(np.float32))] ^= 0x80000123
        other = [torch.from_numpy(bits.view(np.float32)), model + 1]
    elif change == "wider":
        other = [one.double() for one in other]
    elif change == "shape":
        other = [one.reshape(1, -1) for one in other]
    elif change == "order":
        other = other[::-1]
    else:
        buffers = [model]
    assert digests_of(asked_of(0, 1, other, buffers=buffers)).spent == first


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8), st.data())
def test_another_number_is_another_model(values: list[float], data: st.DataObject) -> None:
    model = torch.tensor(values, dtype=torch.float32)
    at = data.draw(st.integers(0, len(values) - 1))
    value = data.draw(st.floats(width=32).filter(lambda value: value != values[at]))
    other = model.clone()
    other[at] = value
    assert digests_of(asked_of(0, 1, [model])).spent != digests_of(asked_of(0, 1, [other])).spent


def test_a_model_of_float64_that_float32_does_not_have_is_told_from_its_neighbour() -> None:
    one = torch.tensor([1.0, 1.0], dtype=torch.float64)
    other = torch.tensor([1.0, 1.0 + 1e-15], dtype=torch.float64)
    digests = {digests_of(asked_of(0, 1, [each])).spent for each in (one, other)}
    assert len(digests) == 2


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, N - 1), st.booleans()), max_size=5))
def test_no_series_of_sums_has_a_client_help_with_two_of_one_model(
    series: list[tuple[int, int, bool]],
) -> None:
    sites = sites_of(None)
    helped: dict[tuple[int, int], set[int]] = {}
    for site in sites.values():
        site_answer = site.holding.answer

        def noted(say: ProtocolStep, answer: Any = site_answer) -> Any:
            given_to = answer(say)
            if say.stage == UNMASK and given_to is not None:
                helped.setdefault((say.client, current[0]), set()).add(current[1])
            return given_to

        site.holding.answer = noted  # type: ignore[method-assign]
    current = [0, 0]
    for number, (model, lost, interrupted) in enumerate(series):
        current[:] = model, number
        asked = hand_out(sites, 100 * (number + 1), [numbers() + model], round=number)

        def at(stage: int, stops: bool = interrupted) -> None:
            if stops and stage == UNMASK:
                raise InterruptedError

        try:
            sum_of(
                sites,
                100 * (number + 1),
                asked,
                number,
                lost=[lost],
                roster=roster(),
                at=at,
            )
        except InterruptedError:
            continue
    assert all(len(sums) == 1 for sums in helped.values())
