"""A world of ranks in which every contender is checked and then timed, in turn.

All ranks follow the same plan. For each size every contender makes its buffers and its sum is
checked; then come `repeats` rounds with a batch for each contender, so that a temporary disturbance
of the machine affects all alike. A batch has as many calls as last `batch` seconds; it begins after
a barrier, for short calls after an untimed call too, and its time is that of the slowest rank.
During Open MPI's turn our ranks wait for rank 0 in a receive of gloo, which sleeps; during our
turns, Open MPI's ranks block in a read.
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
from dure.bench.plan import CONTENDERS, MIB, BenchPlan
from dure.collectives import Group, all_reduce
from dure.collectives.shared_memory import Options, empty_shared
from dure.contracts.world import RankContext

PERIOD = 1024
"""Period of the contents in elements; open_mpi_rank.py has the same value."""

SHORT = 0.005
"""Seconds: an untimed call precedes a batch of calls shorter than this."""

MOST_CALLS = 20_000
OPEN_MPI = "open-mpi"

JSON = dict[str, Any]


class ContenderUnavailable(Exception):  # noqa: N818 - it is not an error that a peer is not installed
    """Raised if a contender cannot take part; its text is the reason."""


def expected(n: int, ranks: int) -> Tensor:
    """Return the first `n` elements of a period of the correct sum of tensors filled by `fill`.

    Whole numbers, so that the sum is exact in float32.
    """
    return (ranks * torch.arange(float(PERIOD)) + ranks * (ranks - 1) // 2)[:n]


def fill(flat: Tensor, rank: int) -> None:
    """Fill a tensor with a period of whole numbers that depends on the rank."""
    pattern = torch.arange(float(PERIOD)) + rank
    whole = flat.numel() // PERIOD * PERIOD
    flat[:whole].view(-1, PERIOD).copy_(pattern.expand(whole // PERIOD, PERIOD))
    flat[whole:].copy_(pattern[: flat.numel() - whole])


def holds(flat: Tensor, period: Tensor) -> bool:
    """Return whether `flat` consists of repetitions of `period`."""
    whole = flat.numel() // PERIOD * PERIOD
    rest = flat.numel() - whole
    some = 4096 * PERIOD  # at a time: a comparison of everything would make a tensor as large
    for start in range(0, whole, some):
        if not bool((flat[start : min(start + some, whole)].view(-1, PERIOD) == period).all()):
            return False
    return torch.equal(flat[whole:], period[:rest])


def cpu_seconds() -> float:
    """Return the CPU seconds of this process so far, including kernel time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass
class TimedContender:
    """A contender at one size: its timing function and measurements.

    time: function of (number of calls, whether an untimed call precedes them) that returns the
    seconds of the slowest rank, and the CPU seconds of all ranks. calls: calls of a batch. pilot:
    seconds a call before the rounds. samples, cpu: seconds and CPU seconds a call, of each batch.
    """

    name: str
    time: Callable[[int, bool], tuple[float, float]]
    calls: int = 1
    pilot: float = 0.0
    samples: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class Contest:
    """The ranks' side of a benchmark with a fixed number of ranks."""

    def __init__(self, plan: BenchPlan, context: RankContext) -> None:
        self.plan = plan
        self.place = context
        # Ranks share the cores: more threads would compete.
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
        """Return cells, absent contenders with reasons, and versions of peers."""
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

    # Contenders.

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
        # Only rank 0 starts the job, and all ranks have to know whether it runs.
        told = self.group.broadcast_bytes((why or "").encode()).decode()
        if told:
            self.absent[OPEN_MPI] = told

    def _process_group(self, core: Literal["c", "torch"]) -> dist.ProcessGroup:
        """Return the group of the dure backend with this core. Collective when first called."""
        # Making a group is collective: all ranks get here in the same order.
        if core not in self._groups:
            try:
                self._groups[core] = dist.new_group(backend="dure", pg_options=Options(core=core))
            except (RuntimeError, ValueError, OSError) as error:
                raise ContenderUnavailable(str(error)) from error
        return self._groups[core]

    # A tensor of each kind serves all contenders, since only one of them works at a time. Zeros
    # are written, so that its pages exist before the timing.

    def _ordinary_tensor(self, n: int) -> Tensor:
        if self._ordinary is None:
            self._ordinary = torch.empty(n, dtype=torch.float32).zero_()
        return self._ordinary

    def _pooled_tensor(self, n: int) -> Tensor:
        if self._pooled is None:
            self._pooled = empty_shared(n, dtype=torch.float32).zero_()
        return self._pooled

    def _call(self, name: str, n: int) -> tuple[Callable[[], Any], Tensor]:
        """Return a function that calls a contender once, and the tensor that it reduces."""
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
            # Times 1: the bytes are read and written, and no value grows from call to call.
            return partial(tensor.mul_, 1.0), tensor
        if contender.kind == "peer":
            return partial(dist.all_reduce, tensor, group=self.gloo), tensor
        algorithm: Any = contender.algorithm
        return partial(all_reduce, tensor, self.group, algorithm), tensor

    # A size.

    def _size(self, nbytes: int, position: int, last: dict[str, JSON]) -> list[JSON]:
        """Return the cells of a size. last: cells of the previous size, by contender."""
        # The tensors of the previous size are freed first.
        self._ordinary = None
        self._pooled = None
        turns: list[TimedContender] = []
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

    def _round(self, turns: list[TimedContender], repeat: int) -> None:
        """Time a batch of every contender; each round begins with another contender."""
        for offset in range(len(turns)):
            turn = turns[(offset + repeat) % len(turns)]
            seconds, cpu = turn.time(turn.calls, turn.pilot < SHORT)
            turn.samples.append(seconds / turn.calls)
            turn.cpu.append(cpu / turn.calls)
            # The fastest sample, because a disturbed pilot would make all batches too short.
            turn.calls = self._calls(min(turn.samples))

    def _asked_to_end(self) -> bool:
        """Return whether Ctrl-C was pressed. Collective, since only rank 0 gets the signal."""
        rows = self.group.all_gather_values([float(self.place.interrupted())])
        self.interrupted = any(row[0] for row in rows)
        return self.interrupted

    def _cell(self, turn: TimedContender, nbytes: int) -> JSON:
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
        """Return whether an algorithm over gloo would take too long, by the previous size."""
        if CONTENDERS[name].kind != "algorithm":
            return False
        growth = nbytes / max(before["bytes"], MIB)  # below, time is latency
        return "skipped" in before or before["seconds"] * max(growth, 1.0) > self.plan.longest

    def _prepared(self, name: str, n: int) -> TimedContender | None:
        """Return a checked contender, with the calls that fill a batch; None if it is absent."""
        turn = self._checked_mpi(name, n) if name == OPEN_MPI else self._checked(name, n)
        if turn is None:
            return None
        calls = 1
        while True:
            # More calls until the time is measurable; the first few calls are slow and short.
            turn.pilot = turn.time(calls, False)[0] / calls
            if turn.pilot * calls >= self.plan.batch / 4 or calls == MOST_CALLS:
                break
            # At most 20 times as many: the first call predicts the others badly.
            calls = self._calls(max(turn.pilot, self.plan.batch / 20 / calls))
        turn.calls = self._calls(turn.pilot)
        return turn

    def _checked_mpi(self, name: str, n: int) -> TimedContender:
        self._ask_mpi("prepare", elements=n)
        right = all(answer["right"] for answer in self._ask_mpi("check"))
        self._must_be_right(name, right)
        return TimedContender(name, self._time_mpi)

    def _checked(self, name: str, n: int) -> TimedContender | None:
        """Check a contender of this process; return None if any rank lacks it. Collective."""
        mine = ""
        try:
            call, tensor = self._call(name, n)
        except ContenderUnavailable as error:
            mine = str(error)
        # A single rank without the contender makes every call impossible.
        complaint = next(filter(None, self._all(mine)), "")
        if complaint:
            self.absent[name] = complaint
            return None
        if CONTENDERS[name].kind != "floor":
            # Filled for each contender: the tensor may have the previous contender's correct sum.
            fill(tensor, self.rank)
            call()
            self._must_be_right(name, holds(tensor, expected(PERIOD, self.size)))
            # Zeros stay zeros in all timed calls; other sums would grow until they overflow.
            tensor.zero_()
        return TimedContender(name, partial(self._time, call))

    def _must_be_right(self, name: str, right: bool) -> None:
        """Raise RuntimeError on all ranks if the sum is wrong on any rank."""
        rows = self.group.all_gather_values([float(right)])
        if not all(row[0] for row in rows):
            raise RuntimeError(
                f"{CONTENDERS[name].label} computes a wrong sum on {self.size} ranks"
            )

    def _calls(self, seconds: float) -> int:
        """Return the number of calls of `seconds` each that fill a batch."""
        return min(MOST_CALLS, max(1, math.ceil(self.plan.batch / seconds)))

    def _all(self, text: str) -> list[str]:
        """Return every rank's text, cut to 400 bytes, since ranks exchange equally many numbers."""
        codes = list(text.encode()[:400].ljust(400, b"\0"))
        rows = self.group.all_gather_values([float(code) for code in codes])
        texts = [bytes(map(int, row)).rstrip(b"\0") for row in rows]
        return [text.decode(errors="replace") for text in texts]

    # A batch.

    def _time(self, call: Callable[[], Any], calls: int, warm: bool) -> tuple[float, float]:
        """Return the seconds of the slowest rank, and the CPU seconds of all, for `calls` calls."""
        if warm:
            call()
        dist.barrier(group=self.gloo)
        if calls > 1:
            # gloo's barrier releases the ranks up to a millisecond apart; the contender's own call
            # synchronises them.
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
        # Ranks without the job wait here, in a receive of gloo, for rank 0's answers.
        seconds, spent = self.group.all_gather_values([seconds, spent])[0]
        return seconds, spent

    def _ask_mpi(self, do: str, **arguments: Any) -> list[JSON]:
        """Return the answers of Open MPI's ranks, on rank 0; an empty list elsewhere."""
        return self.mpi.ask(do, **arguments) if self.mpi is not None else []

    def _progress(self, nbytes: int, position: int, share: float, what: str) -> None:
        """Report the finished share of this size."""
        if self.rank == 0:
            event = {"unit": "size", "step": position, "ranks": self.size, "bytes": nbytes}
            self.place.report({**event, "share": share, "what": what})
