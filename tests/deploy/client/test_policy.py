"""What a site allows: what its file may say, and what it refuses."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.deploy.client.policy import _READERS, COPIES, Policy, _taken
from dure.errors import PolicyError
from dure.wire.requests import Machine, TaskDescription, Welcome

STRATEGY = {
    "name": "fed-avg",
    "fraction": 0.5,
    "local_epochs": 2,
    "local_steps": None,
    "batch_size": 10,
    "fine_tune": 0,
}


def welcome(clients: int = 20, forms: dict[str, Any] | None = None, **strategy: Any) -> Welcome:
    return Welcome(
        version=1,
        run="run-1",
        client=0,
        clients=clients,
        strategy={**STRATEGY, **strategy},
        seed=0,
        trains=TaskDescription(forms or {"w": ("F32", [1000, 250])}),
        machine=Machine("2.13", "AVX2", "loop", 1),
        heartbeat=10.0,
        patience=30.0,
    )


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], Policy]:
    def read(text: str) -> Policy:
        (tmp_path / "policy.toml").write_text(text)
        return Policy.beside(tmp_path)

    return read


def test_every_key_is_read_and_is_a_field() -> None:
    assert set(_READERS) == {field.name for field in fields(Policy)}


def test_without_a_file_nothing_is_bounded(tmp_path: Path) -> None:
    policy = Policy.beside(tmp_path)
    assert policy == Policy()
    assert policy.check(welcome(clients=1, local_epochs=10**9)) == []
    assert policy.open_at(datetime.now())
    assert not policy.asks
    assert not policy.share_errors
    with pytest.raises(PolicyError, match=r"cannot read .*policy\.toml"):
        Policy.read(tmp_path / "policy.toml")
    (tmp_path / "policy.toml").symlink_to(tmp_path / "nowhere")
    with pytest.raises(PolicyError, match=r"cannot read .*policy\.toml"):
        Policy.beside(tmp_path)


def test_a_file_says_what_it_says(read) -> None:
    assert read(
        """
        systems = ["fed-avg", "rules/mine.py:Mine"]
        local_epochs = 5
        local_steps = 500
        smallest_cohort = 10
        owner = "0123 4567 89AB cdef 0123:4567:89ab:cdef"
        hours = ["12:00-13:30", "20:00-06:00"]
        cores = 2
        memory = "1.5 GB"
        bandwidth = 2000
        approve = "ask"
        share_errors = true
        """
    ) == Policy(
        systems=("fed-avg", "rules/mine.py:Mine"),
        local_epochs=5,
        local_steps=500,
        smallest_cohort=10,
        owner="0123456789abcdef0123456789abcdef",
        hours=((720, 810), (1200, 360)),
        cores=2,
        memory=1_500_000_000,
        bandwidth=2000,
        approve="ask",
        share_errors=True,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("local_epoch = 5", r"no key 'local_epoch', did you mean 'local_epochs'\?"),
        ("colour = 1", r"no key 'colour'; there are: systems, local_epochs"),
        ("[limits]\ncores = 1", "no key 'limits'"),
        ("local_epochs = 0", "local_epochs is 0, but it has to be an integer, 1 or more"),
        ("local_epochs = 2.0", "an integer, 1 or more"),
        ("local_steps = true", "an integer, 1 or more"),
        ('cores = "2"', "an integer, 1 or more"),
        ("smallest_cohort = -1", "an integer, 1 or more"),
        ("owner = 12", "a public key of 64 hexadecimal digits, or a fingerprint of 32"),
        ('owner = "ward"', "a public key of 64 hexadecimal digits, or a fingerprint of 32"),
        ("systems = []", "a list of names"),
        ('systems = "fed-avg"', "a list of names"),
        ("systems = [1]", "a list of names"),
        ('systems = ["fedavg"]', "there is no system 'fedavg', did you mean 'fed-avg'"),
        ('systems = ["data-parallel"]', "there is no system 'data-parallel'"),
        ('hours = "22-6"', "local time such as"),
        ('hours = "24:00-06:00"', "local time such as"),
        ('hours = "22:00-06:60"', "local time such as"),
        ('hours = "22:00-25:00"', "local time such as"),
        ('hours = "22:00-22:00"', "end later than they begin"),
        ("hours = []", "local time such as"),
        ("hours = [22]", "local time such as"),
        ('memory = "4 potatoes"', "a size such as"),
        ('memory = "0 GB"', "a size such as"),
        ("memory = 0", "a size such as"),
        ("memory = 1.5", "a size such as"),
        ('bandwidth = "-1 MB"', "a size such as"),
        ('approve = "never"', '"ask" or "always"'),
        ("approve = true", '"ask" or "always"'),
        ('share_errors = "yes"', "true or false"),
        ("share_errors = 1", "true or false"),
        ("cores = ", "is not valid TOML"),
        ("cores = 1\ncores = 2", "is not valid TOML"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(read, tmp_path, text: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said) as raised:
        read(text)
    assert str(tmp_path / "policy.toml") in str(raised.value)
    assert re.findall(r"\w+", text)[0] in str(raised.value) or "TOML" in said
    assert "\n" not in str(raised.value)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match="is not valid TOML"):
        Policy.beside(tmp_path)


@pytest.mark.parametrize(
    ("policy", "asked", "said"),
    [
        (Policy(systems=("fed-avg",)), {}, None),
        (Policy(systems=("scaffold",)), {}, "allows the systems scaffold; the run's is 'fed-avg'"),
        (Policy(), {"name": "mine", "from": "/theirs/mine.py:Mine"}, "'mine' of its own"),
        # A system of somebody's own does not pass under the name of one of dure's.
        (Policy(), {"from": "/theirs/mine.py:Mine"}, "'fed-avg' of its own"),
        (Policy(), {"from": None}, "'fed-avg' of its own"),
        (Policy(systems=("mine.py:Mine",)), {"from": "/theirs/mine.py:Mine"}, None),
        (Policy(systems=("mine.py:Mine",)), {"from": "/theirs/mine.py:Other"}, "of its own"),
        (Policy(systems=("mine.py:Mine",)), {"from": ""}, "of its own"),
        (Policy(systems=("mine.py:Mine",)), {"name": "mine.py:Mine", "from": 7}, "of its own"),
        (Policy(local_epochs=2), {}, None),
        (Policy(local_epochs=1), {}, "at most 1 local epoch; the run requires 2"),
        (
            Policy(local_epochs=5),
            {"local_epochs": 20},
            "at most 5 local epochs; the run requires",
        ),
        (Policy(local_epochs=5), {"fine_tune": 6}, "the run requires 6 of fine-tuning"),
        # 95 examples in tens: ten steps are an epoch.
        (Policy(local_epochs=5), {"local_steps": 50}, None),
        (Policy(local_epochs=5), {"local_steps": 51}, "requires 51 steps, of which 50 are 5"),
        (Policy(local_epochs=5), {"local_steps": 6, "batch_size": None}, "6 steps, of which 5"),
        (Policy(local_steps=20), {}, None),
        (Policy(local_steps=19), {}, "at most 19 local steps; the run requires 2 epochs, which a"),
        (Policy(local_steps=9), {"local_steps": 10}, "at most 9 local steps; the run requires 10"),
        (Policy(local_steps=2), {"batch_size": None}, None),
        (Policy(local_epochs=5), {"local_epochs": "2"}, "does not state how much it requires"),
        (Policy(local_epochs=5), {"local_epochs": None}, "does not state how much it requires"),
        (Policy(local_epochs=5), {"local_epochs": -1}, "does not state how much it requires"),
        (Policy(local_epochs=5), {"local_epochs": True}, "does not state how much it requires"),
        (Policy(local_steps=5), {"batch_size": 0.5}, "does not state how much it requires"),
        (Policy(smallest_cohort=10), {}, None),
        (Policy(smallest_cohort=11), {}, "at least 11 clients; a round of the run has 10"),
        (Policy(smallest_cohort=21), {}, "at least 21 clients; the run has 20"),
        (Policy(smallest_cohort=2), {"fraction": "x"}, "does not state how many a round has"),
        (Policy(smallest_cohort=2), {"fraction": float("nan")}, "does not state how many a round"),
        (Policy(memory=COPIES * 10**6), {}, None),
        (Policy(memory=COPIES * 10**6 - 1), {}, "a model of 1 MB needs at least 4 MB"),
    ],
)
def test_what_a_run_asks_is_compared_with_the_policy(policy, asked, said: str | None) -> None:
    reasons = policy.check(welcome(**asked), examples=95)
    if said is None:
        assert reasons == []
    else:
        (reason,) = reasons
        assert said in reason
        assert reason.startswith("policy.toml ")


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        (Policy(local_epochs=5), {"local_steps": 1}),
        (Policy(local_steps=50), {"local_epochs": 1}),
    ],
)
def test_what_cannot_be_known_to_be_within_a_bound_is_beyond_it(policy, asked) -> None:
    (reason,) = policy.check(welcome(**asked))
    assert "which may be more" in reason
    assert policy.check(welcome(**asked), examples=95) == []


def test_without_a_batch_size_a_step_is_an_epoch() -> None:
    asked = welcome(batch_size=None, local_epochs=3)
    assert Policy(local_steps=3).check(asked) == []
    assert Policy(local_steps=2).check(asked) != []


def test_every_reason_is_said() -> None:
    policy = Policy(systems=("scaffold",), local_epochs=1, smallest_cohort=50, memory=1)
    assert len(policy.check(welcome(), 95)) == 4


@pytest.mark.parametrize("dtype", ["F32", "float32", "I32"])
def test_the_memory_of_a_model_is_that_of_its_tensors(dtype: str) -> None:
    forms = {"a": (dtype, [10, 10]), "b": ("BOOL", [4]), "c": ("F64", [])}
    least = COPIES * (400 + 4 + 8)
    assert Policy(memory=least).check(welcome(forms=forms)) == []
    assert Policy(memory=least - 1).check(welcome(forms=forms)) != []


MINUTES = st.integers(0, 24 * 60 - 1)


@given(MINUTES, MINUTES, MINUTES)
def test_hours_are_open_from_one_to_the_other(begin: int, end: int, minute: int) -> None:
    if begin == end:
        return
    policy = Policy(hours=((begin, end),))
    now = datetime(2026, 11, 25, minute // 60, minute % 60)
    # Around the clock from the beginning on.
    since = (minute - begin) % (24 * 60)
    assert policy.open_at(now) == (since < (end - begin) % (24 * 60))


@given(st.lists(st.tuples(MINUTES, MINUTES), min_size=1, max_size=3), MINUTES, st.integers(0, 59))
def test_it_opens_when_it_is_said_and_not_before(hours, minute: int, second: int) -> None:
    policy = Policy(hours=tuple(each for each in hours if each[0] != each[1]))
    now = datetime(2026, 11, 25, minute // 60, minute % 60, second)
    wait = policy.seconds_until_open(now)
    if policy.open_at(now):
        assert wait == 0
        return
    assert 0 < wait <= 24 * 3600
    assert policy.open_at(now + timedelta(seconds=wait))
    assert not policy.open_at(now + timedelta(seconds=wait - 1))


def test_hours_are_those_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        policy = Policy(hours=((22 * 60, 6 * 60),))
        assert policy.open_at(datetime(2026, 1, 1, 21, 30, tzinfo=timezone.utc))
        assert not policy.open_at(datetime(2026, 1, 1, 20, 30, tzinfo=timezone.utc))
        # From noon to ten in the evening are ten hours; clocks are put forward on the way.
        assert policy.seconds_until_open(datetime(2026, 3, 28, 12, 0)) == 10 * 3600
        early = Policy(hours=((6 * 60, 7 * 60),))
        assert early.seconds_until_open(datetime(2026, 3, 28, 22, 0)) == 7 * 3600
    finally:
        monkeypatch.undo()
        time.tzset()


def in_a_child(work: Callable[[], None]) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    return child.exitcode


def test_the_system_holds_the_client_to_its_memory() -> None:
    room = 64 << 20

    def take(size: int) -> None:
        Policy(memory=_taken() + (128 << 20)).hold()
        try:
            torch.zeros(size, dtype=torch.uint8)
        except RuntimeError:
            os._exit(3)

    assert in_a_child(lambda: take(room)) == 0
    assert in_a_child(lambda: take(8 * room)) == 3


def test_the_system_holds_the_client_to_its_cores() -> None:
    def hold(before: int, after: int) -> None:
        torch.set_num_threads(before)
        Policy(cores=2).hold()
        assert len(os.sched_getaffinity(0)) <= 2
        assert torch.get_num_threads() == after

    assert in_a_child(lambda: hold(3, 2)) == 0
    # A bound makes nothing more.
    assert in_a_child(lambda: hold(1, 1)) == 0


def test_less_memory_than_is_taken_already_is_refused() -> None:
    with pytest.raises(PolicyError, match="allows 1 MB of memory, but Python and its libraries"):
        Policy(memory=10**6).hold()
