"""`dure watch`, while another process trains."""

from __future__ import annotations

import json
import re
import sys
import threading
import urllib.request
from typing import Any

import pytest
import torch

import dure
from dure.cli.main import main
from dure.errors import WorkerFailedError
from dure.record.live_status import NOW
from small import small_task


def test_a_run_is_watched_while_it_goes_and_the_page_ends_with_it(capsys, tmp_path) -> None:
    out = tmp_path / "runs"
    out.mkdir()
    pages: list[str] = []
    told: list[str] = []
    facts: list[dict[str, Any]] = []

    def look(event) -> None:
        if event.get("step") == 2 and not pages:
            facts.extend(json.loads((out / "one" / NOW).read_bytes())["facts"])
            said = capsys.readouterr().err
            told.append(said)
            url = re.search(r"http://127.0.0.1:\d+/", said)
            code = re.search(r"code +(\S+)", said)
            assert url is not None
            assert code is not None
            headers = {"authorization": f"Bearer {code[1]}"}
            request = urllib.request.Request(url[0], headers=headers)
            with urllib.request.urlopen(request, timeout=20) as answer:
                pages.append(answer.read().decode())

    watching = threading.Thread(
        target=lambda: statuses.append(main(["watch", str(out), "--linger", "0"])), daemon=True
    )
    statuses: list[int] = []
    watching.start()
    while "code" not in (said := capsys.readouterr().err):
        assert watching.is_alive()
    print(said, file=sys.stderr)
    run = dure.train(
        small_task(),
        dure.FedAvg(clients=3, batch_size=4),
        stop=dure.Stop(rounds=4),
        out=out / "one",
        on_progress=look,
    )
    watching.join(20)
    assert statuses == [0]
    assert "is training" in pages[0]
    # Who took part is known while the run goes, and in the summary when it has ended.
    assert facts[0]["turns"] == [[0, 1], [1, 1], [2, 1]]
    assert not (out / "one" / NOW).exists()
    assert run.summary["ended"] == "rounds"
    # The code is in no address.
    assert "?" not in told[0]


def test_what_cannot_be_watched_is_told_in_a_line(capsys, tmp_path) -> None:
    for line, why in (
        (["watch"], "name a run folder"),
        (["watch", str(tmp_path / "no")], "there is no folder"),
        (["watch", str(tmp_path), "--port", "70000"], "ports are"),
        (["watch", str(tmp_path), "--linger", "-1"], "0 seconds or more"),
    ):
        assert main(line) == 2
        assert why in capsys.readouterr().err


def test_a_failed_run_says_why_to_whoever_watches(tmp_path) -> None:
    def wrong(output, target):
        if calls:
            raise RuntimeError("no <luck>")
        return torch.nn.functional.cross_entropy(output, target)

    calls: list[int] = []
    task = small_task()

    class Fails:
        def on_step(self, *arguments) -> None:
            calls.append(1)

    task = dure.Task(
        model=task.model, loss=wrong, train=task.train, test=task.test, optimizer=task.optimizer
    )
    with pytest.raises(WorkerFailedError):
        dure.train(
            task,
            dure.SingleWorker(batch_size=4),
            stop=dure.Stop(steps=3),
            out=tmp_path / "run",
            callbacks=[Fails()],
        )
    assert "no <luck>" in json.loads((tmp_path / "run" / NOW).read_text())["failed"]
