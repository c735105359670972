"""The variables of a launcher: a lone one says nothing, and a set that fits no job is refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import dure
from dure.cli.main import main
from dure.cli.running import run_folder
from dure.errors import DureError
from dure.run.registry import default_world

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    def set_all(variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"])
def test_a_lone_variable_changes_nothing(
    name: str, launch: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch({name: "3", "MASTER_ADDR": "localhost"} if name == "RANK" else {name: "3"})
    assert isinstance(default_world(dure.DataParallel()), dure.Processes)
    monkeypatch.chdir(tmp_path)
    with run_folder(None, "run") as folder:
        assert folder.is_dir(), "whoever leads makes the folder"
    assert main(["bench", "all-reduce", "--sizes", "-1"]) == 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "", "WORLD_SIZE is ''.* at least 1"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is '0'"),
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two'"),
        ("RANK", "2", "RANK is '2'.* 0 to 1"),
        ("RANK", "-1", "RANK is '-1'"),
        ("MASTER_PORT", "http", "MASTER_PORT is 'http'"),
        ("MASTER_PORT", "70000", "MASTER_PORT is '70000'"),
        ("MASTER_PORT", None, "MASTER_PORT is not set"),
        ("LOCAL_WORLD_SIZE", "", "LOCAL_WORLD_SIZE is ''"),
        ("TORCHELASTIC_MAX_RESTARTS", "x", "TORCHELASTIC_MAX_RESTARTS is 'x'"),
    ],
)
def test_a_variable_that_fits_no_job_is_refused_by_its_name(
    name: str,
    value: str | None,
    said: str,
    launch: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch({other: text for other, text in {**WHOLE, name: value}.items() if text is not None})
    monkeypatch.chdir(tmp_path)
    for make in (dure.Torchrun, dure.Processes, dure.Simulated, dure.Threads):
        with pytest.raises(ValueError, match=said + ".*torchrun, or unset RANK, WORLD_SIZE"):
            make()
    assert main(["train", "digits", "data-parallel", "--steps", "1"]) == 2
    assert name in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "before any work"


def test_a_set_that_nobody_meets_is_named(launch: Callable[..., None]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        launch({**WHOLE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])})
        with pytest.raises(DureError, match=r"RANK=1, WORLD_SIZE=2.*unset RANK") as caught:
            dure.Torchrun(deadline=1).run(lambda context: None, print)
    assert "\n" not in str(caught.value)
    assert "did not meet within 1 s" in str(caught.value)
    assert os.environ["RANK"] == "1"
