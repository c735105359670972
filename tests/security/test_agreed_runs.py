"""A site trains the run that it has agreed to: each later message is compared with it."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dure.deploy.client.agreement import AgreedRun, AgreementChecks
from dure.deploy.client.audit_log import AuditLog
from dure.deploy.client.evaluations import EvaluationBound
from dure.deploy.client.link import HttpAnswer
from dure.deploy.client.policy import Policy
from dure.deploy.client.quota import Quota
from dure.deploy.client.session import Session
from dure.deploy.client.site import ClientSite, ConnectionOptions
from dure.deploy.client.state import ClientState, FolderOwner
from dure.errors import PolicyError
from dure.federated.client.jobs import LocalWork
from dure.run.client_training import ClientTraining
from dure.wire.requests import (
    CheckIn,
    EvaluationTask,
    Machine,
    NextAnswer,
    ProtocolStepBody,
    TaskDescription,
    Train,
    Welcome,
    to_json,
)
from small import small_task

DIGEST = "ab" * 32
WELCOME = Welcome(
    version=2,
    run="run-1",
    client=1,
    clients=9,
    strategy={
        "name": "fed-avg",
        "clients": 9,
        "fraction": 1.0,
        "local_epochs": 1,
        "local_steps": None,
        "batch_size": 10,
        "fine_tune": 0,
        "privacy": "none",
        "partition": {"name": "iid"},
    },
    seed=7,
    trains=TaskDescription({"w": ("float32", [3, 2])}),
    machine=Machine("2.13", "AVX2", "loop", 1),
    heartbeat=10.0,
    patience=30.0,
    smallest_cohort=3,
)
CHANGES: dict[str, Callable[[Welcome], Welcome]] = {
    "run": lambda w: replace(w, run="run-2"),
    "clients": lambda w: replace(w, clients=8),
    "strategy.name": lambda w: replace(w, strategy={**w.strategy, "name": "scaffold"}),
    "strategy.local_epochs": lambda w: replace(w, strategy={**w.strategy, "local_epochs": 2}),
    "strategy.privacy": lambda w: replace(w, strategy={**w.strategy, "privacy": "dp-sgd:1:1.1"}),
    "strategy.partition.name": lambda w: replace(
        w, strategy={**w.strategy, "partition": {"name": "blocks"}}
    ),
    "strategy.more": lambda w: replace(w, strategy={**w.strategy, "more": 1}),
    "seed": lambda w: replace(w, seed=8),
    "trains.forms.w": lambda w: replace(w, trains=TaskDescription({"w": ("float32", [3, 3])})),
    "trains.frozen": lambda w: replace(w, trains=replace(w.trains, frozen=DIGEST)),
    "threads": lambda w: replace(w, machine=replace(w.machine, threads=2)),
    "engine": lambda w: replace(w, machine=replace(w.machine, engine="batched")),
    "holds": lambda w: replace(w, holds=True),
}
MAY_CHANGE: dict[str, Callable[[Welcome], Welcome]] = {
    "heartbeat": lambda w: replace(w, heartbeat=5.0, patience=15.0),
    "differs": lambda w: replace(w, differs=["torch 2.12, not 2.13"]),
    "torch": lambda w: replace(w, machine=replace(w.machine, torch="2.14")),
    "cohort": lambda w: replace(w, smallest_cohort=4),
}


class Server:
    """Answers what it is given, and knows what it was asked."""

    def __init__(self, session: Session) -> None:
        self.answers: list[Any] = []
        self.asked: list[tuple[str, Any]] = []
        session._link.request = self.request  # type: ignore[method-assign]

    def request(self, method: str, path: str, body: bytes = b"", *_: Any, **__: Any) -> HttpAnswer:
        self.asked.append((path, json.loads(body) if body else None))
        if path == "/v1/failures":
            return HttpAnswer(204, {}, b"")
        return HttpAnswer(200, {}, to_json(self.answers.pop(0)))


@contextmanager
def site(folder: Path, policy: Policy) -> Iterator[tuple[ClientSite, Server]]:
    with ClientState(folder) as kept, AuditLog(folder / "audit.jsonl") as audit:
        session = Session(
            "http://127.0.0.1:1", context=None, state=kept, audit=audit, stop=threading.Event()
        )
        try:
            yield ClientSite(session, kept, policy, ConnectionOptions(), "", audit), Server(session)
        finally:
            session.close()


def agrees(
    one: ClientSite, server: Server, welcome: Welcome = WELCOME, approve: bool = False
) -> None:
    server.answers.append(welcome)
    one.agree(one.look(CheckIn(2, "ward", 0, looks=True)), approve)


@pytest.mark.parametrize("name", CHANGES)
def test_a_later_welcome_of_another_run_is_refused_by_what_differs(
    name: str, tmp_path: Path
) -> None:
    other = CHANGES[name](WELCOME)
    with site(tmp_path, Policy(smallest_cohort=3)) as (one, server):
        agrees(one, server)
        server.answers += [WELCOME, other]
        one.session.check_in(CheckIn(2, "ward", 5))
        with pytest.raises(PolicyError, match=name.replace(".", r"\.")) as raised:
            one.session.check_in(CheckIn(2, "ward", 5))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "run"])
def test_what_was_agreed_is_known_after_a_restart(name: str, tmp_path: Path) -> None:
    with site(tmp_path, Policy()) as (one, server):
        agrees(one, server)
    with site(tmp_path, Policy()) as (one, server):
        with pytest.raises(PolicyError, match=name.replace(".", r"\.")):
            agrees(one, server, CHANGES[name](WELCOME))
        # What was refused is not agreed to.
        agrees(one, server)
    # Its user looks at it, and agrees to it as it is now.
    with site(tmp_path, Policy()) as (one, server):
        agrees(one, server, CHANGES[name](WELCOME), approve=True)
    with site(tmp_path, Policy()) as (one, server), pytest.raises(PolicyError, match="was"):
        agrees(one, server)


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_a_server_may_be_moved_and_be_tuned(name: str, tmp_path: Path) -> None:
    with site(tmp_path, Policy(smallest_cohort=3)) as (one, server):
        agrees(one, server)
        server.answers.append(MAY_CHANGE[name](WELCOME))
        one.session.check_in(CheckIn(2, "ward", 5))


def test_a_site_keeps_its_number(tmp_path: Path) -> None:
    with site(tmp_path, Policy()) as (one, server):
        agrees(one, server, replace(WELCOME, client=-1))
        one.kept.enter(FolderOwner("http://127.0.0.1:1", "run-1", 1, ""))
        server.answers += [WELCOME, replace(WELCOME, client=2)]
        one.session.check_in(CheckIn(2, "ward", 5))
        with pytest.raises(PolicyError, match=r"is client 1 .* identifies it as client 2"):
            one.session.check_in(CheckIn(2, "ward", 5))


def test_what_is_refused_is_neither_agreed_to_nor_approved(tmp_path: Path) -> None:
    with site(tmp_path, Policy(approve="ask")) as (one, server):
        with pytest.raises(PolicyError, match="is not approved"):
            agrees(one, server)
        assert one.kept.agreed("run-1") is None
        agrees(one, server, approve=True)
        assert one.kept.agreed("run-1") == AgreedRun.of(WELCOME)


def test_a_site_says_at_each_check_in_how_many_clients_it_asks_for(tmp_path: Path) -> None:
    with site(tmp_path, Policy(smallest_cohort=3)) as (one, server):
        agrees(one, server)
        server.answers.append(WELCOME)
        one.session.check_in(CheckIn(2, "ward", 5))
        assert [said["smallest_cohort"] for _, said in server.asked] == [3, 3]
        server.answers.append(replace(WELCOME, smallest_cohort=2))
        with pytest.raises(PolicyError, match=r"at least 3 clients.*guarantees 2"):
            one.session.check_in(CheckIn(2, "ward", 5))


def test_a_server_that_knows_of_no_smallest_cohort_is_left_alone(tmp_path: Path) -> None:
    with (
        site(tmp_path, Policy(smallest_cohort=3)) as (one, server),
        pytest.raises(PolicyError, match="guarantees no number"),
    ):
        agrees(one, server, replace(WELCOME, smallest_cohort=0))


# Assignments

TRAIN = Train(4, 2, 2, DIGEST, 100, smallest_cohort=3)


def test_a_site_trains_for_no_smaller_cohort_than_it_asks_for(tmp_path: Path) -> None:
    with site(tmp_path, Policy(smallest_cohort=3)) as (one, server):
        agrees(one, server)
        server.answers += [
            NextAnswer(train=TRAIN),
            NextAnswer(train=replace(TRAIN, smallest_cohort=2)),
        ]
        assert one.session.next([]).train == TRAIN
        with pytest.raises(PolicyError, match=r"round 3 \(ticket 4\).*at least 3 .*guarantees 2"):
            one.session.next([])
        # The server need not wait for it.
        assert server.asked[-1] == ("/v1/failures", {"ticket": 4, "kind": "PolicyError"})


@given(st.integers(0, 1 << 53), st.sampled_from(["train", "measure", "final"]))
def test_a_model_has_no_more_bytes_than_that_of_the_run(size: int, field: str) -> None:
    orders = AgreementChecks(AgreedRun.of(WELCOME), 1, lambda welcome: None, lambda: 1)
    model = EvaluationTask(1, DIGEST, size)
    order = Train(1, 1, 1, DIGEST, size) if field == "train" else model
    word = NextAnswer(**{field: order})
    if size <= 24:
        orders.word(word)
    elif size > 2 << 20:
        with pytest.raises(PolicyError, match="bytes"):
            orders.word(word)


def test_a_step_of_a_protocol_belongs_to_a_run_that_has_one() -> None:
    say = NextAnswer(say=ProtocolStepBody(4, 0, "q", b"hello"))
    bare = AgreementChecks(AgreedRun.of(WELCOME), 1, lambda welcome: None, lambda: 1)
    with pytest.raises(PolicyError, match="ticket 4"):
        bare.word(say)
    holds = AgreedRun.of(replace(WELCOME, holds=True))
    AgreementChecks(holds, 1, lambda welcome: None, lambda: 1).word(say)


def training(policy: Policy, **strategy: Any) -> ClientTraining:
    """A site of the small task that has begun; of all clients of a run of three."""
    one = ClientTraining(small_task(), "ward", None, policy=policy)
    told = {**WELCOME.strategy, "clients": 3, **strategy}
    told.pop("partition")
    one.begin(replace(WELCOME, clients=3, strategy=told), None)
    return one


def test_local_work_is_compared_with_the_examples_that_the_site_has() -> None:
    examples = len(small_task().train)
    steps = -(-examples // 4)
    training(Policy(local_steps=steps), batch_size=4)
    with pytest.raises(PolicyError, match=f"1 epoch, which are {steps}"):
        training(Policy(local_steps=steps - 1), batch_size=4)
    with pytest.raises(PolicyError, match="of which"):
        training(Policy(local_epochs=1), batch_size=4, local_steps=steps + 1)


def test_more_work_than_was_allowed_is_not_done_whatever_the_run_was() -> None:
    one = training(Policy(local_epochs=2), local_epochs=2)
    one.clients.training = dataclasses.replace(one.clients.training, work=LocalWork(50, None, 4))
    with pytest.raises(PolicyError, match=r"this site does not train in round 3.*requires 50"):
        one.train(TRAIN, {}, lambda: True)


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch_size", -1), ("local_epochs", 0), ("local_steps", -5), ("fraction", 2.0)],
)
def test_numbers_of_a_strategy_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        training(Policy(), **{field: value})


@pytest.mark.parametrize("system", ["fed-async", "fed-buff"])
def test_models_of_fewer_updates_than_a_site_asks_for_are_not_joined(system: str) -> None:
    buffer = {"buffer": 2} if system == "fed-buff" else {}
    told = {**WELCOME.strategy, "name": system, **buffer}
    [reason] = Policy(smallest_cohort=3).check(replace(WELCOME, strategy=told))
    assert "at least 3 clients; the run makes a model from every" in reason
    with pytest.raises(PolicyError, match=r"at least 3 clients .*; the run makes one from every"):
        training(Policy(smallest_cohort=3), name=system, **buffer)


def test_a_site_computes_with_no_more_threads_than_its_user_allows() -> None:
    one = ClientTraining(small_task(), "ward", None, policy=Policy(cores=2))
    told = {"name": "fed-avg", "clients": 3}
    machine = replace(WELCOME.machine, threads=64)
    one.begin(replace(WELCOME, clients=3, strategy=told, machine=machine), None)
    assert one.threads == 2


# Evaluations


def test_a_site_measures_so_many_models_of_a_round(tmp_path: Path) -> None:
    policy = Policy(evaluations_per_round=2, smallest_test_set=5)
    models = ["a" * 64, "b" * 64, "c" * 64]
    with ClientState(tmp_path) as state:
        one = EvaluationBound(policy, state, "run-1")
        assert [bool(one.refusal(3, model, 5)) for model in models] == [False, False, True]
        # Asked again, since an answer was lost.
        assert one.refusal(3, models[0], 5) == ""
        assert "at least 5 examples, but this site has 4" in one.refusal(4, models[0], 4)
    with ClientState(tmp_path) as state:
        again = EvaluationBound(policy, state, "run-1")
        assert "2 evaluations a round" in again.refusal(3, models[2], 5)
        assert again.refusal(3, models[1], 5) == ""
        assert again.refusal(4, models[2], 5) == ""
        assert "of round 4 was evaluated" in again.refusal(2, models[2], 5)
        assert EvaluationBound(policy, state, "run-2").refusal(0, models[2], 5) == ""


def test_without_bounds_nothing_is_counted(tmp_path: Path) -> None:
    with ClientState(tmp_path) as state:
        one = EvaluationBound(Policy(), state, "run-1")
        assert not any(one.refusal(round, "a" * 64, 1) for round in (5, 1, 5))
        assert not list(tmp_path.glob("evaluations-*"))


# What is stored


@given(st.lists(st.integers(1, 60), max_size=12), st.integers(0, 2000))
def test_no_file_of_a_run_makes_the_folder_larger_than_its_bound(
    sizes: list[int], limit: int
) -> None:
    with ClientState(None) as state:
        state.quota.limit = limit
        for ticket, size in enumerate(sizes):
            with suppress(PolicyError):
                state.keep_pending(ticket, [torch.zeros(size)])
            assert state.quota.used() <= limit


def test_a_model_is_not_fetched_that_would_not_fit(tmp_path: Path) -> None:
    with site(tmp_path, Policy(storage=1000)) as (one, server):
        agrees(one, server)
        with pytest.raises(PolicyError, match="a model on its way needs 2,000 bytes"):
            one.session.fetch(1, DIGEST, 2000)
        assert [path for path, _ in server.asked] == ["/v1/check-in"]
        # What a break has left is a part of it.
        (tmp_path / f"download-{DIGEST}").write_bytes(bytes(600))
        one.kept.download(DIGEST, 601)


def test_a_log_that_is_full_keeps_messages_back(tmp_path: Path) -> None:
    with AuditLog(tmp_path / "audit.jsonl") as audit:
        audit.quota = Quota(tmp_path, 300)
        audit.record("check-in", b"hello")
        with pytest.raises(PolicyError, match="a line of the log"):
            audit.record("check-in", b"hello")
        assert (tmp_path / "audit.jsonl").stat().st_size <= 300


def test_the_bound_follows_the_model(tmp_path: Path) -> None:
    with site(tmp_path, Policy()) as (one, server):
        agrees(one, server)
        small = one.kept.quota.limit
        assert small is not None
    large = replace(WELCOME, trains=TaskDescription({"w": ("float32", [1 << 30])}))
    assert Policy().quota(large.trains) == small + 16 * ((4 << 30) - 24)
    assert Policy(storage=5).quota(large.trains) == 5
