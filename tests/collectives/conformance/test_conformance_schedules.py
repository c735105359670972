"""Random schedules: seeded sequences of calls over overlapping groups, some late, some not waited
for at once.

Every rank draws the same schedule and makes those calls whose group it is in. Whether it waits at
once, in which order it waits for the rest, how late it comes and where its tensors lie, every rank
draws for itself. What arrives is checked against what the seed says must arrive.
`--sequences 1000 --first-sequence 5000` plays others, and more of them.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from harness import ALL, Backend, make_group, need, same
from torch import Tensor
from torch.distributed import ReduceOp

import dure
from dure.contracts.world import RankContext
from dure.errors import DureError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

GROUPS = ([0, 1, 2, 3], [0, 1], [1, 2, 3], [0, 2], [1, 3], [0, 1, 3], [2], [0, 1, 2, 3])
SIZES = (0, 1, 2, 7, 64, 1_000, 1_000, 5_000, 40_000)
LARGE = 400_000
DTYPES = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.float16,
    torch.bfloat16,
)
ELSEWHERE = (torch.int16, torch.int8, torch.bool)  # gloo knows not all of these
STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "PRODUCT": torch.mul,
}
KINDS = (
    "all_reduce",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
    "message",
    "message",
)


@dataclass(frozen=True)
class Step:
    """One call of a schedule. root: of the group, also the sender of a message to `other`."""

    number: int
    kind: str
    group: int
    n: int
    dtype: torch.dtype
    op: str
    root: int
    other: int
    tag: int

    def part(self, rank: int, n: int | None = None, salt: int = 0) -> Tensor:
        """What a rank of the group brings."""
        ramp = (
            torch.arange(self.n if n is None else n) * (rank + 2)
            + self.number
            + 3 * rank
            + 5 * salt
        )
        return (ramp % 7).to(self.dtype)

    def folded(self, parts: list[Tensor]) -> Tensor:
        """The reduction of the parts."""
        if self.dtype is torch.bool:
            return reduce(
                torch.logical_or if self.op in ("SUM", "MAX") else torch.logical_and, parts
            )
        wide = torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype
        return reduce(STEPS[self.op], [part.to(wide) for part in parts]).to(self.dtype)


def schedule(seed: int, everywhere: bool) -> list[Step]:
    """The steps of a sequence. everywhere: only what gloo can do too."""
    draw = random.Random(seed)
    steps = []
    for number in range(draw.randint(10, 30)):
        group = draw.randrange(len(GROUPS))
        size = len(GROUPS[group])
        root = draw.randrange(size)
        n = LARGE if draw.random() < 0.02 else draw.choice(SIZES)
        dtype = draw.choice(DTYPES if everywhere else DTYPES + ELSEWHERE)
        kind = draw.choice(KINDS)
        if kind == "message" and size == 1:
            kind = "barrier"
        other = (root + draw.randrange(1, max(2, size))) % size
        steps.append(
            Step(
                number,
                kind,
                group,
                n,
                dtype,
                draw.choice(list(STEPS)),
                root,
                other,
                draw.randrange(3),
            )
        )
    return steps


class Player:
    """A rank that plays sequences."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rank = dist.get_rank()
        self.groups = [make_group(members, backend, 30) for members in GROUPS]

    def play(self, seed: int) -> None:
        self.draw = random.Random(1_000_003 * seed + self.rank)
        pending: list[tuple[Step, Any, Callable[[], None]]] = []
        for step in schedule(seed, self.backend == "gloo"):
            if self.rank not in GROUPS[step.group]:
                continue
            if self.draw.random() < 0.08:
                time.sleep(self.draw.uniform(0, 0.003))
            at_once = self.draw.random() < 0.5
            try:
                work, check = self.call(step, asynchronous=not at_once)
                if at_once:
                    check()
                elif work is not None:
                    pending.append((step, work, check))
                while pending and self.draw.random() < 0.3:
                    self.settle(pending)
            except Exception as error:
                raise RuntimeError(
                    f"sequence {seed}, rank {self.rank}, {step}: {error!r}"
                ) from error
        try:
            while pending:
                self.settle(pending)
        except Exception as error:
            raise RuntimeError(
                f"sequence {seed}, rank {self.rank}, at its end: {error!r}"
            ) from error

    def settle(self, pending: list[tuple[Step, Any, Callable[[], None]]]) -> None:
        """Waits for one of the works that are under way."""
        step, work, check = pending.pop(self.draw.randrange(len(pending)))
        try:
            work.wait()
            check()
        except Exception as error:
            raise RuntimeError(f"waiting for {step}: {error!r}") from error

    def place(self, tensor: Tensor) -> Tensor:
        """The same values somewhere else: in the pool, or amidst a larger tensor."""
        chance = self.draw.random()
        if self.backend != "gloo" and chance < 0.3:
            from dure.collectives import empty_shared  # type: ignore[attr-defined]

            shared: Tensor = empty_shared(*tensor.shape, dtype=tensor.dtype)
            return shared.copy_(tensor)
        if self.backend != "gloo" and chance < 0.4:
            return torch.empty(*tensor.shape, 2, dtype=tensor.dtype)[..., 1].copy_(tensor)
        if chance < 0.6:
            return torch.empty(tensor.numel() + 3, dtype=tensor.dtype)[3:].copy_(tensor)
        return tensor.clone()

    def room(self, step: Step, n: int) -> Tensor:
        return self.place(torch.zeros(n, dtype=step.dtype))

    def call(self, step: Step, asynchronous: bool) -> tuple[Any, Callable[[], None]]:
        """Begins a call; its handle, and the check of what has arrived."""
        group, size = self.groups[step.group], len(GROUPS[step.group])
        me = GROUPS[step.group].index(self.rank)
        how: dict[str, Any] = {"group": group, "async_op": asynchronous}
        op = getattr(ReduceOp, step.op)
        everybody = range(size)
        n = step.n
        expected: list[Tensor] = []
        if step.kind == "barrier":
            return dist.barrier(**how), lambda: None
        if step.kind == "message":
            return self.message(step, me, asynchronous)
        if step.kind == "all_reduce":
            outputs = [self.place(step.part(me))]
            work = dist.all_reduce(outputs[0], op, **how)
            expected = [step.folded([step.part(r) for r in everybody])]
        elif step.kind == "broadcast":
            outputs = [self.place(step.part(me))]
            work = dist.broadcast(outputs[0], group_src=step.root, **how)
            expected = [step.part(step.root)]
        elif step.kind == "reduce":
            tensor = self.place(step.part(me))
            work = dist.reduce(tensor, group_dst=step.root, op=op, **how)
            outputs = [tensor] if me == step.root else []
            expected = [step.folded([step.part(r) for r in everybody])] if me == step.root else []
        elif step.kind == "all_gather":
            sizes = [n if self.backend == "gloo" else n + 3 * r for r in everybody]
            outputs = [self.room(step, size) for size in sizes]
            work = dist.all_gather(outputs, self.place(step.part(me, sizes[me])), **how)
            expected = [step.part(r, sizes[r]) for r in everybody]
        elif step.kind == "all_gather_into_tensor":
            outputs = [self.room(step, size * n)]
            work = dist.all_gather_into_tensor(outputs[0], self.place(step.part(me)), **how)
            expected = [torch.cat([step.part(r) for r in everybody])]
        elif step.kind == "reduce_scatter":
            sizes = [n if self.backend == "gloo" else n + 2 * r for r in everybody]
            outputs = [self.room(step, sizes[me])]
            work = dist.reduce_scatter(
                outputs[0], [self.place(step.part(me, s)) for s in sizes], op, **how
            )
            expected = [step.folded([step.part(r, sizes[me]) for r in everybody])]
        elif step.kind == "reduce_scatter_tensor":
            outputs = [self.room(step, n)]
            work = dist.reduce_scatter_tensor(
                outputs[0], self.place(step.part(me, size * n)), op, **how
            )
            whole = step.folded([step.part(r, size * n) for r in everybody])
            expected = [whole[me * n : (me + 1) * n]]
        elif step.kind == "all_to_all_single":
            rows = [
                [n // 4 + (sender + 2 * receiver) % 3 for receiver in everybody]
                for sender in everybody
            ]
            received = [rows[sender][me] for sender in everybody]
            outputs = [self.room(step, sum(received))]
            source = self.place(torch.cat([step.part(me, rows[me][r], salt=r) for r in everybody]))
            work = dist.all_to_all_single(outputs[0], source, received, rows[me], **how)
            expected = [
                torch.cat([step.part(sender, rows[sender][me], salt=me) for sender in everybody])
            ]
        elif step.kind == "gather":
            outputs = [self.room(step, n) for _ in everybody] if me == step.root else []
            work = dist.gather(
                self.place(step.part(me)), outputs or None, group_dst=step.root, **how
            )
            expected = [step.part(r) for r in everybody] if me == step.root else []
        else:
            parts = (
                [self.place(step.part(step.root, salt=r)) for r in everybody]
                if me == step.root
                else None
            )
            outputs = [self.room(step, n)]
            work = dist.scatter(outputs[0], parts, group_src=step.root, **how)
            expected = [step.part(step.root, salt=me)]

        def check() -> None:
            for output, wanted in zip(outputs, expected, strict=True):
                same(output, wanted)

        return work, check

    def message(self, step: Step, me: int, asynchronous: bool) -> tuple[Any, Callable[[], None]]:
        """One rank of the group sends, another receives; the rest have nothing to do."""
        group = self.groups[step.group]
        if me == step.root:
            tensor = self.place(step.part(me))
            send = dist.isend if asynchronous else dist.send
            return send(tensor, group=group, group_dst=step.other, tag=step.tag), lambda: None
        if me == step.other:
            tensor = self.room(step, step.n)
            receive = dist.irecv if asynchronous else dist.recv
            work = receive(tensor, group=group, group_src=step.root, tag=step.tag)
            return work, lambda: same(tensor, step.part(step.root))
        return None, lambda: None


@pytest.mark.parametrize("backend", ALL)
def test_random_schedules_arrive_at_what_their_seeds_say(
    backend: Backend, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    need(backend)
    first: int = request.config.getoption("first_sequence")
    count: int = request.config.getoption("sequences")
    if backend == "gloo":
        count = min(count, 15)  # it is the tests that are tried on it

    def program(context: RankContext) -> None:
        player = Player(backend)
        try:
            for seed in range(first, first + count):
                player.play(seed)
            dist.barrier()
        except Exception as error:
            (tmp_path / str(player.rank)).write_text(str(error))
            raise

    try:
        dure.Processes(4, 60).run(program, lambda event: None)
    except DureError as error:
        told = sorted(path.read_text() for path in tmp_path.iterdir())
        pytest.fail("\n".join([*told, str(error)[:200]]), pytrace=False)
