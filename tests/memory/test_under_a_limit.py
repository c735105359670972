"""A model whose undivided step needs 1.6 times the memory that a rank may have."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from limited import can_limit, enter, limit
from torch import nn
from torch.nn.functional import mse_loss

import dure

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH = 1024
LAYERS = 16
WEIGHTS = LAYERS * WIDTH * (WIDTH + 1) * 8
"""Bytes of the parameters."""
STEP = 5 * WEIGHTS
"""Bytes of an undivided step with AdamW: weights, gradients, two moments, and what it makes of one
of these while it steps over all parameters at once."""
ROOM = STEP * 10 // 16

SYSTEMS = {
    "tensor 2": dure.TensorParallel(batch_size=8, plan="alternating"),
    "pipeline 2": dure.Pipeline(batch_size=8, microbatches=2),
    "ZeRO 3 on 2": dure.ZeRO(stage=3, batch_size=8),
}


class Wide:
    """The factory of the model, which enters the limit first where it is a rank's."""

    def __init__(self, group: Path | None) -> None:
        self.group = group

    def __call__(self) -> nn.Module:
        if self.group is not None and dist.is_initialized():
            enter(self.group)
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()]
        return nn.Sequential(*layers)


def trained(strategy: dure.Strategy, group: Path | None) -> dict[str, torch.Tensor]:
    """Some of the weights after two steps."""
    draws = torch.Generator().manual_seed(0)
    data = torch.randn(16, WIDTH, generator=draws, dtype=torch.float64)
    task = dure.Task(
        Wide(group),
        mse_loss,
        train=(data, data.flip(1)),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
    )
    ranks = 1 if group is None else 2
    run = dure.train(task, strategy, dure.Processes(ranks), dure.Stop(steps=2))
    return {name: one.flatten()[::97].clone() for name, one in run.model.state_dict().items()}


@pytest.mark.skipif(not can_limit(), reason="limits of memory take root and cgroups")
def test_divided_it_trains_as_undivided_without_the_limit_and_whole_not_at_all() -> None:
    right = trained(dure.SingleWorker(batch_size=8), None)
    for name, strategy in SYSTEMS.items():
        with limit(ROOM) as group:
            found = trained(strategy, group)
        assert found.keys() == right.keys()
        for one in right:
            torch.testing.assert_close(found[one], right[one], rtol=1e-12, atol=1e-12, msg=name)
    with limit(ROOM) as group, pytest.raises(dure.errors.PeerLostError, match="SIGKILL"):
        trained(dure.DataParallel(batch_size=8), group)
