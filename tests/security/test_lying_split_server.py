"""A server of split learning that lies: a site checks what it is told before its head uses it, and
tells the server nothing that it is not to know."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from split_sites import WIDTH, Clients, ended, gradients_for, turn_for, weights_of
from torch import nn

import dure
from dure.split.gradient_bound import FACTOR, FEWEST, GradientBound, ReceivedError
from dure.split.messages import Ended, Gradients, HeadSum, Outputs, Pass, SideState, Smashed
from dure.split.network.control import Final, MeasureModel, ModelMeasured, Query, SealedHead
from dure.split.network.frames import encode
from dure.split.network.incoming import ProgressTimeout
from dure.split.network.site import SiteLimits
from dure.split.parties.messages import ActivationGradients, BeginStep
from dure.split.parties.party import Party

PEERS = dure.SplitLearning(clients=2, batch_size=4)
THREE = dure.SplitLearning(clients=3, batch_size=4)


@pytest.fixture
def clients(tmp_path: Path) -> Clients:
    return Clients(tmp_path, PEERS)


# Gradients


def with_values(change: Callable[[torch.Tensor], Any]) -> Callable[[Gradients], Gradients]:
    return lambda honest: replace(honest, values=tuple(map(change, honest.values)))


WRONG: dict[str, tuple[Callable[[Gradients], Any], str]] = {
    "none": (lambda honest: replace(honest, values=()), "0 gradients at the cut, but 1"),
    "two": (lambda honest: replace(honest, values=2 * honest.values), "2 gradients"),
    "shape": (with_values(lambda one: one[:, 1:]), "have to be"),
    "transposed": (with_values(lambda one: one.T.contiguous()), "have to be"),
    "dtype": (with_values(lambda one: one.float()), "have to be"),
    "integers": (with_values(lambda one: one.long()), "have to be"),
    "NaN": (with_values(lambda one: one.fill_(math.nan)), "not all finite"),
    "infinite": (with_values(lambda one: one.index_fill(0, torch.tensor(0), math.inf)), "finite"),
    "later": (lambda honest: replace(honest, step=honest.step + 1), "of step"),
    "earlier": (lambda honest: replace(honest, step=-1), "of step"),
    "share": (lambda honest: replace(honest, share=1e9), "share of a batch"),
    "NaN share": (lambda honest: replace(honest, share=math.nan), "share of a batch"),
    "another kind": (lambda honest: Outputs(honest.step, honest.values, 1.0), "is expected"),
    "of heads": (lambda honest: HeadSum(honest.step, honest.values), "is expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_gradients_that_cannot_be_are_refused_by_name(name: str, clients: Clients) -> None:
    alter, said = WRONG[name]
    site = clients.sites[0]
    (smashed,) = clients.says(site, turn_for(site))
    (smashed,) = clients.says(site, gradients_for(smashed))
    assert isinstance(smashed, Smashed)
    reason = clients.refused(site, alter(gradients_for(smashed)))
    assert "server sends" in reason or "server states that" in reason
    assert said in reason


def test_nothing_is_answered_that_is_not_due(clients: Clients) -> None:
    site = clients.sites[0]
    (smashed,) = clients.says(site, turn_for(site))
    clients.says(site, gradients_for(smashed))
    assert "is expected" in clients.refused(site, gradients_for(smashed))


def test_a_site_may_bound_the_norm_of_gradients(tmp_path: Path) -> None:
    clients = Clients(tmp_path, PEERS, limits=SiteLimits(largest_gradient=1.0))
    site = clients.sites[0]
    (smashed,) = clients.says(site, turn_for(site))
    size = 1.0 / math.sqrt(smashed.values[0].numel())
    (smashed,) = clients.says(site, gradients_for(smashed, 0.99 * size))
    assert "norm 1.01" in clients.refused(site, gradients_for(smashed, 1.01 * size))


norms = st.floats(1e-6, 1e6)


@given(st.lists(norms, min_size=FEWEST, max_size=30), st.floats(1.01, 1e6))
def test_without_that_it_is_bounded_by_those_before(before: list[float], more: float) -> None:
    bound = GradientBound()
    forms = [(torch.float64, (1,))]

    def comes(norm: float) -> None:
        bound.check("server", "gradients", [torch.tensor([norm], dtype=torch.float64)], forms)

    for norm in before[:FEWEST]:
        comes(norm)
    largest = max(before[:FEWEST])
    for norm in before[FEWEST:]:
        if norm <= FACTOR * largest:
            comes(norm)
            largest = max(largest, norm)
    with pytest.raises(ReceivedError, match="at most"):
        comes(FACTOR * largest * more)
    # What was refused does not count.
    with pytest.raises(ReceivedError, match="at most"):
        comes(FACTOR * largest * more)


def test_zeros_bound_nothing_and_large_numbers_are_told_from_infinite_ones() -> None:
    bound = GradientBound()
    forms = [(torch.float32, (2,))]
    for _ in range(2 * FEWEST):
        bound.check("server", "gradients", [torch.zeros(2)], forms)
    bound.check("server", "gradients", [torch.tensor([3e38, 3e38])], forms)
    with pytest.raises(ReceivedError, match="finite"):
        bound.check("server", "gradients", [torch.tensor([math.inf, 0.0])], forms)


def test_large_numbers_do_not_hide_others_that_are_none() -> None:
    bound = GradientBound()
    values = [torch.tensor([3e38, 3e38]), torch.tensor([math.nan])]
    forms = [(torch.float32, (2,)), (torch.float32, (1,))]
    for order in (1, -1):
        with pytest.raises(ReceivedError, match="finite"):
            bound.check("server", "gradients", values[::order], forms[::order])


# Turns, and heads that the server would like to have, or to give


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 10**6, "until": 10**6}, "batches make"),
        ({"steps": 0, "until": 0}, "batches make"),
        ({"until": 10**6}, "batches make"),
        ({"number": -5}, "turn numbers have to increase"),
        ({"since": -9}, "turn numbers have to increase"),
        ({"since": 7, "number": 8}, "does not have its state after turn 7"),
        ({"since": 3, "number": 3}, "turn numbers have to increase"),
        ({"round": -1}, "turn numbers have to increase"),
        ({"taken": -1}, "turn numbers have to increase"),
        ({"first": 1 << 60}, "turn numbers have to increase"),
        ({"brings": True}, "must not receive"),
    ],
)
def test_a_turn_that_is_not_one_of_this_run_is_refused(
    changes: dict[str, Any], said: str, clients: Clients
) -> None:
    site = clients.sites[0]
    assert said in clients.refused(site, turn_for(site, **changes))


def own_of(site: Any) -> SideState:
    return SideState(tuple(torch.zeros_like(one) for one in weights_of(site)), (), ({}, {}))


def test_a_head_of_the_servers_own_is_refused_where_heads_do_not_reach_it(
    clients: Clients,
) -> None:
    site = clients.sites[0]
    # Such as one that passes examples on: what leaves it would be the examples.
    for frame in (
        turn_for(site, head=own_of(site)),
        MeasureModel(0, -1, own_of(site)),
        Final(own_of(site)),
    ):
        assert "it must not have heads in this run" in clients.refused(site, frame)


@pytest.mark.parametrize("change", ["shape", "NaN", "number", "optimizer"])
def test_where_they_do_it_has_to_be_one_of_this_model(change: str, tmp_path: Path) -> None:
    clients = Clients(tmp_path, dure.SplitLearning(clients=2, batch_size=4, handover="server"))
    site = clients.sites[0]
    weights = weights_of(site)
    if change == "shape":
        weights[0] = weights[0].T.contiguous()
    elif change == "NaN":
        weights[0][0, 0] = math.nan
    elif change == "number":
        weights.append(weights[0])
    state = {"momentum_buffer": torch.tensor(math.nan)} if change == "optimizer" else {}
    head = SideState(tuple(weights), (), tuple(state for _ in weights))
    reason = clients.refused(site, turn_for(site, head=head))
    assert "server sends" in reason


@pytest.mark.parametrize("to", ["server", "client 0", "client 2", "client 01", "", "client 1 "])
def test_a_head_goes_to_another_client_of_the_run_and_nowhere_else(
    to: str, clients: Clients
) -> None:
    site = clients.sites[0]
    ended(clients, site, turn_for(site))
    assert "another client" in clients.refused(site, Pass(1, 0, to))


def test_a_head_is_handed_on_once_for_a_turn(tmp_path: Path) -> None:
    clients = Clients(tmp_path, THREE)
    site = clients.sites[0]
    ended(clients, site, turn_for(site))
    for _ in range(2):
        (sealed,) = clients.says(site, Pass(1, 0, "client 1"))
        assert isinstance(sealed, SealedHead)
    # An older one, and the same one for somebody else.
    assert "twice" in clients.refused(site, Pass(1, -1, "client 1"))
    assert "twice" in clients.refused(site, Pass(1, 0, "client 2"))


# Heads on their way from client to client


def handed(clients: Clients, turn: int = 1, receiver: int = 1, since: int = 0) -> SealedHead:
    """A head as the server gets it from client 0, and hands it on."""
    (sealed,) = clients.says(clients.sites[0], Pass(turn, since, f"client {receiver}"))
    return SealedHead(turn, 0, sealed.content)


def test_the_server_sees_nothing_of_a_head_that_is_handed_on(clients: Clients) -> None:
    first, second = clients.sites
    ended(clients, first, turn_for(first))
    sealed = handed(clients)
    content = bytes(b"".join(encode(sealed)))
    for weight in weights_of(first):
        for row in weight.reshape(len(weight), -1):
            assert row.numpy().tobytes() not in content
    clients.says(second, turn_for(second, number=1, comes=True))
    (smashed,) = clients.says(second, sealed)
    assert isinstance(smashed, Smashed)
    mine, theirs = weights_of(first), weights_of(second)
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_a_head_that_was_swapped_replayed_or_changed_is_refused_by_name(tmp_path: Path) -> None:
    clients = Clients(tmp_path, THREE)
    first, second, _ = clients.sites
    ended(clients, first, turn_for(first))
    older = handed(clients, turn=1)
    for_another = handed(clients, turn=3, receiver=2)
    now = handed(clients, turn=2)
    clients.says(second, turn_for(second, number=2, comes=True))
    # Of an earlier turn, also with the number of this one; of this turn, for another client.
    assert "turn 1" in clients.refused(second, older)
    assert "for turn 1, but this is turn 2" in clients.refused(second, replace(older, turn=2))
    assert "for turn 3" in clients.refused(second, replace(for_another, turn=2))
    assert clients.refused(second, replace(for_another, turn=3)) != ""
    # As if another client had sent it, and one that nobody is.
    assert "not signed by" in clients.refused(second, replace(now, peer=2))
    assert "no client 9" in clients.refused(second, replace(now, peer=9))
    for at in (0, 200, -1):
        content = now.content.clone()
        content[at] ^= 1
        assert clients.refused(second, replace(now, content=content))
    # The right one is taken, and once.
    (smashed,) = clients.says(second, now)
    assert isinstance(smashed, Smashed)
    assert "is expected" in clients.refused(second, now)


def test_a_head_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    other = Clients(tmp_path, PEERS, run="f" * 16)
    ended(other, other.sites[0], turn_for(other.sites[0]))
    clients = Clients(tmp_path, PEERS)
    second = clients.sites[1]
    clients.says(second, turn_for(second, number=1, comes=True))
    # Whoever was a client of both runs with one identity would have signed it.
    assert "not signed" in clients.refused(second, handed(other))


def test_a_head_that_nobody_waits_for_is_refused(clients: Clients) -> None:
    first, second = clients.sites
    ended(clients, first, turn_for(first))
    assert "is expected" in clients.refused(second, handed(clients))


# Evaluations, and waiting


def test_a_site_that_measures_no_more_says_so_and_sends_nothing(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    def refusal(round: int, examples: int) -> str:
        asked.append((round, examples))
        return "policy.toml allows one evaluation"

    clients = Clients(tmp_path, PEERS, limits=SiteLimits(refusal=refusal))
    site = clients.sites[0]
    assert site.test is not None
    for _ in range(2):
        assert clients.says(site, MeasureModel(3, -1)) == [ModelMeasured(3, {})]
    assert not any(isinstance(one, Query) for one in clients.channel.said)
    assert asked == 2 * [(3, len(site.test))]


def test_a_server_by_which_nothing_goes_on_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr("time.monotonic", lambda: clock)
    patience = ProgressTimeout(10.0)
    # Before all clients are there, a server has nothing to say.
    assert patience.left is None
    patience.note(0)
    clock = 9.0
    assert patience.left == 1.0
    patience.note(1)
    clock = 18.0
    assert patience.left == 1.0
    # Whatever else it says meanwhile.
    patience.note(1)
    clock = 19.5
    with pytest.raises(ReceivedError, match="no progress for 10 s"):
        _ = patience.left


def test_only_what_is_accepted_puts_the_end_off(clients: Clients) -> None:
    site = clients.sites[0]
    checked = site.working.checked

    def accepted(frame: Any) -> int:
        before = checked.accepted
        clients.says(site, frame)
        return checked.accepted - before

    assert accepted(turn_for(site)) == 1
    # The same turn once more, and the roster again.
    assert accepted(turn_for(site)) == 0
    (smashed,) = clients.says(site, turn_for(site))
    assert accepted(gradients_for(smashed)) == 1


# A party with features of its own


def test_a_party_bounds_what_the_holder_of_the_labels_sends() -> None:
    module = nn.Linear(3, WIDTH)
    part: Any = SimpleNamespace(module=module, update=lambda step: None)
    batches: Any = SimpleNamespace(at=lambda step: torch.arange(4))
    party = Party(
        0, "server", part, lambda rows, step: torch.ones(4, 3), batches, 0, lambda *_: 0.0
    )
    party.bound = GradientBound(largest=1.0)
    party.receive("server", BeginStep(0), 0.0)
    for values, said in (
        (torch.ones(4, WIDTH), "at most 1"),
        (torch.full((4, WIDTH), math.inf), "finite"),
        (torch.ones(4, WIDTH - 1), "shape"),
        (torch.ones(4, WIDTH).double(), "float64"),
    ):
        with pytest.raises((ReceivedError, ValueError), match=said):
            party.receive("server", ActivationGradients(0, values), 0.0)
    assert party.receive("server", ActivationGradients(0, torch.zeros(4, WIDTH)), 0.0) == []


def test_ended_has_no_head_where_it_does_not_reach_the_server(clients: Clients) -> None:
    site = clients.sites[0]
    (last,) = ended(clients, site, turn_for(site))
    assert last == Ended(0, None)


def test_a_client_without_a_batch_waits_for_the_sums_of_the_others(tmp_path: Path) -> None:
    clients = Clients(tmp_path, dure.ParallelSplit(clients=2, batch_size=4))
    site = clients.sites[0]
    steps = site.working.checked.steps
    said = clients.says(site, turn_for(site, until=steps + 2))
    for step in range(steps + 2):
        if step < steps:
            (given,) = clients.says(site, gradients_for(said[0]))
            values = given.values
        wrong = HeadSum(step + 1, values)
        assert "is expected" in clients.refused(site, wrong)
        assert "not all finite" in clients.refused(
            site, HeadSum(step, tuple(torch.full_like(one, math.nan) for one in values))
        )
        assert "1 gradients of the head, but 2" in clients.refused(site, HeadSum(step, values[:1]))
        said = clients.says(site, HeadSum(step, values))
        kinds = [type(one) for one in said]
        assert kinds == ([Smashed] if step + 1 < steps else [Ended] if step > steps else [])
    assert said == [Ended(0, None)]
