"""The parameter server and Downpour SGD, in real processes of which one is killed or stopped.

A run at a time, and in each of them one rank other than 0 is sent a signal at a random moment:

    what       parameter server of 3 servers and 3 workers, staleness 0, 2 or None, of a model with
               a sparse table; or Downpour SGD of 2 replicas of 2 stages and 2 servers
    copies     each server has a copy at another, or none
    who        a server or a worker
    signal     SIGKILL; or SIGSTOP and SIGCONT, a second or two later, when nobody has given it up,
               or after it was given up

Afterwards is asked:

    in time    it has ended, in the seconds of an undisturbed run, those after which the silent are
               given up, and a margin
    outcome    killed, or stopped for long: a server with a copy, and a worker, are left out and
               the run goes on; a server without a copy ends the run, with an error that names it
               and its keys, and, with staleness 0, `resume` goes on to the bits of the undisturbed
               run. Stopped for short: nobody is left out
    nothing    staleness 0: the weights are those of the undisturbed run, to the bit unless a
    lost       worker was lost, whose parts others compute in other sums. Otherwise: what workers
               have made and every server has acknowledged is at most what each server has applied,
               of each worker; and as many examples have counted as in the undisturbed run
    leaks      no process is left, no file in /dev/shm or of temporary files, no descriptor here

    python benchmarks/parameter_server_faults.py --runs 20 --seed 1 > faults.json

Progress goes to standard error, the result as JSON to standard output; it exits with 1 where a run
was not as it should be. Then --seed and --only repeat that one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from outcome import give, takes_result
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.errors import DureError, PeerLostError
from dure.parameter_server.processes.learner import PATIENCE
from dure.record.run import RunFolder
from dure.worlds.processes.fork_server import server as fork_server

JSON = dict[str, Any]
SERVERS, WORKERS = 3, 3
WORDS, DIM, LENGTH, CLASSES = 300, 4, 6, 3
DEADLINE = 20.0
"""Seconds that the ranks wait for one that lives and does nothing."""
MARGIN = 15.0
"""Seconds: the machine is busy with others."""
SHORT = (0.3, 3.0)
"""Seconds of a stop after which nobody was given up."""


# What is trained


class Words(nn.Module):
    """The mean of a bag of words from a sparse table, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        faulthandler.register(signal.SIGUSR1)  # so that a rank that hangs can be asked where
        self.words = nn.EmbeddingBag(WORDS, DIM, sparse=True)
        self.body = nn.Sequential(nn.Linear(DIM, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.body(self.words(ids))
        return result


def layers() -> nn.Module:
    """Four layers, which can be divided."""
    faulthandler.register(signal.SIGUSR1)
    body = [nn.Linear(LENGTH, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, CLASSES)]
    return nn.Sequential(*body).double()


def examples(count: int, seed: int, words: bool) -> dure.Examples:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(count, LENGTH, generator=generator, dtype=torch.float64)
    ids = (draws.square() * WORDS).long()
    return dure.Examples(ids if words else draws, ids.sum(dim=1) % CLASSES)


def task_of(words: bool) -> dure.Task:
    return dure.Task(
        model=Words if words else layers,
        loss=F.cross_entropy,
        train=examples(480, 0, words),
        test=examples(60, 1, words),
        optimizer=partial(torch.optim.Adagrad, lr=0.02),
        name="words" if words else "layers",
    )


# A case


@dataclass(frozen=True)
class Case:
    """What is trained, and what happens to it. system: "downpour", or the staleness."""

    system: str
    copies: int
    who: str
    how: str

    def __str__(self) -> str:
        copies = "with copies" if self.copies else "without copies"
        return f"{self.system}, {copies}: a {self.who} {self.how}"

    @property
    def strategy(self) -> dure.Strategy:
        if self.system == "downpour":
            return dure.Downpour(
                replicas=2, partitions=2, servers=2, batch_size=8, period=10, copies=self.copies
            )
        staleness = {"staleness 0": 0, "staleness 2": 2, "staleness None": None}[self.system]
        return dure.ParameterServer(
            SERVERS, WORKERS, batch_size=24, staleness=staleness, period=10, replicas=self.copies
        )

    @property
    def servers(self) -> int:
        return 2 if self.system == "downpour" else SERVERS

    @property
    def workers(self) -> int:
        return 4 if self.system == "downpour" else WORKERS

    @property
    def given_up(self) -> bool:
        """Whether the others go on without it."""
        return self.how != "stopped for short"

    @property
    def fails(self) -> bool:
        """Whether the run ends with an error."""
        return self.given_up and self.who == "server" and not self.copies


SYSTEMS = ("staleness 0", "staleness 2", "staleness None", "downpour")
HOW = ("killed", "killed", "stopped for short", "stopped for long")
"""Half of them die."""


def cases(count: int, draws: random.Random) -> list[Case]:
    """All that there are, in some order, again and again."""
    found: list[Case] = []
    while len(found) < count:
        every = [Case(*one) for one in product(SYSTEMS, (1, 0), ("server", "worker"), HOW)]
        draws.shuffle(every)
        found += every
    return found[:count]


@dataclass(frozen=True)
class Moment:
    """When it happens, and to whom: `wait` of a round after the `after`-th; 0 is the start."""

    rank: int
    after: int
    wait: float
    seconds: float
    """Until it may go on, where it is stopped."""


def moment(case: Case, rounds: int, draws: random.Random) -> Moment:
    first, count = (1, case.servers) if case.who == "server" else (1 + case.servers, case.workers)
    after = draws.randrange(rounds)
    short = draws.uniform(*SHORT)
    long = PATIENCE + 1 + draws.uniform(0, 4)
    seconds = long if case.how == "stopped for long" else short
    return Moment(first + draws.randrange(count), after, draws.random(), seconds)


# Processes


def ranks_now() -> list[int]:
    """The processes of the ranks, in order: they are the fork server's children."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            fields = stat.rpartition(")")[2].split()
            if int(fields[1]) == fork_server.pid and fields[0] != "Z":
                found.append((int(fields[19]), int(folder.name)))
    return [pid for _, pid in sorted(found)]


class Fault(threading.Thread):
    """Does to a run what is to happen, and ends one that takes longer than `limit` seconds."""

    def __init__(self, case: Case, moment: Moment, start: float, limit: float) -> None:
        super().__init__(daemon=True)
        self.case = case
        self.moment = moment
        self.start_seconds = start
        """That it takes to begin, about."""
        self.limit = limit
        self.round = -1
        self.at = 0.0
        """When it happened."""
        self.after = -1
        """After which round that was."""
        self.longest = 0.0
        """Seconds between two rounds, the longest since then."""
        self.hung = False
        self._first = self._last = 0.0
        self._reached = threading.Event()
        self._over = threading.Event()

    def heard(self, event: Mapping[str, Any]) -> None:
        """A round is done."""
        now = time.monotonic()
        if self.at:
            self.longest = max(self.longest, now - max(self._last, self.at))
        self._first = self._first or now
        self._last = now
        self.round = event["step"]
        if self.round >= self.moment.after:
            self._reached.set()

    def run(self) -> None:
        size = 1 + self.case.servers + self.case.workers
        ends = time.monotonic() + self.limit
        pids: list[int] = []
        while len(pids) < size and not self._over.wait(0.01):
            pids = ranks_now()
        if self.moment.after:
            while not self._reached.wait(0.05) and not self._over.is_set():
                if time.monotonic() > ends:
                    break
        if not self._over.wait(self._pause()) and len(pids) == size:
            self._strike(pids[self.moment.rank])
        if not self._over.wait(max(0.0, ends - time.monotonic())):
            self.hung = True
            for pid in pids:
                _send(pid, signal.SIGCONT)
                _send(pid, signal.SIGUSR1)
            self._over.wait(2)
            for pid in pids:
                _send(pid, signal.SIGKILL)

    def _pause(self) -> float:
        if not self.moment.after:
            return self.moment.wait * self.start_seconds
        return self.moment.wait * (self._last - self._first) / max(1, self.round)

    def _strike(self, pid: int) -> None:
        self.at = time.monotonic()
        self.after = self.round
        if self.case.how == "killed":
            _send(pid, signal.SIGKILL)
            return
        _send(pid, signal.SIGSTOP)
        self._over.wait(self.moment.seconds)
        _send(pid, signal.SIGCONT)

    def over(self) -> None:
        self._over.set()
        self.join()


def _send(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)


# What is left of a run


def things() -> dict[str, set[str]]:
    """What a run could leave behind on this machine."""
    places = {"/dev/shm": "/dev/shm", "temporary files": tempfile.gettempdir()}
    return {name: set(os.listdir(folder)) for name, folder in places.items()}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@dataclass
class Before:
    """What there was before a run."""

    things: dict[str, set[str]]
    descriptors: int

    @classmethod
    def now(cls) -> Before:
        return cls(things(), descriptors())

    def left(self) -> list[str]:
        """What there is more now."""
        found = [f"process {pid}" for pid in ranks_now()]
        for where, what in things().items():
            found += [f"{one} in {where}" for one in sorted(what - self.things[where])]
        if descriptors() > self.descriptors:
            found.append(f"{descriptors() - self.descriptors} descriptors")
        return found


# A run, and what is to be asked of it


@dataclass
class Undisturbed:
    """A run to compare with. start: seconds until its first round was done."""

    run: dure.Run
    seconds: float
    start: float


class Runs:
    """All runs, in folders of `data`."""

    def __init__(self, rounds: int, data: Path) -> None:
        self.rounds = rounds
        self.data = data
        self.tasks = {words: task_of(words) for words in (True, False)}
        self._undisturbed: dict[dure.Strategy, Undisturbed] = {}

    def train(self, case: Case, heard: Any, folder: Path | None = None) -> dure.Run:
        return dure.train(
            self.tasks[case.system != "downpour"],
            case.strategy,
            dure.Processes(1 + case.servers + case.workers, deadline=DEADLINE),
            dure.Stop(rounds=self.rounds),
            out=folder,
            # Reading and saving are among what is disturbed.
            evaluate_every=7,
            checkpoint_every=11,
            on_progress=heard,
        )

    def undisturbed(self, case: Case) -> Undisturbed:
        if case.strategy not in self._undisturbed:
            began = time.monotonic()
            at: list[float] = []
            run = self.train(case, lambda event: at.append(time.monotonic()))
            took = time.monotonic() - began
            self._undisturbed[case.strategy] = Undisturbed(run, took, at[0] - began)
        return self._undisturbed[case.strategy]

    def disturbed(self, number: int, case: Case, moment: Moment) -> JSON:
        """What became of a run, and what of that is wrong."""
        whole = self.undisturbed(case)
        folder = self.data / f"run-{number}"
        before = Before.now()
        limit = 2 * whole.seconds + PATIENCE + DEADLINE + MARGIN
        fault = Fault(case, moment, whole.start, limit)
        began = time.monotonic()
        run: dure.Run | None = None
        error: BaseException | None = None
        fault.start()
        try:
            run = self.train(case, fault.heard, folder)
        except DureError as raised:
            error = raised
        finally:
            fault.over()
        took = time.monotonic() - began
        wrong = before.left()
        if fault.hung:
            wrong.append(f"it had not ended after {limit:.0f} s, {self.rounds} rounds in all")
        elif run is not None:
            wrong += self._wrong_with(run, case, moment, whole.run, folder, fault.after)
        else:
            wrong += self._wrong_with_error(error, case, moment, whole.run, folder)
        return {
            "case": str(case),
            "rank": moment.rank,
            "happened": bool(fault.at),
            "after round": fault.after,
            "stopped for, s": moment.seconds if case.how != "killed" else None,
            "took, s": round(took, 2),
            "undisturbed, s": round(whole.seconds, 2),
            "longest round since, s": round(fault.longest, 2),
            "lost": _lost(run) if run is not None else None,
            "error": str(error) if error is not None else None,
            "wrong": wrong,
        }

    def _wrong_with(
        self,
        run: dure.Run,
        case: Case,
        moment: Moment,
        whole: dure.Run,
        folder: Path,
        after: int,
    ) -> list[str]:
        """after: which round it happened; -1 for the start."""
        wrong = []
        # What happens in the last rounds may come too late for anybody to miss it.
        near_end = after >= self.rounds - 2
        if case.fails and not near_end:
            wrong.append("it went on without weights of which nobody had a copy")
        if run.summary["ended"] != "rounds":
            wrong.append(f"it ended by {run.summary['ended']}")
        lost = _lost(run)
        expected = self._expected(case, moment)
        # Nobody gives anybody up before the beginning.
        if lost != expected and not ((near_end or after < 0) and not lost):
            wrong.append(f"lost were {lost}, and not {expected}")
        if case.system != "downpour" and run.summary["samples"] != whole.summary["samples"]:
            wrong.append(f"{run.summary['samples']} examples, not {whole.summary['samples']}")
        if case.system == "staleness 0":
            most = 1e-9 if lost and case.who == "worker" else 0.0
            if (difference := apart(run, whole)) > most:
                wrong.append(f"weights differ by {difference}")
        return wrong + self._wrong_counts(run, case, folder)

    def _expected(self, case: Case, moment: Moment) -> list[str]:
        """Who is lost, in order of names."""
        if not case.given_up:
            return []
        if case.who == "server":
            return [f"server {moment.rank - 1}"]
        worker = moment.rank - 1 - case.servers
        if case.system == "downpour":
            return [f"worker {one}" for one in range(4) if one // 2 == worker // 2]
        return [f"worker {worker}"]

    def _wrong_counts(self, run: dure.Run, case: Case, folder: Path) -> list[str]:
        """What servers have applied, next to what was acknowledged."""
        checkpoint = RunFolder(folder).read_checkpoint()
        if checkpoint is None:
            return ["there is no checkpoint"]
        shards = checkpoint.tree["learner"]["shards"]
        wrong = []
        told = run.summary["numbers"]["pushes"]
        lost = _lost(run)
        for number, shard in enumerate(shards):
            clocks = [times for _, _, times in shard["clock"]]
            least = {who: min(one.get(who, 0) for one in clocks) for one in clocks for who in one}
            applied = sum(least.values())
            if case.system == "staleness 0" and case.who != "worker":
                # A step of each is one step of all.
                told_here, applied = self.rounds * 10, shard["version"]
            elif case.system == "downpour":
                told_here = told / 2 if not lost else 0  # a stage's servers have its own alone
            else:
                told_here = told
            if applied < told_here:
                wrong.append(f"shard {number} has {applied} of {told_here} pushes")
            if case.system in ("staleness 0", "staleness 2"):
                for who in range(case.workers):
                    if f"worker {who}" not in lost and least.get(who) != self.rounds * 10:
                        wrong.append(f"shard {number} has {least.get(who)} of worker {who}")
        return wrong

    def _wrong_with_error(
        self,
        error: BaseException | None,
        case: Case,
        moment: Moment,
        whole: dure.Run,
        folder: Path,
    ) -> list[str]:
        if not isinstance(error, PeerLostError):
            return [f"{type(error).__name__}: {error}"]
        if moment.after == 0 and moment.rank in error.ranks:
            return []  # nobody goes on from before the beginning
        if not case.fails:
            return [f"it ended, though others could go on: {error}"]
        wrong = []
        if error.ranks != (moment.rank,) or "keys" not in str(error):
            wrong.append(f"it does not name rank {moment.rank} and its keys: {error}")
        if case.system == "staleness 0":
            again = dure.resume(folder, task=self.tasks[True])
            if (difference := apart(again, whole)) > 0:
                wrong.append(f"resumed, weights differ by {difference}")
        return wrong


def _lost(run: dure.Run) -> list[str]:
    return sorted(name for name, _ in run.summary["facts"][0]["parameter_server"]["lost"])


def apart(one: dure.Run, other: dure.Run) -> float:
    """The largest difference of two runs' weights."""
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20, help="of each run, of ten steps")
    parser.add_argument("--data", type=Path, help="a folder for the runs; a temporary one")
    parser.add_argument("--only", type=int, nargs="+", help="these runs, by number")
    takes_result(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draws = random.Random(asked.seed)
    chosen = cases(asked.runs, draws)
    moments = [moment(case, asked.rounds, draws) for case in chosen]
    data = asked.data or Path(tempfile.mkdtemp(prefix="faults-"))
    # A folder for temporary files too, in which nobody else writes.
    tempfile.tempdir = str(data / "temporary")
    Path(tempfile.tempdir).mkdir(parents=True, exist_ok=True)
    runs = Runs(asked.rounds, data)
    found: list[JSON] = []
    try:
        for number, (case, one) in enumerate(zip(chosen, moments, strict=True)):
            if asked.only is not None and number not in asked.only:
                continue
            result = {"number": number, **runs.disturbed(number, case, one)}
            found.append(result)
            after = result["after round"]
            show(
                f"{number:2} {result['case']:55} rank {one.rank} after round {after:2}: "
                f"{result['took, s']:5.1f} s (undisturbed {result['undisturbed, s']:.1f}), "
                f"{'; '.join(result['wrong']) or 'as it should be'}"
            )
            if not result["wrong"]:
                shutil.rmtree(data / f"run-{number}", ignore_errors=True)
    finally:
        if asked.data is None:
            shutil.rmtree(data, ignore_errors=True)
    wrong = sum(bool(one["wrong"]) for one in found)
    show(f"{len(found)} runs, {wrong} of them not as they should be")
    result = {
        "benchmark": "parameter_server_faults",
        "seed": asked.seed,
        "cores": os.cpu_count(),
        "runs": found,
        "wrong": wrong,
    }
    give(result, asked.result, indent=1)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
