"""Replicas whose weights go apart are noticed, whatever took them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import FEATURES, batches, network, on_ranks, part
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext
from dure.errors import WorkerFailedError
from dure.parallel import DistributedDataParallel

Change = Callable[[Tensor, Tensor], None]


class Changing(nn.Module):
    """Forward changes `centre` in training, by its first layer's weight or by what it sees."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.ones(FEATURES, dtype=torch.float64), requires_grad=False)
        self.rest = network()
        self.change = change

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.change(self.centre, inputs)
        outputs: Tensor = self.rest(inputs - self.centre)
        return outputs


def counted(centre: Tensor, inputs: Tensor) -> None:
    with torch.no_grad():
        centre.lerp_(inputs.mean(0), 0.01)


def uncounted(centre: Tensor, inputs: Tensor) -> None:
    centre.data.lerp_(inputs.mean(0), 0.01)


def assigned(centre: Tensor, inputs: Tensor) -> None:
    centre.data = 0.99 * centre.data + 0.01 * inputs.mean(0)


def the_same_everywhere(centre: Tensor, inputs: Tensor) -> None:
    centre.data.mul_(0.9)


def task(change: Change) -> dure.Task:
    examples = batches(1, 24)[0]

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)

    return dure.Task(lambda: Changing(change), F.cross_entropy, examples, optimizer=sgd)


@pytest.mark.parametrize("change", [counted, uncounted, assigned])
@pytest.mark.parametrize("strategy", [dure.DataParallel(6), dure.ZeRO(2, 6)])
def test_ranks_whose_forward_passes_change_weights_by_what_they_see_end(
    change: Change, strategy: Any
) -> None:
    with pytest.raises(WorkerFailedError, match="centre differs between rank 1 and"):
        dure.train(task(change), strategy, dure.Processes(2), dure.Stop(steps=4))


def test_a_change_that_is_the_same_on_all_ranks_is_as_on_one() -> None:
    right = dure.train(task(the_same_everywhere), dure.SingleWorker(6), stop=dure.Stop(steps=4))
    for strategy in (dure.DataParallel(6), dure.ZeRO(1, 6)):
        found = dure.train(
            task(the_same_everywhere), strategy, dure.Processes(2), dure.Stop(steps=4)
        )
        for name, value in right.model.state_dict().items():
            assert torch.allclose(found.model.state_dict()[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("change", [counted, uncounted, the_same_everywhere])
def test_threads_that_share_their_weights_refuse_every_change(change: Change) -> None:
    with pytest.raises(WorkerFailedError, match="forward passes change the parameter centre"):
        dure.train(task(change), dure.DataParallel(6), dure.Threads(2), dure.Stop(steps=4))


@pytest.mark.parametrize("static", [False, True])
def test_a_rank_that_alone_changes_its_weights_is_found(static: bool) -> None:
    def program(context: RankContext) -> str:
        model = DistributedDataParallel(network(), context.group, static_graph=static)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, batch in enumerate(batches(4, 6)):
            if number == 2 and context.group.rank == 1:
                with torch.no_grad():
                    model.module[2].bias.clamp_(max=0.01)  # type: ignore[index,union-attr]
            inputs, targets = part(batch, context)
            try:
                F.cross_entropy(model(inputs), targets).backward()
            except ValueError as error:
                return f"{number}: {error}"
            optimizer.step()
            optimizer.zero_grad()
        return "nothing"

    for said in on_ranks(2, program):
        assert said.startswith("3: the parameter 2.bias differs between rank 1 and rank 0")


@pytest.mark.parametrize("strategy", [dure.DataParallel(6), dure.ZeRO(2, 6)])
def test_lazy_layers_are_refused_by_name(strategy: Any) -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(3), nn.Tanh()).double()

    examples = batches(1, 24)[0]
    sgd = torch.optim.SGD
    lazily = dure.Task(lazy, F.cross_entropy, examples, optimizer=lambda p: sgd(p, lr=0.1))
    with pytest.raises(ValueError, match=r"0\.weight is lazy"):
        dure.train(lazily, strategy, dure.Processes(2), dure.Stop(steps=1))
