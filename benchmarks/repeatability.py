"""Does the same command give the same numbers? Every system on the built-in digits, by the command
line, in processes of its own.

    again    the same command twice
    busy     a third time, while other processes want every core
    resumed  a fourth time, killed with SIGKILL in the middle, and gone on with
    bytes    evaluated after every step or round, and never in between: the bytes sent

Compared are the last bit of the weights, the loss of every step, every metric that both have
measured, and what the run tells of itself (`facts`). A system that says of itself that it does not
repeat (`deterministic: false`, as Hogwild) is run and told apart. Ends with status 1 where a system
differs.

    python benchmarks/repeatability.py --result benchmarks/results/repeatability.json
    python benchmarks/repeatability.py --systems zero fed-avg
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcome import give, takes_result
from pages import fill, table

from dure import catalog
from dure.errors import RunFolderError
from dure.record.run import RunFolder
from dure.run.registry import strategy_class

JSON = dict[str, Any]

LENGTHS = {"step": ("--steps", 120, 10), "round": ("--rounds", 12, 1)}
"""How long a run is and how often it writes a checkpoint: enough that it can be killed between."""

VARIANTS: dict[str, list[str]] = {
    "data-parallel --all-reduce ring": ["data-parallel", "--all-reduce", "ring"],
    "data-parallel --world threads": ["data-parallel", "--world", "threads", "--workers", "2"],
    "zero --stage 2": ["zero", "--stage", "2"],
    "zero --stage 3": ["zero", "--stage", "3"],
    "pipeline --schedule zero-bubble": ["pipeline", "--schedule", "zero-bubble"],
    "parallel --data 2 --zero 1": ["parallel", "--data", "2", "--zero", "1"],
    "parallel --pipeline 2": ["parallel", "--pipeline", "2"],
    "parallel --tensor 2": ["parallel", "--tensor", "2"],
    "fed-avg --aggregate krum:1": ["fed-avg", "--aggregate", "krum:1"],
}
"""What is tried besides every system as it stands in the catalogue."""

NOT_ALONE = {"parallel"}
"""A mesh of one rank is a single worker: it is tried as the variants say."""

DEADLINE = 300.0
"""Seconds that one command may take."""


@dataclass(frozen=True)
class Result:
    """What a run leaves that has to be the same again."""

    weights: bytes
    losses: dict[int, float | None]
    metrics: dict[int, dict[str, float | None]]
    facts: Any
    bytes_sent: int
    repeats: bool

    def differs(self, other: Result) -> str:
        """In what the two differ, as far as both have measured it; empty if in nothing."""
        told = []
        if self.weights != other.weights:
            told.append("weights")
        if self.losses != other.losses:
            told.append("losses")
        both = self.metrics.keys() & other.metrics.keys()
        if any(self.metrics[step] != other.metrics[step] for step in both):
            told.append("metrics")
        if self.facts != other.facts:
            told.append(f"facts ({', '.join(_apart(self.facts, other.facts))})")
        return ", ".join(told)


def _apart(one: list[JSON], other: list[JSON]) -> list[str]:
    """The names of the facts that are not alike."""
    pairs = zip(one, other, strict=True)
    return sorted({name for a, b in pairs for name in {*a, *b} if a.get(name) != b.get(name)})


def cases(wanted: list[str]) -> dict[str, list[str]]:
    """The arguments of every system, by the name that the table gives it."""
    systems = {name: [name] for name in catalog.SYSTEMS if name not in NOT_ALONE}
    every = {**systems, **VARIANTS}
    return {
        name: given for name, given in every.items() if not wanted or {name, given[0]} & set(wanted)
    }


def command(given: list[str], out: Path) -> list[str]:
    limit, length, between = LENGTHS[strategy_class(given[0]).unit]
    return [
        *(sys.executable, "-m", "dure", "train", "digits", *given, "--out", str(out)),
        *(limit, str(length), "--checkpoint-every", str(between)),
    ]


def run(arguments: list[str]) -> None:
    """Runs a command to its end. Raises RuntimeError with what it said if it fails."""
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=DEADLINE, check=False, env=environment()
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr else "failed")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def result_of(folder: Path) -> Result:
    held = RunFolder.open(folder)
    summary = held.read_json("summary.json")
    history = held.history()
    return Result(
        weights=(folder / "model.safetensors").read_bytes(),
        losses={step.step: step.loss for step in history.steps},
        metrics={each.step: dict(each.metrics) for each in history.evaluations},
        facts=summary.get("facts"),
        bytes_sent=summary["bytes_sent"],
        repeats=held.read_json("config.json").get("deterministic", True),
    )


def killed_and_resumed(given: list[str], out: Path) -> None:
    """The same command, killed with all its processes after its first checkpoint, then resumed."""
    process = subprocess.Popen(
        command(given, out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment(),
    )
    until = time.monotonic() + DEADLINE
    try:
        while process.poll() is None and not (list(out.glob("checkpoint/[0-9]*"))):
            if time.monotonic() > until:
                raise RuntimeError(f"no checkpoint within {DEADLINE:.0f} s")
            time.sleep(0.002)
        if process.poll() is not None:
            raise RuntimeError("it had ended before it could be killed")
    finally:
        # The group is that of this command alone: it began a session of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if (out / "summary.json").exists():
        raise RuntimeError("it had ended before it could be killed")
    resume(out)


def resume(out: Path) -> None:
    """Goes on with a folder, which its killed ranks may hold for a moment longer."""
    for attempt in range(10):
        try:
            run([sys.executable, "-m", "dure", "train", "--resume", str(out)])
        except RuntimeError:
            if attempt == 9:
                raise
            time.sleep(1.0)
        else:
            return


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """A process a core that never rests."""
    count = os.cpu_count() or 1
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def tried(given: list[str], folder: Path) -> JSON:
    """The row of one system. What could not be run is told in its place."""
    run(command(given, folder / "first"))
    first = result_of(folder / "first")
    row: JSON = {"repeats": first.repeats, "bytes_sent": first.bytes_sent}
    run(command(given, folder / "again"))
    row["again"] = first.differs(result_of(folder / "again")) or "same"
    with busy():
        run(command(given, folder / "busy"))
    row["busy"] = first.differs(result_of(folder / "busy")) or "same"
    killed_and_resumed(given, folder / "resumed")
    row["resumed"] = first.differs(result_of(folder / "resumed")) or "same"
    run([*command(given, folder / "often"), "--evaluate-every", "1"])
    run([*command(given, folder / "seldom"), "--evaluate-every", "1000000"])
    often = result_of(folder / "often")
    seldom = result_of(folder / "seldom")
    row["bytes"] = "same" if often.bytes_sent == seldom.bytes_sent else "differ"
    row["evaluations"] = often.differs(seldom) or "same"
    return row


COLUMNS = ("again", "busy", "resumed", "evaluations", "bytes")


def failed(row: JSON) -> bool:
    """Whether a system that promises to repeat does not, or could not be run."""
    if "error" in row:
        return True
    promised = COLUMNS if row["repeats"] else ("bytes",)
    return any(row[column] != "same" for column in promised)


def rows_of(results: dict[str, JSON]) -> list[list[str]]:
    return [
        [name, *(row.get(column, row.get("error", "–")) for column in COLUMNS)]
        if row.get("repeats", True)
        else [name, *("not promised" for _ in COLUMNS[:-1]), row["bytes"]]
        for name, row in results.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="*", default=[], help="names; by default all")
    parser.add_argument("--page", type=Path, help="the page of docs/ that gets the table")
    takes_result(parser)
    asked = parser.parse_args()
    results: dict[str, JSON] = {}
    for name, given in cases(asked.systems).items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[name] = tried(given, Path(folder))
            except (RuntimeError, RunFolderError, subprocess.TimeoutExpired) as error:
                results[name] = {"error": str(error)}
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    give(results, asked.result, indent=1)
    text = table(["system", *COLUMNS], rows_of(results))
    print(f"\n{text}", file=sys.stderr)
    if asked.page is not None:
        fill(asked.page, {"repeatability": text})
    return int(any(map(failed, results.values())))


if __name__ == "__main__":
    sys.exit(main())
