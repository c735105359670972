"""Trackers: report a run to TensorBoard, MLflow or Weights & Biases.

    tensorboard:FOLDER    event files in FOLDER/<label>-<run>         `dure[tensorboard]`
    mlflow:URI            a run in the experiment named as the task   `dure[mlflow]`
    wandb:PROJECT         a run of the project                        `dure[wandb]`

URI is a server, such as http://localhost:5000, a database, or a folder. Weights & Biases uses its
own settings: WANDB_MODE=offline needs neither network nor account.

All three trackers get the same content:

    loss                       after every step or round; and the strategy's numbers, by name
    test_…, validation_…       at every evaluation; and bytes_sent, seconds, epoch
    settings                   config.json, as parameters
    model                      the files of the run folder, if there is one, to MLflow

A resumed run (`dure.resume`) continues the run in the tracker, which is found by its number,
config["run"]. Steps after the checkpoint are not duplicated: TensorBoard shows the new steps,
MLflow and Weights & Biases keep the old ones, which have the same numbers.

A tracker never ends a run: a failure becomes a warning, and after `FAILURES` failures in a row the
tracker is disabled. Characters that MLflow does not accept in names become `_`.
"""

from __future__ import annotations

import importlib
import math
import posixpath
import re
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from dure.errors import suggestion
from dure.record.history import Evaluation, Step
from dure.record.run import Run

FAILURES = 3
"""Failures in a row that disable a tracker: each may take as long as a timeout."""


class Tracker:
    """A callback that reports a run to a tracker. where: the text after the colon."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._failed = 0

    def on_begin(self, config: Mapping[str, Any]) -> None:
        self._failed = 0
        self._tell(self.begin, config)

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
        self._tell(self.close, "done", run)

    def on_failure(self, error: BaseException) -> None:
        self._tell(self.close, "failed", None)

    def _tell(self, call: Callable[..., None], *given: Any) -> None:
        """Call a method of the tracker, and turn its failure into a warning."""
        if self._failed >= FAILURES:
            return
        try:
            call(*given)
        except Exception as error:
            self._failed += 1
            told = "it receives no more events" if self._failed == FAILURES else "the run continues"
            warnings.warn(
                f"{type(self).__name__} at {self.where} failed, and {told}: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
        else:
            self._failed = 0

    def begin(self, config: Mapping[str, Any]) -> None:
        """Begin a run, or find the run with the number config["run"]."""
        raise NotImplementedError

    def write(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Pass on the finite numbers."""
        told = {
            name: value
            for name, value in numbers.items()
            if value is not None and math.isfinite(value)
        }
        if told:
            self._tell(self.log, step, told)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        raise NotImplementedError

    def close(self, how: str, run: Run | None) -> None:
        """End the run in the tracker. how: "done" or "failed"."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """A tracker that writes event files with torch's own writer."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._folder = Path(where)
        self._settings = ""
        self._writer: Any = None

    def begin(self, config: Mapping[str, Any]) -> None:
        self._folder = Path(self.where) / f"{_file_name(str(config['label']))}-{config['run']}"
        rows = [f"| {name} | {value} |" for name, value in settings(config).items()]
        self._settings = "\n".join(["| setting | value |", "| --- | --- |", *rows])
        self._writer = None

    def _open(self, step: int) -> Any:
        """Return the writer. step: first new step; TensorBoard drops older records from it on."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            goes_on = self._folder.is_dir() and any(self._folder.iterdir())
            self._writer = SummaryWriter(str(self._folder), purge_step=step if goes_on else None)
            self._writer.add_text("settings", self._settings, step if goes_on else None)
        return self._writer

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        writer = self._open(step)
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    def close(self, how: str, run: Run | None) -> None:
        if self._writer is not None:
            self._writer.close()


LOGGED = 500
"""Numbers of one message to MLflow, which accepts at most 1,000."""

PARAMETERS = 100
"""Most settings of one message to MLflow."""

LOG_SECONDS = 1.0
"""Seconds that numbers wait: a message takes a while, and a step may be faster."""


class MLflowNames:
    """Unique names that MLflow accepts: letters, digits and `_-. :/`, at most 250 characters."""

    LENGTH = 250

    def __init__(self) -> None:
        self._spelled: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the spelling of a name, the same in every call."""
        if name not in self._spelled:
            spelled = re.sub(r"[^\w\-. :/]", "_", name)
            # MLflow treats names as paths, which have to be normalised.
            if posixpath.normpath(spelled) != spelled or spelled.startswith((".", "/")):
                spelled = spelled.replace("/", "_").lstrip(".") or "_"
            taken = spelled in self._spelled.values()
            if taken or len(spelled) > self.LENGTH:
                digest = f"-{zlib.crc32(name.encode()):08x}"
                spelled = spelled[: self.LENGTH - len(digest)] + digest
            self._spelled[name] = spelled
        return self._spelled[name]


class MLflow(Tracker):
    """A tracker for a run on an MLflow server, in a database or in a folder."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.client: Any = None
        self.run = ""
        self._waiting: list[Any] = []
        self._logged = 0.0
        self._names = MLflowNames()
        self._known: dict[str, int] | None = None
        """Last step of each metric of a resumed run; None for a new run."""

    def begin(self, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # A client of its own leaves the user's global tracking settings unchanged.
        self.client = MlflowClient(tracking_uri=self.where)
        name = str(config["task"]["title"])
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name)
        found = self.client.search_runs([experiment], f"tags.`dure.run` = '{config['run']}'")
        if found:
            self.run = found[0].info.run_id
            self._known = {}
            self.client.update_run(self.run, status="RUNNING")
            return
        made = self.client.create_run(
            experiment, tags={"dure.run": config["run"]}, run_name=str(config["label"])
        )
        self.run = made.info.run_id
        names = MLflowNames()
        parameters = [
            Param(names.of(name), value[:500]) for name, value in settings(config).items()
        ]
        for first in range(0, len(parameters), PARAMETERS):
            self.client.log_batch(self.run, params=parameters[first : first + PARAMETERS])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [
            Metric(spelled, value, now, step)
            for spelled, value in ((self._names.of(name), value) for name, value in numbers.items())
            if step > self._last(spelled)
        ]
        if len(self._waiting) >= LOGGED or time.monotonic() - self._logged > LOG_SECONDS:
            self._flush()

    def _last(self, metric: str) -> int:
        """Return the last step of a metric before the run was resumed; -1 without any."""
        if self._known is None:
            return -1
        if metric not in self._known:
            history = self.client.get_metric_history(self.run, metric)
            self._known[metric] = max((one.step for one in history), default=-1)
        return self._known[metric]

    def _flush(self) -> None:
        self._logged = time.monotonic()
        while self._waiting:
            self.client.log_batch(self.run, metrics=self._waiting[:LOGGED])
            del self._waiting[:LOGGED]

    def close(self, how: str, run: Run | None) -> None:
        if not self.run:
            return
        self._flush()
        for file in _files(run):
            self.client.log_artifact(self.run, str(file))
        # set_terminated prints a link, and standard output is for the command line's JSON.
        with redirect_stdout(sys.stderr):
            self.client.set_terminated(self.run, "FINISHED" if how == "done" else "FAILED")


class WandB(Tracker):
    """A tracker for a run of Weights & Biases."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.run: Any = None

    def begin(self, config: Mapping[str, Any]) -> None:
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
"""By name: the module that a tracker needs, and its class."""


def tracker(text: str) -> Tracker:
    """Return the tracker for a text such as mlflow:http://localhost:5000.

    Raises ValueError if the name is unknown, the place is missing, or the library is not installed.
    """
    if not isinstance(text, str):
        raise ValueError(f"track is {text!r}: give a str such as 'tensorboard:runs/board'")
    name, _, where = text.partition(":")
    if name not in _TRACKERS:
        raise ValueError(
            f"track is {text!r}, but has to be tensorboard:FOLDER, mlflow:URI or "
            f"wandb:PROJECT{suggestion(name, _TRACKERS)}"
        )
    if not where:
        what = {"tensorboard": "FOLDER", "mlflow": "URI", "wandb": "PROJECT"}[name]
        raise ValueError(f"track is {text!r}, which lacks the destination: write {name}:{what}")
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
    """Return config.json as a flat dict with names such as strategy.batch_size."""
    return dict(_flat(config, ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, Mapping):
        yield name, str(value)
        return
    for key, one in value.items():
        yield from _flat(one, f"{name}.{key}" if name else str(key))


def _files(run: Run | None) -> list[Path]:
    """Return the files directly in the run folder, without subfolders such as checkpoints."""
    if run is None or run.folder is None:
        return []
    return sorted(path for path in run.folder.iterdir() if path.is_file())


def _file_name(label: str) -> str:
    """Return a label as a file name of at most 200 bytes."""
    spelled = "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in label)
    return spelled.encode()[:200].decode(errors="ignore")
