"""One world of ranks in which every contender is checked and then timed, turn by turn.

All ranks walk through the same plan. For each size every contender makes its buffers and its sum is
checked; then come `repeats` rounds in which each contender has one batch, so that what disturbs the
machine for a while disturbs all alike. A batch is as many calls as last `batch` seconds; it begins
after a barrier, where calls are short after one more that is not timed, and its time is that of the
slowest rank. While Open MPI has its turn our ranks wait for rank 0 in a receive of gloo, which
sleeps; while ours have theirs, Open MPI's are blocked in a read.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dure.bench.open_mpi import OpenMpi, absent
from dure.bench.plan import CONTENDERS, MIB, Plan
from dure.collectives import Group, all_reduce
from dure.collectives.shared_memory import Options, empty_shared
from dure.contracts.strategy import Place

PERIOD = 1024
"""Contents repeat after so many elements; open_mpi_rank.py has the same."""

SHORT = 0.005
"""Seconds: before a batch of shorter calls comes one that is not timed."""

MOST_CALLS = 20_000
OPEN_MPI = "open-mpi"

JSON = dict[str, Any]


class Unavailable(Exception):  # noqa: N818 - it is not an error that a peer is not installed
    """This contender cannot take part; the reason is its text."""


def expected(n: int, ranks: int) -> Tensor:
    """One period of the right sum of tensors filled by `fill`.

    Whole numbers, so that rounding has no part in it.
    """
    return (ranks * torch.arange(float(PERIOD)) + ranks * (ranks - 1) // 2)[:n]


def fill(flat: Tensor, rank: int) -> None:
    """Contents of a period of whole numbers, other ones on every rank."""
    pattern = torch.arange(float(PERIOD)) + rank
    whole = flat.numel() // PERIOD * PERIOD
    flat[:whole].view(-1, PERIOD).copy_(pattern.expand(whole // PERIOD, PERIOD))
    flat[whole:].copy_(pattern[: flat.numel() - whole])


def holds(flat: Tensor, period: Tensor) -> bool:
    """Whether `flat` consists of repetitions of `period`."""
    whole = flat.numel() // PERIOD * PERIOD
    rest = flat.numel() - whole
    some = 4096 * PERIOD  # at a time: a comparison of everything would make a tensor as large
    for start in range(0, whole, some):
        if not bool((flat[start : min(start + some, whole)].view(-1, PERIOD) == period).all()):
            return False
    return torch.equal(flat[whole:], period[:rest])


def cpu_seconds() -> float:
    """CPU time of this process so far, the kernel's for it included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass
class Turn:
    """One contender at one size: how to time it, and what was measured.

    time: of a number of calls, after one more if so asked: seconds of the slowest rank, and CPU
        seconds of all.
    """

    name: str
    time: Callable[[int, bool], tuple[float, float]]
    calls: int = 1
    pilot: float = 0.0
    samples: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class Contest:
    """The ranks' side of a benchmark with one number of ranks."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self.plan = plan
        self.place = place
        # Ranks share the cores: more threads of each would only be in one another's way.
        torch.set_num_threads(1)
        self.gloo = dist.new_group(backend="gloo")
        self.group = Group(self.gloo)
        self.rank = self.group.rank
        self.size = self.group.size
        self.absent: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.mpi: OpenMpi | None = None
        self.interrupted = False
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._ordinary: Tensor | None = None
        self._pooled: Tensor | None = None

    def run(self) -> JSON:
        """What was measured: cells, contenders that are absent and why, versions of peers."""
        cells: list[JSON] = []
        with contextlib.ExitStack() as stack:
            self._start_open_mpi(stack)
            last: dict[str, JSON] = {}
            for position, nbytes in enumerate(self.plan.sizes):
                measured = self._size(nbytes, position, last)
                last = {cell["contender"]: cell for cell in measured}
                cells += measured
                if self.interrupted:
                    break
        return {
            "cells": cells,
            "absent": self.absent,
            "versions": self.versions,
            "interrupted": self.interrupted,
        }

    # Who takes part.

    def _start_open_mpi(self, stack: contextlib.ExitStack) -> None:
        if OPEN_MPI not in self.plan.contenders:
            return
        why = absent()
        if self.rank == 0 and why is None:
            try:
                self.mpi = stack.enter_context(OpenMpi(self.size))
                self.versions[OPEN_MPI] = self.mpi.version
            except RuntimeError as error:
                why = str(error)
        # Only rank 0 starts the job, and all have to know whether it runs.
        told = self.group.broadcast_bytes((why or "").encode()).decode()
        if told:
            self.absent[OPEN_MPI] = told

    def _process_group(self, core: Literal["c", "torch"]) -> dist.ProcessGroup:
        """A group of the dure backend with this core; made once, by all ranks."""
        # To make a group is a call of all ranks: they come here in the same order.
        if core not in self._groups:
            try:
                self._groups[core] = dist.new_group(backend="dure", pg_options=Options(core=core))
            except (RuntimeError, ValueError, OSError) as error:
                raise Unavailable(str(error)) from error
        return self._groups[core]

    # One tensor of each kind serves all contenders, since only one of them works at a time. Zeros
    # are written, so that its pages are there when it is timed.

    def _ordinary_tensor(self, n: int) -> Tensor:
        if self._ordinary is None:
            self._ordinary = torch.empty(n, dtype=torch.float32).zero_()
        return self._ordinary

    def _pooled_tensor(self, n: int) -> Tensor:
        if self._pooled is None:
            self._pooled = empty_shared(n, dtype=torch.float32).zero_()
        return self._pooled

    def _call(self, name: str, n: int) -> tuple[Callable[[], Any], Tensor]:
        """One call of a contender, and the tensor that it reduces."""
        contender = CONTENDERS[name]
        if contender.kind == "backend":
            group = self._process_group(contender.core)
            tensor = self._pooled_tensor(n) if contender.pooled else self._ordinary_tensor(n)
            if contender.direct:
                reduce: Callable[[Tensor], None] = group.all_reduce  # type: ignore[attr-defined]
                return partial(reduce, tensor), tensor
            return partial(dist.all_reduce, tensor, group=group), tensor
        tensor = self._ordinary_tensor(n)
        if contender.kind == "floor":
            # Times 1: the bytes are read and written, and nothing grows from call to call.
            return partial(tensor.mul_, 1.0), tensor
        if contender.kind == "peer":
            return partial(dist.all_reduce, tensor, group=self.gloo), tensor
        algorithm: Any = contender.algorithm
        return partial(all_reduce, tensor, self.group, algorithm), tensor

    # One size.

    def _size(self, nbytes: int, position: int, last: dict[str, JSON]) -> list[JSON]:
        """The cells of one size. last: those of the size before, by contender."""
        # The tensors of the size before are freed first.
        self._ordinary = None
        self._pooled = None
        turns: list[Turn] = []
        skipped: list[JSON] = []
        for name in self.plan.contenders:
            self._progress(nbytes, position, 0.0, f"{CONTENDERS[name].label}, check")
            if name in self.absent:
                continue
            before = last.get(name)
            if before is not None and self._too_long(name, before, nbytes):
                skipped.append(self._skipped(name, before, nbytes))
                continue
            turn = self._prepared(name, nbytes // 4)
            if turn is not None:
                turns.append(turn)
        for repeat in range(self.plan.repeats):
            share = (repeat + 1) / (self.plan.repeats + 1)
            self._progress(nbytes, position, share, f"round {repeat + 1} of {self.plan.repeats}")
            self._round(turns, repeat)
            if self._asked_to_end():
                break
        return [self._cell(turn, nbytes) for turn in turns] + skipped

    def _round(self, turns: list[Turn], repeat: int) -> None:
        """A batch of every contender; another one begins each round."""
        for offset in range(len(turns)):
            turn = turns[(offset + repeat) % len(turns)]
            seconds, cpu = turn.time(turn.calls, turn.pilot < SHORT)
            turn.samples.append(seconds / turn.calls)
            turn.cpu.append(cpu / turn.calls)
            # What disturbed the pilot must not make all batches short.
            turn.calls = self._calls(min(turn.samples))

    def _asked_to_end(self) -> bool:
        """Whether Ctrl-C was pressed: only rank 0 is told, and tells all."""
        rows = self.group.all_gather_values([float(self.place.interrupted())])
        self.interrupted = any(row[0] for row in rows)
        return self.interrupted

    def _cell(self, turn: Turn, nbytes: int) -> JSON:
        return {
            "contender": turn.name,
            "ranks": self.size,
            "bytes": nbytes,
            "calls": turn.calls,
            "seconds": median(turn.samples),
            "samples": turn.samples,
            "cpu_seconds": median(turn.cpu),
        }

    def _skipped(self, name: str, before: JSON, nbytes: int) -> JSON:
        return {
            "contender": name,
            "ranks": self.size,
            "bytes": nbytes,
            "skipped": True,
            "guess": before.get("guess", before.get("seconds", 0.0)),
        }

    def _too_long(self, name: str, before: JSON, nbytes: int) -> bool:
        """Whether an algorithm over gloo would take too long, judged by the size before."""
        if CONTENDERS[name].kind != "algorithm":
            return False
        growth = nbytes / max(before["bytes"], MIB)  # below, time is latency
        return "skipped" in before or before["seconds"] * max(growth, 1.0) > self.plan.longest

    def _prepared(self, name: str, n: int) -> Turn | None:
        """A contender that has been checked, with the calls that fill a batch; None if absent."""
        turn = self._checked_mpi(name, n) if name == OPEN_MPI else self._checked(name, n)
        if turn is None:
            return None
        calls = 1
        while True:
            # More calls until they last long enough to tell; the first few are slow and short.
            turn.pilot = turn.time(calls, False)[0] / calls
            if turn.pilot * calls >= self.plan.batch / 4 or calls == MOST_CALLS:
                break
            # At most 20 times as many: a first call tells little of how long the others take.
            calls = self._calls(max(turn.pilot, self.plan.batch / 20 / calls))
        turn.calls = self._calls(turn.pilot)
        return turn

    def _checked_mpi(self, name: str, n: int) -> Turn:
        self._ask_mpi("prepare", elements=n)
        right = all(answer["right"] for answer in self._ask_mpi("check"))
        self._must_be_right(name, right)
        return Turn(name, self._time_mpi)

    def _checked(self, name: str, n: int) -> Turn | None:
        """One of ours; None where it cannot take part on some rank."""
        mine = ""
        try:
            call, tensor = self._call(name, n)
        except Unavailable as error:
            mine = str(error)
        # One rank without it is enough: it would be missing in every call.
        complaint = next(filter(None, self._all(mine)), "")
        if complaint:
            self.absent[name] = complaint
            return None
        if CONTENDERS[name].kind != "floor":
            # Filled anew for each: the tensor may hold the right sum of the contender before.
            fill(tensor, self.rank)
            call()
            self._must_be_right(name, holds(tensor, expected(PERIOD, self.size)))
            # Zeros stay zeros in all the timed calls; other sums would grow until they overflow.
            tensor.zero_()
        return Turn(name, partial(self._time, call))

    def _must_be_right(self, name: str, right: bool) -> None:
        """A wrong sum on any rank ends the benchmark on all of them."""
        rows = self.group.all_gather_values([float(right)])
        if not all(row[0] for row in rows):
            raise RuntimeError(
                f"{CONTENDERS[name].label} does not add up on {self.size} ranks: the sum is wrong"
            )

    def _calls(self, seconds: float) -> int:
        """How many calls of so many seconds fill a batch."""
        return min(MOST_CALLS, max(1, math.ceil(self.plan.batch / seconds)))

    def _all(self, text: str) -> list[str]:
        """Every rank's text, cut to 400 bytes: ranks exchange numbers, all of them as many."""
        codes = list(text.encode()[:400].ljust(400, b"\0"))
        rows = self.group.all_gather_values([float(code) for code in codes])
        texts = [bytes(map(int, row)).rstrip(b"\0") for row in rows]
        return [text.decode(errors="replace") for text in texts]

    # One batch.

    def _time(self, call: Callable[[], Any], calls: int, warm: bool) -> tuple[float, float]:
        """Seconds of the slowest rank, and the CPU seconds of all, for `calls` calls."""
        if warm:
            call()
        dist.barrier(group=self.gloo)
        if calls > 1:
            # gloo lets the ranks go a millisecond apart; the contender's own call brings them
            # together
            call()
        cpu = cpu_seconds()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = time.perf_counter() - begin
        spent = cpu_seconds() - cpu
        rows = self.group.all_gather_values([seconds, spent])
        return max(row[0] for row in rows), sum(row[1] for row in rows)

    def _time_mpi(self, calls: int, warm: bool) -> tuple[float, float]:
        answers = self._ask_mpi("time", calls=calls, warm=warm)
        seconds = max((answer["seconds"] for answer in answers), default=0.0)
        spent = sum(answer["cpu"] for answer in answers)
        # Ranks without the job wait here, in a receive of gloo, for what rank 0 was answered.
        seconds, spent = self.group.all_gather_values([seconds, spent])[0]
        return seconds, spent

    def _ask_mpi(self, do: str, **arguments: Any) -> list[JSON]:
        """The answers of Open MPI's ranks, on rank 0; nothing elsewhere."""
        return self.mpi.ask(do, **arguments) if self.mpi is not None else []

    def _progress(self, nbytes: int, position: int, share: float, what: str) -> None:
        """Tells how much of this size is done."""
        if self.rank == 0:
            event = {"unit": "size", "step": position, "ranks": self.size, "bytes": nbytes}
            self.place.report({**event, "share": share, "what": what})
