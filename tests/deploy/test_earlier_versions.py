"""Runs that an earlier version was serving go on with this one: server's folder and client's.

`version_1/make.py` made them. They are as large as a run that was served can be small.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dure
from dure.deploy.client.link import StoppedError
from small import small_task

MADE = Path(__file__).parent / "version_1"
ROUNDS = 8


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    for name in ("run", "client"):
        shutil.copytree(MADE / name, tmp_path / name)
    # git forgets who may read a file, and keys are nobody else's.
    for file in tmp_path.rglob("*"):
        file.chmod(0o700 if file.is_dir() else 0o600)
    return tmp_path


def test_a_run_that_version_1_was_serving_goes_on_with_its_client(kept: Path) -> None:
    clients: list[threading.Thread] = []
    stop = threading.Event()

    def client(url: str) -> None:
        how = {"name": "site", "state": kept / "client", "part": 0, "stop": stop}
        with contextlib.suppress(StoppedError):
            dure.join(url, small_task(), **how)

    def progress(event: dict[str, Any]) -> None:
        if "serving" in event:
            clients.append(threading.Thread(target=client, args=(event["serving"],), daemon=True))
            clients[0].start()

    run = dure.resume(kept / "run", task=small_task(), on_progress=progress)
    # On a busy machine it may not have heard of the end.
    stop.set()
    clients[0].join(60)
    assert run.summary["steps"] == ROUNDS
    strategy = dure.Scaffold(clients=1, batch_size=4)
    alone = dure.train(
        small_task(), strategy, dure.Simulated(engine="loop"), dure.Stop(rounds=ROUNDS)
    )
    # Not to the bit: the first rounds were computed on another machine.
    for name, weights in alone.model.state_dict().items():
        assert torch.allclose(run.model.state_dict()[name], weights, rtol=1e-9, atol=1e-12), name


def test_what_version_1_kept_for_a_client_is_read(kept: Path) -> None:
    found = dure.personalise(kept / "client", small_task())
    assert found.round >= 4
    assert found.after["test_loss"] > 0


def test_what_is_kept_is_small() -> None:
    """A repository is fetched by everybody."""
    assert sum(file.stat().st_size for file in MADE.rglob("*") if file.is_file()) < 120_000
