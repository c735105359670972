"""Clients of split learning who are away, leave, or drop out: who learns from whom, and when."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.data.client_part import ClientExamples, divide
from dure.data.partition import IID, QuantitySkew
from dure.errors import TooFewClientsError
from dure.randomness.hashed_numbers import uniform
from dure.split.availability import AvailabilityTracker
from dure.split.strategy import Split

SIZE = 8
CLIENTS = 4
ROUNDS = 4
DROP_OUT = 0.4
PARTITION = QuantitySkew(1.0)
ADAM = partial(torch.optim.Adam, lr=0.01)
STOP = dure.Stop(rounds=ROUNDS)
WENT = {
    number: {k for k in range(CLIENTS) if uniform(0, "drop out", number, k) < DROP_OUT}
    for number in range(ROUNDS)
}
"""Who drops out in which round, with seed 0."""


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 2)
    ).double()


def normed() -> nn.Module:
    """With buffers and draws on both sides of the cut."""
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.Linear(8, 7),
        nn.BatchNorm1d(7),
        nn.Dropout(0.3),
        nn.Linear(7, 2),
    ).double()


def task_of(model: Callable[[], nn.Module] = model, optimizer: Any = ADAM) -> dure.Task:
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(80, 6, generator=numbers, dtype=torch.float64)
    return dure.Task(
        model=model,
        loss=nn.functional.cross_entropy,
        train=(inputs, (inputs[:, 0] > 0.5).long()),
        optimizer=optimizer,
    )


def run(
    strategy: Split, task: dure.Task | None = None, stop: dure.Stop = STOP, **conditions: Any
) -> dure.Run:
    return dure.train(task or task_of(), strategy, dure.Simulated(**conditions), stop)


def made(kind: Callable[..., Split], **fields: Any) -> Split:
    return kind(clients=CLIENTS, batch_size=SIZE, partition=PARTITION, **fields)


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def bits(run: dure.Run) -> dict[str, Tensor]:
    return dict(run.model.state_dict())


def parts_of(task: dure.Task) -> Sequence[ClientExamples]:
    return divide(PARTITION, CLIENTS, task.train, SIZE, 0, joins=False)


def on(module: nn.Module, optimizer: Any, task: dure.Task, batch: Tensor) -> None:
    """One step."""
    inputs, targets = task.train.batch(batch)
    optimizer.zero_grad()
    task.loss(module(inputs), targets).backward()  # type: ignore[union-attr]
    optimizer.step()


def batches_of(task: dure.Task, taking_part: Iterable[set[int]]) -> Iterable[dict[int, Any]]:
    """The batches of the clients that take part, round by round: each goes on where it was."""
    parts = parts_of(task)
    taken = [0] * CLIENTS
    for present in taking_part:
        found = {}
        for k in sorted(present):
            steps = parts[k].batches.steps_per_epoch
            found[k] = [parts[k].at(taken[k] + step) for step in range(steps)]
            taken[k] += steps
        yield found


STAYED = [set(range(CLIENTS)) - gone for gone in WENT.values()]


def test_clients_drop_out_in_these_rounds_and_others_do_not() -> None:
    """What the tests below rest on."""
    assert any(gone and stayed for gone, stayed in zip(WENT.values(), STAYED, strict=True))


@pytest.mark.parametrize("cut", [("1",), ("1", "2")], ids="-".join)
@pytest.mark.parametrize("handover", ["peer", "server"])
def test_in_turn_it_is_sgd_on_the_data_of_those_who_do_not_drop_out(
    handover: str, cut: tuple[str, ...]
) -> None:
    task = task_of()
    whole = seeded_model(task, 0)
    optimizer = task.optimizer(whole.parameters())
    for clients in batches_of(task, STAYED):
        for batches in clients.values():
            for batch in batches:
                on(whole, optimizer, task, batch)
    found = run(made(dure.SplitLearning, cut=cut, handover=handover), task, drop_out=DROP_OUT)
    assert apart(bits(found), whole.state_dict()) < 1e-12
    numbers = [one.numbers or {} for one in found.history.steps]
    assert [one["turns"] for one in numbers] == [len(stayed) for stayed in STAYED]
    assert [one["failed"] for one in numbers] == [len(gone) for gone in WENT.values()]


def test_in_parallel_it_is_sgd_on_the_joint_batches_of_those_who_do_not_drop_out() -> None:
    task = task_of()
    whole = seeded_model(task, 0)
    optimizer = task.optimizer(whole.parameters())
    for clients in batches_of(task, STAYED):
        for step in range(max(map(len, clients.values()), default=0)):
            joint = [batches[step] for batches in clients.values() if len(batches) > step]
            on(whole, optimizer, task, torch.cat(joint))
    found = run(made(dure.ParallelSplit), task, drop_out=DROP_OUT)
    assert apart(bits(found), whole.state_dict()) < 1e-12


def test_split_fed_averages_those_who_do_not_drop_out() -> None:
    task = task_of(optimizer=partial(torch.optim.SGD, lr=0.1))
    parts = parts_of(task)
    weights = dict(seeded_model(task, 0).state_dict())
    for clients in batches_of(task, STAYED):
        total = sum(len(parts[k].indices) for k in clients)
        sums = {name: torch.zeros_like(one) for name, one in weights.items()}
        for k, batches in clients.items():
            own = seeded_model(task, 0)
            own.load_state_dict(weights)
            optimizer = task.optimizer(own.parameters())
            for batch in batches:
                on(own, optimizer, task, batch)
            for name, one in own.state_dict().items():
                sums[name] += one * (len(parts[k].indices) / total)
        weights = sums if clients else weights
    found = run(made(dure.SplitFed), task, drop_out=DROP_OUT)
    assert apart(bits(found), weights) < 1e-12


def alike(strategy: Split) -> Split:
    """Clients of as many examples each, none of whom has a batch of one alone."""
    return dataclasses.replace(strategy, partition=IID())


SYSTEMS = [
    made(dure.SplitLearning, handover="peer"),
    made(dure.SplitLearning, handover="server"),
    made(dure.SplitLearning, cut=("1", "2"), defence="marvell:1"),
    made(dure.SplitLearning, defence="no-peek:1"),
    made(dure.ParallelSplit),
    made(dure.SplitFed, version=1),
    made(dure.SplitFed, version=1, cut=("1", "2"), defence="marvell:1"),
    made(dure.SplitFed, version=2),
]
NAMES = [f"{one.label} {one.defence} {getattr(one, 'handover', '')}" for one in SYSTEMS]


@pytest.mark.parametrize("strategy", SYSTEMS, ids=NAMES)
def test_a_client_that_drops_out_leaves_nothing(
    strategy: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in heads, tails, optimizers, buffers, draws and what defences remember."""
    task = task_of(normed)
    strategy = alike(strategy)
    dropped = run(strategy, task, drop_out=DROP_OUT)

    def is_there(self: AvailabilityTracker, name: str, now: float) -> bool:
        order = self.server.order
        return order.everyone.index(name) not in WENT[order.round]

    # Now the same clients are away to begin with. Who has the head is there to hand it on.
    monkeypatch.setattr(AvailabilityTracker, "_is_there", is_there)
    monkeypatch.setattr(AvailabilityTracker, "_wait_for", None)
    monkeypatch.setattr(AvailabilityTracker, "opens", lambda self, now: now)
    if getattr(strategy, "handover", "") == "peer":
        strategy = dataclasses.replace(strategy, handover="server")  # type: ignore[call-arg]
    away = run(strategy, task, drop_out=1e-12)
    for name, one in bits(dropped).items():
        assert torch.equal(one, bits(away)[name]), name


@pytest.mark.parametrize("strategy", SYSTEMS, ids=NAMES)
def test_a_run_that_is_resumed_has_the_same_bits_bytes_and_times(
    strategy: Split, tmp_path: Path
) -> None:
    conditions: dict[str, Any] = {"drop_out": 0.3, "availability": "probability:0.8:0.4"}
    strategy = dataclasses.replace(alike(strategy), measure_leaks=True)
    task = task_of(normed)
    whole = run(strategy, task, **conditions)
    dure.train(
        task, strategy, dure.Simulated(**conditions), dure.Stop(rounds=2), out=tmp_path / "run"
    )
    again = dure.resume(tmp_path / "run", task=task, stop=STOP)
    assert all(torch.equal(one, bits(again)[name]) for name, one in bits(whole).items())
    assert [one.numbers for one in whole.history.steps] == [
        one.numbers for one in again.history.steps
    ]
    for name in ("bytes_sent", "bytes_received"):
        assert whole.summary[name] == again.summary[name]
    # Somebody was away, or went.
    turns = [(one.numbers or {})["turns"] for one in whole.history.steps]
    assert any(0 < one < CLIENTS for one in turns)


@pytest.mark.parametrize("strategy", SYSTEMS, ids=NAMES)
def test_clients_who_are_always_there_train_as_if_nobody_looked(strategy: Split) -> None:
    bare = run(strategy)
    looked_at = run(strategy, availability="daily:1")
    assert all(torch.equal(one, bits(looked_at)[name]) for name, one in bits(bare).items())
    for one, other in zip(bare.history.steps, looked_at.history.steps, strict=True):
        numbers = dict(other.numbers or {})
        assert numbers.pop("turns") == CLIENTS
        assert numbers.pop("failed") == 0
        assert numbers == one.numbers
    assert bare.summary["bytes_sent"] == looked_at.summary["bytes_sent"]


def windows(folder: Path, *lines: str) -> str:
    """Availability from a file of these windows: client,start,end."""
    path = folder / "windows.csv"
    path.write_text("\n".join(["client,start,end", *lines]) + "\n")
    return f"file:{path}"


@pytest.mark.parametrize("leaves", [0.0, 0.05])
def test_a_client_that_leaves_in_its_turn_or_is_not_there_for_it_is_skipped(
    leaves: float, tmp_path: Path
) -> None:
    # The one with the most examples needs far longer: it is away at once, or leaves soon.
    task = task_of()
    sizes = [len(part.indices) for part in parts_of(task)]
    one = sizes.index(max(sizes))
    others = set(range(CLIENTS)) - {one}
    mine = f"{one},0,{leaves}" if leaves else f"{one},900,901"
    there = windows(tmp_path, mine, *[f"{k},0,inf" for k in others])
    whole = seeded_model(task, 0)
    optimizer = task.optimizer(whole.parameters())
    for clients in batches_of(task, [others]):
        for batches in clients.values():
            for batch in batches:
                on(whole, optimizer, task, batch)
    conditions = {"availability": there, "devices": "equal:1:inf:inf"}
    found = run(made(dure.ParallelSplit), task, dure.Stop(rounds=1), **conditions)
    numbers = found.history.steps[0].numbers or {}
    assert (numbers["turns"], numbers["failed"]) == (3, 1 if leaves else 0)
    if one == 0 or not leaves:
        for handover in ("peer", "server"):
            strategy = made(dure.SplitLearning, handover=handover)
            found = run(strategy, task, dure.Stop(rounds=1), **conditions)
            assert apart(bits(found), whole.state_dict()) < 1e-12
            numbers = found.history.steps[0].numbers or {}
            assert (numbers["turns"], numbers["failed"]) == (3, 1 if leaves else 0)


def test_a_round_begins_when_somebody_is_there(tmp_path: Path) -> None:
    there = windows(tmp_path, "0,100,inf", "1,200,inf", "2,200,inf", "3,200,inf")
    found = run(made(dure.SplitFed), stop=dure.Stop(rounds=1), availability=there)
    numbers = found.history.steps[0].numbers or {}
    assert numbers["turns"] == 1
    assert 100 < numbers["virtual_seconds"] < 200


def test_nobody_who_will_ever_be_there_ends_the_run(tmp_path: Path) -> None:
    there = windows(tmp_path, *[f"{k},0,1" for k in range(CLIENTS)])
    with pytest.raises(TooFewClientsError, match="no client is available after"):
        run(made(dure.SplitFed), stop=dure.Stop(rounds=100), availability=there)


def test_all_wait_for_whoever_has_the_newest_head_unless_the_server_has_it(tmp_path: Path) -> None:
    # In the first round client 0 trains alone. Then it is away, and the others come.
    seconds: dict[str, float] = {}
    for handover in ("server", "peer"):
        strategy = made(dure.SplitLearning, handover=handover)
        alone = windows(tmp_path, "0,0,inf", *[f"{k},900,inf" for k in range(1, CLIENTS)])
        calm = run(strategy, stop=dure.Stop(rounds=1), availability=alone)
        ends = (calm.history.steps[0].numbers or {})["virtual_seconds"]
        others = [f"{k},{ends + 1},inf" for k in range(1, CLIENTS)]
        there = windows(tmp_path, f"0,0,{ends}", "0,50,inf", *others)
        found = run(strategy, stop=dure.Stop(rounds=2), availability=there)
        numbers = [one.numbers or {} for one in found.history.steps]
        assert numbers[0]["turns"] == 1
        seconds[handover] = numbers[1]["virtual_seconds"]
    assert seconds["server"] < 50 < seconds["peer"]
    never = windows(tmp_path, f"0,0,{ends}", *others)
    with pytest.raises(TooFewClientsError, match=r"client 0 has the newest head.*handover=server"):
        run(made(dure.SplitLearning), stop=dure.Stop(rounds=2), availability=never)


def test_a_holder_that_leaves_while_it_hands_the_head_on_is_waited_for(tmp_path: Path) -> None:
    # A slow link: client 0 needs ten seconds and more to hand its head on.
    devices = tmp_path / "devices.csv"
    devices.write_text(
        "client,examples_per_second,down_mbit,up_mbit\n0,inf,inf,0.0004\n"
        + "".join(f"{k},inf,inf,inf\n" for k in range(1, CLIENTS))
    )
    task = task_of(optimizer=partial(torch.optim.SGD, lr=0.1))
    strategy = made(dure.SplitLearning)
    conditions = {"devices": f"file:{devices}"}
    calm = run(strategy, task, dure.Stop(rounds=1), **conditions)
    took = (calm.history.steps[0].numbers or {})["virtual_seconds"]
    # Its own turn is over by then, and its head is on its way.
    lines = [f"0,0,{took - 1}", "0,1000,inf", *[f"{k},0,inf" for k in range(1, CLIENTS)]]
    there = windows(tmp_path, *lines)
    found = run(strategy, task, dure.Stop(rounds=1), availability=there, **conditions)
    numbers = found.history.steps[0].numbers or {}
    assert (numbers["turns"], numbers["failed"]) == (CLIENTS, 0)
    assert numbers["virtual_seconds"] > 1000
    assert all(torch.equal(one, bits(found)[name]) for name, one in bits(calm).items())


def test_a_round_in_which_all_drop_out_teaches_nothing() -> None:
    strategy = made(dure.SplitFed)
    found = run(strategy, stop=dure.Stop(rounds=1), drop_out=1 - 1e-12)
    assert apart(bits(found), seeded_model(task_of(), 0).state_dict()) == 0
    one = found.history.steps[0]
    assert one.loss is None
    assert (one.numbers or {})["failed"] == CLIENTS
