"""Errors whose own text fails, is no text that a file can hold, or is no Exception at all: each is
told by its class, with rank or client and step, in every world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import dure
from dure.cli.main import main
from dure.errors import DataError, DureError, WorkerFailedError, described, first_line, text_of
from small import small_task


class MuteError(Exception):
    """Its text cannot be made, nor can another process make the error again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("only one")

    def __str__(self) -> str:
        raise ValueError("no text")


class OwnDataError(DataError):
    """One of dure's own kind, which no other process can make again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} of {two} files")


class GoneError(BaseException):
    """No Exception, and not what ends a process either."""


def raising(error: Callable[[], BaseException]) -> Callable[..., torch.Tensor]:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise error()
        return F.cross_entropy(outputs, targets)

    return loss


KINDS: list[tuple[Callable[[], BaseException], str]] = [
    (lambda: MuteError(1, 2), "MuteError: (its text cannot be printed: ValueError)"),
    (lambda: RuntimeError("half a sign: \udc80"), "RuntimeError: half a sign: \\udc80"),
    (lambda: GoneError("away"), "GoneError: away"),
    (lambda: GeneratorExit("done"), "GeneratorExit: done"),
    (lambda: StopIteration(3), "StopIteration: 3"),
    (lambda: SystemExit(7), "SystemExit: 7"),
]

WORLDS: list[tuple[Any, Any, str]] = [
    (dure.SingleWorker(8), dure.Processes(1), "rank 0 failed in step 1: "),
    (dure.DataParallel(8), dure.Processes(2), "rank 0 failed in step 1: "),
    (dure.DataParallel(8), dure.Threads(2), " failed in step 1: "),
    (dure.FedAvg(clients=3), dure.Simulated(engine="loop"), "client 0 failed in round 1: "),
    (
        dure.FedAvg(clients=3),
        dure.Simulated(engine="loop-processes", processes=2),
        "client 0 failed in round 1: ",
    ),
]


@pytest.mark.parametrize(("error", "said"), KINDS, ids=[said.split(":")[0] for _, said in KINDS])
@pytest.mark.parametrize(("strategy", "world", "where"), WORLDS, ids=[str(w[1]) for w in WORLDS])
def test_every_kind_of_error_is_named_alike_in_every_world(
    strategy: Any, world: Any, where: str, error: Callable[[], BaseException], said: str
) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        dure.train(small_task(loss=raising(error)), strategy, world, dure.Stop(steps=2, rounds=2))
    assert str(caught.value).endswith(where + said)
    assert type(error()).__name__ in caught.value.traceback or caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.DataParallel(8), dure.Processes(2)),
        (dure.FedAvg(clients=3), dure.Simulated(engine="loop-processes", processes=2)),
    ],
)
def test_an_error_that_no_other_process_can_make_again_goes_by_its_text(
    strategy: Any, world: Any
) -> None:
    task = small_task(loss=raising(lambda: OwnDataError(1, 2)))
    with pytest.raises(WorkerFailedError, match=r"0 failed in .* 1: OwnDataError: 1 of 2 files"):
        dure.train(task, strategy, world, dure.Stop(steps=2, rounds=2))


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index:
            raise MuteError(1, 2)
        return torch.zeros(6, dtype=torch.float64), 0


def mute(*given: Any) -> Any:
    raise MuteError(1, 2)


@pytest.mark.parametrize(
    "changes", [{"train": Data()}, {"metrics": {"own": mute}}, {"optimizer": mute}]
)
@pytest.mark.parametrize(("strategy", "world"), [(one[0], one[1]) for one in WORLDS])
def test_wherever_the_users_own_code_is_called(
    changes: dict[str, Any], strategy: Any, world: Any
) -> None:
    with pytest.raises((DureError, ValueError), match=r"\(its text cannot be printed"):
        dure.train(small_task(**changes), strategy, world, dure.Stop(steps=2, rounds=2))


def test_what_is_told_has_an_end_and_a_line() -> None:
    long = ValueError("x" * 1_000_000)
    assert len(text_of(long)) < 11_000
    assert described(long).endswith("990,000 more characters)")
    assert first_line(ValueError("  \n")) == "nothing"
    assert first_line(ValueError("one\ntwo")) == "one"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("raise E()", 2, "could not be loaded: E: (its text cannot be printed"),
        ("def task():\n    raise E()", 1, "E: (its text cannot be printed"),
        ("def task():\n    raise BrokenPipeError('a reader of mine')", 1, "BrokenPipeError: a"),
        ("def task():\n    raise GeneratorExit(3)", 1, "GeneratorExit: 3"),
        ("raise GeneratorExit(3)", 2, "could not be loaded: GeneratorExit: 3"),
        ("def task():\n    raise ValueError()", 2, "dure: ValueError:"),
    ],
)
def test_the_command_line_tells_it_in_a_line(
    body: str, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"class E(Exception):\n    def __str__(self):\n        raise RuntimeError\n{body}\n"
    )
    assert main(["train", f"{file}:task", "single-worker", "--steps", "1"]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
