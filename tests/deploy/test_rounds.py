"""What a round costs the journal, and what becomes of those who are too slow for it.

Server and clients are threads of this process.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import dure
from dure.deploy.client.link import RefusedError
from small import network, small_task

SECONDS = 60.0


def served(
    folder: Path, strategy: dure.Strategy, *clients: Callable[[str], object], **options: Any
) -> dure.Run:
    """A run with these clients, who are called with its address."""
    threads: list[threading.Thread] = []

    def hears(event: Mapping[str, Any]) -> None:
        if "serving" in event:
            for client in clients:
                thread = threading.Thread(target=client, args=(event["serving"],), daemon=True)
                thread.start()
                threads.append(thread)

    options = {"stop": dure.Stop(rounds=4), "task": small_task(), "record": True, **options}
    task, stop = options.pop("task"), options.pop("stop")
    run = dure.serve(
        task, strategy, stop, out=folder, on_progress=hears, port=0, access="open", **options
    )
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    return run


def joins(number: int, task: dure.Task, hears: Callable[..., None] = lambda *_: None) -> Any:
    return lambda url: dure.join(url, task, name=f"s {number}", part=number, on_progress=hears)


def rows(folder: Path) -> Counter[str]:
    """What lies in the journal, by kind."""
    with closing(sqlite3.connect(folder / "journal.db")) as journal:
        return Counter(kind for (kind,) in journal.execute("SELECT kind FROM events"))


@pytest.mark.parametrize(
    ("strategy", "evaluate_every"),
    [
        (dure.FedAvg(clients=2, batch_size=4), None),
        (dure.Ditto(clients=2, batch_size=4, held_out=0.3), 2),
        (dure.FedBuff(clients=2, batch_size=4, fraction=1.0, buffer=2), None),
    ],
    ids=["FedAvg", "Ditto that measures", "FedBuff"],
)
def test_a_round_costs_the_journal_a_row_for_each_update_and_none_to_begin(
    strategy: dure.Strategy, evaluate_every: int | None, tmp_path: Path
) -> None:
    run = served(
        tmp_path / "run",
        strategy,
        *(joins(number, small_task()) for number in range(2)),
        evaluate_every=evaluate_every,
    )
    assert run.summary["steps"] == 4
    found = rows(tmp_path / "run")
    assert found["begin"] == 1
    assert found["update"] >= 8
    assert found["tick"] == 0
    replayed = dure.replay(tmp_path / "run", task=small_task())
    assert (replayed.rounds, replayed.same) == (4, True)


class Paced(nn.Module):
    """Takes so many seconds for each batch, and notes them in `batches`."""

    def __init__(self, seconds: float, batches: list[int]) -> None:
        super().__init__()
        self.inner = network()
        self.seconds = seconds
        # Copies of the model note them there too.
        self.note = batches.append

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.note(len(inputs))
            time.sleep(self.seconds)
        return self.inner(inputs)


def paced(seconds: float, batches: list[int]) -> dure.Task:
    return small_task(model=lambda: Paced(seconds, batches))


def test_training_for_a_round_that_is_over_is_left_off(tmp_path: Path) -> None:
    heard: list[str] = []
    batches: list[int] = []
    asked = 300
    run = served(
        tmp_path / "run",
        dure.FedAvg(clients=2, batch_size=4, local_steps=asked),
        joins(0, paced(0.0, [])),
        joins(1, paced(0.05, batches), lambda what, about: heard.append(what)),
        task=paced(0.0, []),
        stop=dure.Stop(rounds=1),
        deadline=6.0,
    )
    assert run.summary["steps"] == 1
    # Some at least, before the round was over without it.
    assert 0 < len(batches) < asked
    assert "not wanted" in heard
    assert "sending" not in heard
    assert heard[-1] != "waiting"


def test_a_loop_of_its_own_sends_no_more_examples_than_it_has_said(tmp_path: Path) -> None:
    told: list[str] = []

    def loop(url: str) -> None:
        with dure.Client(url, examples=5, name="own") as client:
            for work in client:
                with pytest.raises(ValueError, match="has reported 5"):
                    work.send(work.arrays, examples=6)
                with pytest.raises(RefusedError) as refused:
                    work.send(work.arrays, samples=1000)
                told.append(str(refused.value))
                assert not work.sent
                assert work.send(work.arrays, examples=5, samples=10)

    strategy = dure.FedAvg(clients=1, batch_size=4)
    run = served(tmp_path / "run", strategy, loop, stop=dure.Stop(rounds=1))
    assert told == [
        "the update is invalid: it has processed 1,000 samples, and of 5 examples 10 are asked for "
        "at most"
    ]
    assert run.summary["samples"] == 10
