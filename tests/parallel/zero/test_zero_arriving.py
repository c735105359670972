"""Stages 1 and 2: parameters that are still on their way when the program goes on are waited for by
who reads them."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import FEATURES, Batch, batches, distance, network, on_ranks, part, vector
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives import group as hosts
from dure.collectives.group import Group
from dure.collectives.shared_memory import rendezvous
from dure.contracts.world import RankContext
from dure.errors import PeerLostError
from dure.parallel.zero import ZeroRedundancy
from dure.parallel.zero.partitioned_parameters import AbsentParameter

LAG = 0.2
"""Seconds by which what rank 1 sends comes later than rank 0 goes on."""


def apart(program: Callable[[RankContext], Any], ranks: int = 2) -> list[Any]:
    """What `program` returns on ranks that take each other for those of other hosts."""

    def moved(context: RankContext) -> list[Any]:
        rank, patience = context.group.rank, timedelta(seconds=20)
        rendezvous.name_of_this_host = hosts.name_of_this_host = lambda: f"host {rank}"  # type: ignore[attr-defined]
        told: list[Any] = [None]
        if rank == 0:
            store = dist.TCPStore(
                "127.0.0.1", 0, ranks, True, timeout=patience, wait_for_workers=False
            )
            told = [store.port]
        dist.broadcast_object_list(told, 0)
        if rank != 0:
            store = dist.TCPStore("127.0.0.1", told[0], ranks, False, timeout=patience)
        dist.destroy_process_group()
        dist.init_process_group("dure", store=store, rank=rank, world_size=ranks, timeout=patience)
        results: list[Any] = [None] * ranks
        dist.all_gather_object(results, program(replace(context, group=Group.default())))
        dist.destroy_process_group()
        return results

    found: list[Any] = dure.Processes(ranks, backend="gloo").run(moved, lambda event: None)
    return found


def step(model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def updated(joint: Batch) -> nn.Module:
    """One process after one step."""
    model = network()
    step(model, torch.optim.SGD(model.parameters(), 0.1, 0.9), joint)
    return model


def on_its_way(
    context: RankContext, joint: Batch, stage: Any = 2, options: Any = None
) -> tuple[nn.Module, Any, Any]:
    """A model behind its first step, of which no parameter has arrived."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)

    optimizer.register_step_post_hook(lambda *_: time.sleep(LAG * context.group.rank))
    zero = ZeroRedundancy(
        model, optimizer, stage, context.group, units=60, overlap_gather=True, **options or {}
    )
    step(model, optimizer, part(joint, context))
    optimizer.zero_grad()
    assert all(type(parameter) is AbsentParameter for parameter in model.parameters())
    return model, optimizer, zero


def linear_by_hand(model: Any) -> Tensor:
    """Layers that are used by another than their own modules."""
    hidden = torch.tanh(
        F.linear(torch.ones(1, FEATURES, dtype=torch.float64), model[0].weight, model[0].bias)
    )
    return F.linear(hidden, model[2].weight)


def by_threads(model: nn.Module) -> Tensor:
    """Several readers at once."""
    found: list[Tensor] = []
    first = next(model.parameters())
    threads = [
        threading.Thread(target=lambda: found.append(first.detach().clone())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.stack(found)


READERS: dict[str, Callable[[nn.Module], Tensor]] = {
    "forward": lambda model: model(torch.ones(1, FEATURES, dtype=torch.float64)),
    "a part's forward": lambda model: model[0](torch.ones(1, FEATURES, dtype=torch.float64)),  # type: ignore[index]
    "evaluation": lambda model: torch.no_grad()(model)(
        torch.ones(1, FEATURES, dtype=torch.float64)
    ),
    "by hand": linear_by_hand,
    "threads": by_threads,
    "norms": lambda model: torch.stack(torch._foreach_norm(list(model.parameters()))),
    "a norm": lambda model: nn.utils.get_total_norm(list(model.parameters())),
    "state_dict": lambda model: torch.cat(
        [each.reshape(-1) for each in model.state_dict().values()]
    ),
    "data": lambda model: torch.cat([each.data.reshape(-1) for each in model.parameters()]),
    "numpy": lambda model: torch.from_numpy(next(model.parameters()).detach().numpy().copy()),
    "copies": lambda model: torch.cat(
        [each.reshape(-1) for each in copy.deepcopy(list(model.parameters()))]
    ),
    "a copied part": lambda model: vector(copy.deepcopy(model[0])),  # type: ignore[index]
    "conversion": lambda model: vector(model.float()),
}


@pytest.mark.parametrize("stage", [1, 2])
def test_who_reads_a_parameter_gets_the_new_one(stage: int) -> None:
    def program(context: RankContext) -> list[float]:
        joint = batches(1, 6)[0]
        reference, far = updated(joint), []
        for read in READERS.values():
            model, _, _ = on_its_way(context, joint, stage)
            far.append(float((read(model) - read(reference)).detach().abs().max()))
        return far

    for row in apart(program):
        assert len(row) == len(READERS)
        assert max(row) < 1e-12, dict(zip(READERS, row, strict=True))


def test_what_needs_no_elements_waits_for_none() -> None:
    def program(context: RankContext) -> list[Any]:
        model, _, _ = on_its_way(context, batches(1, 6)[0])
        told = [sum(parameter.numel() for parameter in model.parameters()), str(model)]
        told += [
            (parameter.shape, parameter.dtype, parameter.requires_grad)
            for parameter in model.parameters()
        ]
        return [*told, all(type(parameter) is AbsentParameter for parameter in model.parameters())]

    plain = network()
    told = [
        215,
        str(plain),
        *((p.shape, p.dtype, p.requires_grad) for p in plain.parameters()),
        True,
    ]
    assert apart(program) == [told, told]


def test_the_path_is_that_of_one_process_whatever_comes_behind_a_step() -> None:
    """Steps without a forward pass of this rank, evaluations, checkpoints, a loaded state, a layer
    that is not used."""

    def program(context: RankContext) -> list[float]:
        joint = batches(6, 6)
        model, optimizer, zero = on_its_way(context, joint[0], 2, {"reduce": "sum"})
        zero.load_state_dict(updated(joint[0]).state_dict())  # the sum of two means is not the mean
        reference = updated(joint[0])
        whole = torch.optim.SGD(reference.parameters(), 0.1, 0.9)
        zero.load_optimizer_state_dict(whole.state_dict())
        far = []
        for number, batch in enumerate(joint[1:]):
            step(reference, whole, batch)
            optimizer.zero_grad()
            if number % 2 and context.group.rank:  # all examples are the other rank's
                zero.take_part()
            else:
                inputs, targets = batch if number % 2 else part(batch, context)
                (F.cross_entropy(model(inputs), targets, reduction="sum") / 6).backward()
            optimizer.step()
            if number == 0:
                with zero.uncounted(), torch.no_grad():
                    far.append(float((model(batch[0]) - reference(batch[0])).abs().max()))
            if number == 1:
                with zero.gathered():
                    far.append(distance(model, reference))
            if number == 2:
                zero.load_state_dict(zero.state_dict(everywhere=True))
            if number == 3:
                far.append(distance(model, reference))
        again = network()
        again.load_state_dict(zero.state_dict(everywhere=True))
        return [*far, distance(again, reference)]

    assert max(max(row) for row in apart(program)) < 1e-12


class Tagged(nn.Parameter):
    """A kind of parameter that tells something."""

    @property
    def rows(self) -> int:
        return self.shape[0]


def test_other_kinds_of_parameters_are_waited_for_at_once() -> None:
    def program(context: RankContext) -> list[Any]:
        joint = batches(1, 6)[0]
        model = network()
        model[2].weight = Tagged(model[2].weight.detach())  # type: ignore[index]
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        zero = ZeroRedundancy(model, optimizer, 2, context.group, units=60, overlap_gather=True)
        step(model, optimizer, part(joint, context))
        rows = next(
            parameter.rows for parameter in model.parameters() if isinstance(parameter, Tagged)
        )
        zero.settle()
        return [
            rows,
            not any(type(parameter) is AbsentParameter for parameter in model.parameters()),
            distance(model, updated(joint)),
        ]

    for rows, here, far in apart(program):
        assert rows == 8
        assert here
        assert far < 1e-12


def test_without_a_link_between_hosts_a_step_waits_as_ever() -> None:
    def program(context: RankContext) -> bool:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ZeroRedundancy(model, optimizer, 2, context.group, overlap_gather=True)
        step(model, optimizer, part(batches(1, 6)[0], context))
        return any(type(parameter) is AbsentParameter for parameter in model.parameters())

    assert on_ranks(2, program, backend="gloo") == [False, False]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("how", "options", "reason"),
    [
        (
            torch.jit.script,
            {},
            "overlap_gather needs to observe each use of a parameter, but 0 is compiled",
        ),
        (
            torch.compile,
            {},
            "overlap_gather needs to observe each use of a parameter, but 0 is compiled",
        ),
        (lambda part: part, {"stage": 3}, "overlap_gather is for stages 1 and 2"),
        (
            lambda part: part,
            {"prefetch": 0},
            "overlap_gather is for stages 1 and 2, during the computation; prefetch=0",
        ),
    ],
    ids=["scripted", "compiled", "stage 3", "at once"],
)
def test_what_cannot_be_overlapped_is_refused(how: Any, options: Any, reason: str) -> None:
    model = nn.Sequential(how(nn.Linear(4, 4)), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=reason):
        ZeroRedundancy(
            model, torch.optim.SGD(model.parameters(), 0.1), overlap_gather=True, **options
        )
    if options:
        with pytest.raises(ValueError, match=reason):
            dure.ZeRO(**{"stage": 2, **options, "overlap_gather": True}).check(
                dure.load_task("digits"), dure.Processes(2)
            )


def test_who_waits_for_parameters_of_a_lost_rank_is_told() -> None:
    def program(context: RankContext) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if context.group.rank == 1:
            optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        ZeroRedundancy(model, optimizer, 2, context.group, overlap_gather=True)
        step(model, optimizer, part(batches(1, 6)[0], context))
        model(batches(1, 6)[0][0])
        pytest.fail("it went on without the other rank's part")

    with pytest.raises(PeerLostError, match="rank 1 was killed by SIGKILL"):
        apart(program)
