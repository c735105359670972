"""Trackers: a run is told of to TensorBoard, MLflow or Weights & Biases as well.

    tensorboard:FOLDER    event files in FOLDER/<label>-<run>         `dure[tensorboard]`
    mlflow:URI            a run in the experiment named as the task   `dure[mlflow]`
    wandb:PROJECT         a run of the project                        `dure[wandb]`

URI is a server, such as http://localhost:5000, a database, or a folder. Weights & Biases goes by
its own settings: WANDB_MODE=offline needs neither network nor account.

All three are told the same:

    loss                       after every step or round; and the strategy's numbers, by name
    test_…, validation_…       at every evaluation; and bytes_sent, seconds, epoch
    settings                   config.json, as parameters
    model                      the files of the run folder, if there is one, to MLflow

A run that goes on (`dure.resume`) goes on there too: it is found by its number, config["run"]. The
run folder is as ever; a tracker that fails ends the run as any callback does
(`dure.run.callbacks`), and nothing is lost of it.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from dure.errors import suggestion
from dure.record.history import Evaluation, Step
from dure.record.run import Run


class Tracker:
    """A callback that passes on what happens. where: what comes after the colon."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_begin(self, config: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def on_step(self, step: Step) -> None:
        numbers = {"loss": step.loss, **(step.numbers or {})}
        self.write(step.step, numbers)

    def on_round(self, step: Step) -> None:
        self.on_step(step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        counted = {
            name: float(getattr(evaluation, name)) for name in ("epoch", "seconds", "bytes_sent")
        }
        self.write(evaluation.step, {**evaluation.metrics, **(evaluation.numbers or {}), **counted})

    def on_end(self, run: Run) -> None:
        self.close("done", run)

    def on_failure(self, error: BaseException) -> None:
        self.close("failed", None)

    def write(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Passes numbers on, as far as they are any."""
        told = {
            name: value
            for name, value in numbers.items()
            if value is not None and math.isfinite(value)
        }
        if told:
            self.log(step, told)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        raise NotImplementedError

    def close(self, how: str, run: Run | None) -> None:
        """how: "done" or "failed"."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files, by torch's own writer."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.writer: Any = None

    def on_begin(self, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self.where) / f"{_file_name(str(config['label']))}-{config['run']}"
        self.writer = SummaryWriter(str(folder))
        rows = [f"| {name} | {value} |" for name, value in settings(config).items()]
        table = "\n".join(["| setting | value |", "| --- | --- |", *rows])
        self.writer.add_text("settings", table)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self, how: str, run: Run | None) -> None:
        if self.writer is not None:
            self.writer.close()


LOGGED = 500
"""Numbers that are sent to MLflow together, which takes 1,000 at the most."""

PARAMETERS = 100
"""Settings that MLflow takes together at the most."""

LOG_SECONDS = 1.0
"""For which they wait: each message takes a while, and a step may take less."""


class MLflow(Tracker):
    """A run on a server of MLflow's, in a database or in a folder."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.client: Any = None
        self.run = ""
        self._waiting: list[Any] = []
        self._logged = 0.0

    def on_begin(self, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # A client of its own: what the user's program tracks besides stays as it is.
        self.client = MlflowClient(tracking_uri=self.where)
        name = str(config["task"]["title"])
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name)
        found = self.client.search_runs([experiment], f"tags.`dure.run` = '{config['run']}'")
        if found:
            self.run = found[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        made = self.client.create_run(
            experiment, tags={"dure.run": config["run"]}, run_name=str(config["label"])
        )
        self.run = made.info.run_id
        parameters = [Param(name, value[:500]) for name, value in settings(config).items()]
        for first in range(0, len(parameters), PARAMETERS):
            self.client.log_batch(self.run, params=parameters[first : first + PARAMETERS])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [Metric(name, value, now, step) for name, value in numbers.items()]
        if len(self._waiting) >= LOGGED or time.monotonic() - self._logged > LOG_SECONDS:
            self._flush()

    def _flush(self) -> None:
        for first in range(0, len(self._waiting), LOGGED):
            self.client.log_batch(self.run, metrics=self._waiting[first : first + LOGGED])
        self._waiting = []
        self._logged = time.monotonic()

    def close(self, how: str, run: Run | None) -> None:
        if not self.run:
            return
        self._flush()
        for file in _files(run):
            self.client.log_artifact(self.run, str(file))
        # It prints where the run is to be seen; standard output is the command line's, for JSON.
        with redirect_stdout(sys.stderr):
            self.client.set_terminated(self.run, "FINISHED" if how == "done" else "FAILED")


class WandB(Tracker):
    """A run of Weights & Biases."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.run: Any = None

    def on_begin(self, config: Mapping[str, Any]) -> None:
        import wandb

        self.run = wandb.init(
            project=self.where,
            name=str(config["label"]),
            id=str(config["run"]),
            resume="allow",
            config=dict(config),
            reinit="create_new",
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self, how: str, run: Run | None) -> None:
        if self.run is None:
            return
        if run is not None:
            self.run.summary["ended"] = run.summary["ended"]
        self.run.finish(exit_code=0 if how == "done" else 1)


_TRACKERS: Mapping[str, tuple[str, Callable[[str], Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "mlflow": ("mlflow", MLflow),
    "wandb": ("wandb", WandB),
}
"""By name: the module that it needs, and its class."""


def tracker(text: str) -> Tracker:
    """The tracker that is named so, such as mlflow:http://localhost:5000.

    Raises ValueError where there is none of the name, or it is not installed.
    """
    if not isinstance(text, str):
        raise ValueError(f"track is {text!r}: give a text such as 'tensorboard:runs/board'")
    name, _, where = text.partition(":")
    if name not in _TRACKERS:
        raise ValueError(
            f"track is {text!r}, and not tensorboard:FOLDER, mlflow:URI or wandb:PROJECT"
            f"{suggestion(name, _TRACKERS)}"
        )
    if not where:
        what = {"tensorboard": "FOLDER", "mlflow": "URI", "wandb": "PROJECT"}[name]
        raise ValueError(f"track is {text!r}, which does not say where: {name}:{what}")
    module, kind = _TRACKERS[name]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"track={text!r} needs {name}, which is not installed ({error}): "
            f"pip install 'dure[{name}]'"
        ) from error
    return kind(where)


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """config.json as one level of names, such as strategy.batch_size."""
    return dict(_flat(config, ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, Mapping):
        yield name, str(value)
        return
    for key, one in value.items():
        yield from _flat(one, f"{name}.{key}" if name else str(key))


def _files(run: Run | None) -> list[Path]:
    """The files of the run folder; what lies in folders, such as checkpoints, stays there."""
    if run is None or run.folder is None:
        return []
    return sorted(path for path in run.folder.iterdir() if path.is_file())


def _file_name(label: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in label)
