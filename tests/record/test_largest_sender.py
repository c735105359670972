"""The worker that sends the most, where a mean over workers hides it."""

from __future__ import annotations

import json
from pathlib import Path

import dure
from dure.record.largest_sender import LargestSender, largest_sender
from dure.report.read import read_runs
from dure.report.table import table


def test_workers_that_send_alike_have_no_largest_sender() -> None:
    ranks = [{"name": f"rank {rank}", "bytes_sent": 1000 + rank} for rank in range(4)]
    assert largest_sender(ranks, 1001.5) is None
    assert largest_sender([], None) is None


def test_a_master_and_a_server_send_more_than_the_mean() -> None:
    ranks = [{"name": "rank 0", "bytes_sent": 3000}, {"name": "rank 1", "bytes_sent": 1000}]
    assert largest_sender(ranks, 2000.0) == LargestSender("rank 0", 3000)
    # The line of many clients has their sum.
    clients = [{"name": "server", "bytes_sent": 900}, {"name": "2000 clients", "bytes_sent": 9000}]
    assert largest_sender(clients, 4.5) == LargestSender("server", 900)


def test_the_master_of_an_all_reduce_is_named_in_the_report(tmp_path: Path) -> None:
    run = dure.train(
        dure.load_task("digits", model="logistic"),
        dure.DataParallel(all_reduce="master"),
        dure.Processes(3),
        dure.Stop(steps=2),
        out=tmp_path / "run",
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    sent = [one["bytes_sent"] for one in summary["per_worker"]]
    assert sent[0] == 2 * sent[1] == 2 * sent[2]
    most = largest_sender(summary["per_worker"], run.summary["bytes_sent_per_worker"])
    assert most == LargestSender("rank 0", sent[0])
    assert "<small>rank 0: " in table(read_runs([tmp_path / "run"]))
    amount = {"batch": 64, "local": False, "steps": 2, "learning_rate": None}
    told = run.summary["training_amount"]
    assert {name: told[name] for name in amount} == amount
