"""Engines that train one client after another can be told, between batches, to leave it off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from clients_at_work import jobs_of, results, same, weights_of

from dure.errors import DureError
from dure.federated.engines.job import Engine
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.meta import MetaEngine
from small import small_task


class LeftOffError(DureError):
    pass


def loop() -> Engine:
    task = small_task(optimizer=torch.optim.Adam)
    return LoopEngine(task, task.model(), task.train, 4, 3)


def meta() -> Engine:
    task = small_task(optimizer=torch.optim.Adam)
    return MetaEngine(task, task.model(), task.train, 4, 3, 0.1, True)


@pytest.mark.parametrize("make", [loop, meta])
def test_what_is_left_off_in_its_midst_leaves_nothing_behind(make: Callable[[], Engine]) -> None:
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
