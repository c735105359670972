"""Callbacks: what they hear, how they end a run, and what becomes of one that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dure
from dure.contracts.strategy import Strategy
from dure.errors import CallbackFailedError, DureError
from dure.parameter_server.strategy import ParameterServer
from dure.record.history import Evaluation, Step
from small import small_task

EVERYWHERE: list[tuple[Strategy, Any, int]] = [
    (dure.SingleWorker(batch_size=8), None, 2),
    # They hear of it with their next message.
    (dure.DataParallel(batch_size=8), dure.Processes(2), 3),
    (dure.DataParallel(batch_size=8), dure.Threads(2), 2),
    (ParameterServer(batch_size=4), None, 2),
    (dure.FedAvg(clients=2, batch_size=8), None, 2),
]


class Listens:
    """Hears of everything, and wants the run to end after so many steps or rounds."""

    def __init__(self, most: int = 100, error: type[Exception] = dure.StopRun) -> None:
        self.most = most
        self.error = error
        self.heard: list[Any] = []

    def on_begin(self, config: Any) -> None:
        self.heard.append(config["seed"])

    def on_step(self, step: Step) -> None:
        self.heard.append(step)
        if step.step >= self.most:
            raise self.error("of mine")

    def on_round(self, step: Step) -> None:
        self.on_step(step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.heard.append(evaluation)

    def on_end(self, run: dure.Run) -> None:
        self.heard.append(run)

    def on_failure(self, error: BaseException) -> None:
        self.heard.append(error)


@pytest.mark.parametrize(("strategy", "world", "last"), EVERYWHERE)
def test_a_callback_hears_all_and_ends_the_run_where_the_user_called(
    strategy: Strategy, world: Any, last: int, tmp_path: Path
) -> None:
    listens = Listens(2)
    stop = dure.Stop(epochs=20)
    run = dure.train(small_task(), strategy, world, stop, out=tmp_path / "run", callbacks=[listens])
    assert run.summary["ended"] == "callback"
    assert run.summary["steps"] == last
    seed, *records, end = listens.heard
    assert seed == 0
    assert end is run
    assert [type(one) for one in records] == [type(one) for one in run.history.records]
    assert [one.step for one in records] == [one.step for one in run.history.records]
    again = dure.resume(tmp_path / "run", task=small_task(), stop=stop, callbacks=[Listens(4)])
    assert again.summary["steps"] == last + 2


@pytest.mark.parametrize(("strategy", "world", "last"), EVERYWHERE[1:3])
def test_one_that_fails_is_named_and_nothing_is_lost(
    strategy: Strategy, world: Any, last: int
) -> None:
    listens = Listens(2, RuntimeError)
    with pytest.raises(CallbackFailedError, match=r"Listens\.on_step failed after step 2") as told:
        dure.train(small_task(), strategy, world, dure.Stop(epochs=20), callbacks=[listens])
    assert "RuntimeError: of mine" in str(told.value)
    assert isinstance(told.value.run, dure.Run)
    assert told.value.run.summary["steps"] == last
    assert listens.heard[-1] is told.value.run


def test_callbacks_change_no_bit_of_a_run() -> None:
    system = dure.DataParallel(batch_size=8)
    asked = (small_task(), system, dure.Processes(2), dure.Stop(steps=3))
    listened = dure.train(*asked, callbacks=[Listens()])
    alone = dure.train(*asked)
    for one, other in zip(
        listened.model.state_dict().values(), alone.model.state_dict().values(), strict=True
    ):
        assert one.equal(other)
    assert listened.summary["bytes_sent"] == alone.summary["bytes_sent"]


def test_a_run_that_fails_is_told() -> None:
    def spoilt(outputs: Any, targets: Any) -> Any:
        return outputs.sum() * float("nan")

    listens = Listens()
    task = dure.Task(small_task().model, spoilt, small_task().train)
    with pytest.raises(DureError) as raised:
        dure.train(task, dure.SingleWorker(), stop=dure.Stop(steps=2), callbacks=[listens])
    assert listens.heard[-1] is raised.value


def test_each_run_of_a_comparison_is_heard_of() -> None:
    listens = Listens()
    systems = [dure.SingleWorker(batch_size=8), dure.FedAvg(clients=2, batch_size=8)]
    done = dure.compare(small_task(), systems, stop=dure.Stop(epochs=1), callbacks=[listens])
    ends = [one for one in listens.heard if isinstance(one, dure.Run)]
    assert [one.label for one in ends] == [one.label for one in done.runs]


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ("stop", "give a list of callbacks"),
        ([Listens], "Listens is a class"),
        ([object()], "is not a callback"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dure.train(small_task(), dure.SingleWorker(), callbacks=callbacks)
