"""A run ends when so many bytes have travelled, whoever sends them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dure
from dure.contracts.strategy import Strategy
from dure.contracts.world import World
from dure.errors import TooFewClientsError
from dure.settings import read_bytes
from small import small_task

ALL: list[tuple[Strategy, World]] = [
    (dure.DataParallel(batch_size=8), dure.Processes(2)),
    (dure.ZeRO(stage=2, batch_size=8), dure.Processes(2)),
    (dure.LocalSGD(batch_size=8, period=2), dure.Processes(2)),
    (dure.FedAvg(clients=4, fraction=0.5), dure.Simulated(engine="loop")),
    (dure.FedBuff(clients=4, fraction=0.5, buffer=2), dure.Simulated(engine="loop")),
]


@pytest.mark.parametrize(("strategy", "world"), ALL, ids=lambda one: type(one).__name__)
def test_a_run_ends_with_the_first_step_that_reaches_the_bytes(
    strategy: Strategy, world: World
) -> None:
    task = small_task()
    some = [
        dure.train(task, strategy, world, dure.Stop(steps=n, rounds=n)).summary["bytes_sent"]
        for n in (5, 6)
    ]
    for limit, steps in ((some[0], 5), (some[0] + 1, 6)):
        run = dure.train(task, strategy, world, dure.Stop(bytes=limit))
        assert (run.summary["ended"], run.summary["steps"]) == ("bytes", steps)
        # The number that tables show.
        assert run.summary["bytes_sent"] == some[steps - 5]


def test_a_resumed_run_keeps_the_limit_and_its_count(tmp_path: Path) -> None:
    task = small_task()
    strategy = dure.FedAvg(clients=4)
    world = dure.Simulated(engine="loop")
    whole = dure.train(task, strategy, world, dure.Stop(rounds=6))
    limit = whole.summary["bytes_sent"]
    folder = tmp_path / "run"
    dure.train(task, strategy, world, dure.Stop(bytes=limit // 2), out=folder)
    again = dure.resume(folder, task=task)
    assert (again.summary["ended"], again.summary["steps"]) == ("bytes", 3)
    further = dure.resume(folder, task=task, stop=dure.Stop(bytes=limit))
    assert (further.summary["ended"], further.summary["steps"]) == ("bytes", 6)


def test_one_rank_alone_sends_nothing_that_could_end_its_run() -> None:
    with pytest.raises(ValueError, match="a limit of bytes cannot end a run of one rank"):
        dure.train(small_task(), dure.SingleWorker(), stop=dure.Stop(bytes=1e6))
    run = dure.train(small_task(), dure.SingleWorker(), stop=dure.Stop(bytes=1, steps=2))
    assert run.summary["ended"] == "steps"


def spent(run: dure.Run) -> list[int]:
    clients = run.summary["per_worker"][1:]
    return [one["bytes_sent"] + one["bytes_received"] for one in clients]


def size_of_an_exchange() -> int:
    run = dure.train(small_task(), dure.FedAvg(clients=1), stop=dure.Stop(rounds=1))
    return 2 * run.summary["bytes_sent_per_worker"]


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(clients=4, fraction=0.5),
        dure.FedBuff(clients=4, fraction=0.5, buffer=3),
        dure.FedAsync(clients=4, fraction=0.5),
    ],
)
@pytest.mark.parametrize("drop_out", [0.0, 0.4])
def test_clients_that_have_used_up_their_transfers_are_not_asked_again(
    strategy: Strategy, drop_out: float
) -> None:
    exchange = size_of_an_exchange()
    budget = int(3.5 * exchange)
    world = dure.Simulated(
        engine="loop", transfer_budget=budget, devices="lognormal:1", drop_out=drop_out
    )
    with pytest.warns(UserWarning, match="have reached their transfer budget"):
        run = dure.train(small_task(), strategy, world, dure.Stop(rounds=1_000))
    assert run.summary["ended"] == "transfers"
    assert all(one <= budget for one in spent(run))
    out = dict(run.summary["facts"][0]["out_of_transfers"])
    assert out.keys() >= {client for client, bytes in enumerate(spent(run)) if bytes >= budget}
    # The others went on: as many updates as fit have come, but for a model's that is not whole.
    if not drop_out:
        updates = sum(times for _, times in run.summary["facts"][0]["turns"])
        assert 12 - 3 < updates <= 12


def test_a_run_goes_on_with_the_clients_that_may_still_transfer(tmp_path: Path) -> None:
    exchange = size_of_an_exchange()
    task = small_task()
    strategy = dure.FedAvg(clients=4, fraction=0.5)

    def world() -> dure.Simulated:
        return dure.Simulated(engine="loop", transfer_budget=int(3.5 * exchange))

    with pytest.warns(UserWarning, match="have reached their transfer budget"):
        whole = dure.train(task, strategy, world(), dure.Stop(rounds=1_000))
    dure.train(task, strategy, world(), dure.Stop(rounds=3), out=tmp_path / "run")
    with pytest.warns(UserWarning, match="have reached their transfer budget"):
        resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=1_000))
    assert resumed.summary["steps"] == whole.summary["steps"]
    assert resumed.history.evaluations[-1].metrics == whole.history.evaluations[-1].metrics
    assert spent(resumed) == spent(whole)


def test_a_budget_too_small_for_one_update_is_told() -> None:
    with pytest.raises(TooFewClientsError, match="may transfer 100 bytes each, but an update"):
        dure.train(
            small_task(),
            dure.FedAvg(clients=2),
            dure.Simulated(transfer_budget=100),
            dure.Stop(rounds=1),
        )


@pytest.mark.parametrize("budget", [0, -1, 1.5])
def test_a_budget_is_a_number_of_bytes(budget: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"transfer_budget is {budget}")):
        dure.Simulated(transfer_budget=budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4_096),
        ("100MB", 10**8),
        ("1.5 GB", 1_500_000_000),
        ("64KiB", 65_536),
        ("2k", 2_000),
        ("7b", 7),
    ],
)
def test_sizes_are_read_in_powers_of_ten_or_of_two(text: str, expected: int) -> None:
    assert read_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1 megabyte", "1e6", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        read_bytes(text)


def test_sizes_may_be_text() -> None:
    assert dure.Simulated(transfer_budget="1.5kB").transfer_budget == 1_500
    assert dure.Stop(bytes="100MB").bytes == 100_000_000  # type: ignore[arg-type]
