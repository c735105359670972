"""Batch norm of one example: what cannot be computed is refused before the run, with sizes that
fit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

import dure
from dure.tasks.batch_norm import check_pieces, needs_two
from small import examples, small_task


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


class Frozen(nn.Module):
    """Whose batch norm always is in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = normed()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.net[1].eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out


def task(n: int, model: Any = normed) -> dure.Task:
    return small_task(model=model, train=examples(n), test=None)


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (normed, (6,), True),
        (Frozen, (6,), False),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3)).double(), (6,), False),
        (lambda: nn.BatchNorm2d(2).double(), (2, 3, 3), False),
        (lambda: nn.BatchNorm2d(2).double(), (2, 1, 1), True),
        (lambda: nn.BatchNorm1d(2, track_running_stats=False).double(), (2,), True),
        (lambda: nn.SyncBatchNorm(2).double(), (2,), False),
        (lambda: nn.LazyBatchNorm1d().double(), (2,), False),
    ],
)
def test_a_model_needs_two_where_its_batch_norm_would_see_one_value(
    model: Any, shape: tuple[int, ...], expected: bool
) -> None:
    made = model()
    lazy = any(map(is_lazy, made.parameters()))
    before = {} if lazy else {name: value.clone() for name, value in made.state_dict().items()}
    modes = [module.training for module in made.modules()]
    assert (
        needs_two(made, dure.Examples(torch.randn(4, *shape).double(), torch.zeros(4))) is expected
    )
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in before.items())
    assert [module.training for module in made.modules()] == modes
    assert any(map(is_lazy, made.parameters())) is lazy


@pytest.mark.parametrize("n", range(2, 14))
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("pieces", [1, 2])
def test_refused_is_what_divides_to_one_and_what_is_advised_is_not(
    n: int, workers: int, pieces: int
) -> None:
    for size in range(1, n + 1):
        steps = torch.arange(n).split(size)
        parts = [part for step in steps for part in step.tensor_split(workers)]
        alone = any(len(one) == 1 for part in parts for one in part.tensor_split(pieces))
        if not alone:
            check_pieces(task(n), normed(), size, workers, pieces)
            continue
        with pytest.raises(ValueError, match=f"batch_size {size} divides {n} examples") as refused:
            check_pieces(task(n), normed(), size, workers, pieces)
        advised = str(refused.value).rpartition("use a batch_size of ")[2]
        for other in advised.split(" or ") if advised != str(refused.value) else ():
            check_pieces(task(n), normed(), int(other), workers, pieces)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.SingleWorker(8), None),
        (dure.DataParallel(batch_size=10), dure.Processes(2)),
        (dure.ZeRO(batch_size=10), dure.Processes(2)),
        (dure.LocalSGD(batch_size=10), dure.Processes(2)),
        (dure.DiLoCo(batch_size=10), dure.Processes(2)),
        (dure.ParallelSGD(batch_size=2), dure.Processes(2)),
        (dure.ADMM(batch_size=2), dure.Processes(2)),
        (dure.Pipeline(batch_size=8, microbatches=4), dure.Processes(2)),
        (dure.Hogwild(batch_size=8), dure.Threads(2)),
        (dure.FedAvg(clients=3, batch_size=1), None),
    ],
)
def test_every_system_refuses_before_the_run(strategy: Any, world: Any) -> None:
    n = 33 if strategy.batch_size == 8 else 43
    with pytest.raises(ValueError, match=r"batch norm.* cannot compute statistics"):
        dure.train(task(n), strategy, world, dure.Stop(epochs=1))
    if strategy.batch_size > 2:  # nobody else is refused
        plain = small_task(train=examples(n), test=None)
        strategy.check_model(plain, plain.model(), dure.Processes(2))


@pytest.mark.parametrize("engine", ["loop", "loop-processes"])
@pytest.mark.parametrize("batch_size", [2, 4, 8, None])
def test_in_a_federation_a_rest_of_one_joins_the_batch_before_it(
    engine: str, batch_size: int | None
) -> None:
    sizes = [4, 5, 9, 2]
    n = sum(sizes)
    owners = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    seen: list[int] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if outputs.requires_grad:
            seen.append(len(outputs))
        return F.cross_entropy(outputs, targets)

    data = examples(n)
    made = small_task(
        model=normed, loss=loss, train=dure.Examples(data.inputs, data.targets, owners), test=None
    )
    strategy = dure.FedAvg(
        clients=None, partition="natural-key", batch_size=batch_size, local_epochs=2
    )
    run = dure.train(made, strategy, dure.Simulated(engine=engine), dure.Stop(rounds=2))
    assert run.summary["samples"] == 2 * 2 * n, "nothing is left out"
    assert all(step.numbers is not None for step in run.history.steps)
    assert [step.numbers["refused"] for step in run.history.steps if step.numbers] == [0, 0]
    if engine == "loop":
        assert min(seen) >= 2


def test_a_client_of_one_example_is_left_out_with_a_count_and_the_others_train() -> None:
    data = examples(13)
    keys = ["lone", *["many"] * 12]
    made = small_task(
        model=normed,
        train=dure.Examples(data.inputs, data.targets, keys),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    strategy = dure.FedAvg(clients=None, partition="natural-key")
    with pytest.warns(UserWarning, match=r'client 0 \("lone"\) is rejected: it has one example'):
        run = dure.train(made, strategy, stop=dure.Stop(rounds=3))
    assert run.summary["facts"][0]["refused_clients"] == [[0, 3]]
    assert run.summary["samples"] == 3 * 12
