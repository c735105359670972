"""Engines can be told, before a step, to leave it off; and so show how far they have come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from clients_at_work import jobs_of, results, same, weights_of

from dure.errors import DureError
from dure.federated.engines.batched import batched_engine
from dure.federated.engines.job import ClientEngine
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.meta import MetaEngine
from small import small_task


class LeftOffError(DureError):
    pass


def loop() -> ClientEngine:
    task = small_task(optimizer=torch.optim.Adam)
    return LoopEngine(task, task.model(), task.train, 4, 3)


def meta() -> ClientEngine:
    task = small_task(optimizer=torch.optim.Adam)
    return MetaEngine(task, task.model(), task.train, 4, 3, 0.1, True)


@pytest.mark.parametrize("make", [loop, meta])
def test_what_is_left_off_in_its_midst_leaves_nothing_behind(
    make: Callable[[], ClientEngine],
) -> None:
    jobs = jobs_of([9, 13], [6, 6], weights_of())
    engine = make()
    looked = 0

    def look() -> None:
        nonlocal looked
        looked += 1
        if looked == 4:
            raise LeftOffError

    engine.look = look
    with pytest.raises(LeftOffError):
        results(engine, jobs)
    assert looked == 4
    assert same(results(engine, jobs), results(make(), jobs))
    assert looked == 4 + 12


def test_an_engine_that_trains_many_clients_at_once_looks_before_each_of_their_steps() -> None:
    task = small_task()
    engine = batched_engine(task, task.model(), task.train, 4, 3)
    assert isinstance(engine, ClientEngine)
    looks: list[int] = []
    engine.look = lambda: looks.append(0)
    results(engine, jobs_of([9, 13], [6, 6], weights_of()))
    assert len(looks) == 6
