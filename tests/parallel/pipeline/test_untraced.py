"""What cannot be traced is one operation, and the model around it is cut: as one worker trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from beside import CLOSE, MOMENTUM, compare, on_ranks, pipeline
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dure
from dure.contracts.world import RankContext
from dure.parallel.mesh.pipeline import Pipeline
from dure.parallel.pipeline.opaque_modules import is_untraced
from dure.parallel.pipeline.trace import ModelTrace
from small import CLASSES, FEATURES, check_all, same_bits, small_task

WIDTH = 6


class Doubled(torch.autograd.Function):
    """The identity, whose gradient is twice as large."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        # Of no rows there is nothing to look at.
        return torch.tanh(self.layer(rows)) if rows.abs().sum() > 0 else rows


class Routed(nn.Module):
    """A mixture of experts: each row goes to one of them. It counts them, and leaves a loss."""

    balance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.drop = nn.Dropout(0.25)
        self.register_buffer("rows", torch.zeros(3))

    def forward(self, hidden: Tensor) -> Tensor:
        shares = self.router(hidden).softmax(-1)
        best, choice = shares.max(-1)
        result = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            if len(rows):
                result = result.index_add(0, rows, expert(hidden[rows]) * best[rows, None])
        if self.training:
            self.rows += torch.bincount(choice, minlength=3)
        self.balance = shares.mean(0).square().sum()
        return self.drop(result)


class Block(nn.Module):
    """What it does with hidden values is `step`'s affair."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step
        self.before = nn.Linear(WIDTH, WIDTH)
        self.routed = Routed()
        self.drop = nn.Dropout(0.25)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.step(self, torch.tanh(self.before(hidden)))


class Chain(nn.Module):
    """Blocks, of which `drops` may leave some out, and a loss of the routers' if it `balances`."""

    def __init__(
        self,
        step: Callable[[Any, Tensor], Tensor],
        drops: Callable[[Any, Any, Tensor], Tensor] | None = None,
        balances: bool = False,
    ) -> None:
        super().__init__()
        self.drops = drops
        self.balances = balances
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block(step) for _ in range(4))
        self.last = nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.first(inputs)
        if self.drops is None:
            for block in self.blocks:
                hidden = block(hidden)
        else:
            hidden = self.drops(self, hidden)  # type: ignore[call-arg, arg-type]
        scores = self.last(hidden)
        balance = sum(block.routed.balance for block in self.blocks) if self.balances else 0.0
        return scores, balance


def loss(outputs: Any, targets: Tensor) -> Tensor:
    scores, balance = outputs
    # Evaluation has other batches, and a balance of its own in each.
    return F.cross_entropy(scores, targets) + (0.1 * balance if scores.requires_grad else 0.0)


def chain_task(step: Any, **options: Any) -> dure.Task:
    return small_task(
        model=partial(Chain, step, **options), loss=loss, optimizer=MOMENTUM, metrics={}
    )


def plain(self: Any, hidden: Tensor) -> Tensor:
    return self.drop(hidden)  # type: ignore[no-any-return]


def routes(self: Any, hidden: Tensor) -> Tensor:
    return self.routed(hidden)  # type: ignore[no-any-return]


def doubles(self: Any, hidden: Tensor) -> Tensor:
    return Doubled.apply(self.routed.router(hidden)) @ self.routed.router.weight  # type: ignore[no-any-return, no-untyped-call]


def checkpoints(self: Any, hidden: Tensor) -> Tensor:
    return checkpoint(self.routed, hidden, use_reentrant=True)  # type: ignore[no-any-return]


def hooks(self: Any, hidden: Tensor) -> Tensor:
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: 2 * gradient)
    return hidden


def decides(self: Any, hidden: Tensor) -> Tensor:
    return hidden if hidden.sum() > 0 else 2 * hidden


def blocks_of(model: nn.Module) -> list[str]:
    """The names of the modules that are operations of a trace."""
    trace = ModelTrace(model.train(), torch.randn(4, FEATURES, dtype=torch.float64))
    assert sum(map(is_untraced, trace.operations)) == len(trace.blocks)
    return [block.call.name for block in trace.blocks]


def prove(task: dure.Task, **options: Any) -> None:
    strategy = Pipeline(8, **{"microbatches": 2, **options})
    check_all(strategy, task, 2)
    assert strategy.prove(task, task.model(), dure.Processes(2)) is not None


@pytest.mark.parametrize("step", [routes, doubles, checkpoints, hooks, decides])
def test_a_module_that_cannot_be_traced_is_proven_as_it_is(step: Any) -> None:
    prove(chain_task(step, balances=step is routes), schedule="zero-bubble", recompute=True)


def test_no_more_than_what_is_the_reason_is_one_operation() -> None:
    assert blocks_of(Chain(plain)) == []
    assert blocks_of(Chain(routes)) == [f"blocks.{number}.routed" for number in range(4)]
    assert blocks_of(Chain(decides)) == [f"blocks.{number}" for number in range(4)]


def undrawn() -> nn.Module:
    """Without dropout, whose draws for micro-batches are not those of one worker."""
    model = Chain(routes, balances=True)
    for block in model.blocks:
        block.routed.drop.p = 0.0  # type: ignore[union-attr]
    return model


def test_ranks_that_call_such_modules_train_as_one_worker_does() -> None:
    task = small_task(n=20, model=undrawn, loss=loss, optimizer=MOMENTUM, metrics={})

    def program(context: RankContext) -> float:
        # The last batch is smaller, and is traced when each rank has its stages alone.
        options = pipeline(context, schedule="zero-bubble-v", microbatches=2, recompute=True)
        return compare(context, task, options, steps=4)

    assert on_ranks(2, program)[0] < CLOSE


# Blocks that are left out by chance.


def continues(self: Any, hidden: Tensor) -> Tensor:
    for block in self.blocks:
        if self.training and torch.rand([]) < 0.5:
            continue
        hidden = block(hidden)
    return hidden


def reads_the_number(self: Any, hidden: Tensor) -> Tensor:
    for block in self.blocks:
        if self.training and torch.rand(1).item() < 0.5:
            continue
        hidden = block(hidden)
    return hidden


def asks_twice(self: Any, hidden: Tensor) -> Tensor:
    for block in self.blocks:
        kept = torch.rand([]) > (0.5 if self.training else -1.0)
        result = block(hidden) if kept else None
        hidden = hidden + result / 2 if kept else hidden
    return hidden


def halves(self: Any, hidden: Tensor) -> Tensor:
    for block in self.blocks:
        if self.training and torch.rand([]) < 0.5:
            hidden = hidden / 2
            continue
        hidden = block(hidden)
    return hidden


@pytest.mark.parametrize("drops", [continues, reads_the_number, asks_twice])
def test_blocks_that_chance_leaves_out_are_proven(drops: Any) -> None:
    prove(chain_task(plain, drops=drops), recompute=True)
    assert blocks_of(Chain(plain, drops)) == [f"blocks.{number}" for number in range(4)]


def test_the_draws_that_leave_out_blocks_are_those_of_one_worker() -> None:
    task = chain_task(routes, drops=continues)
    one = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=6))
    two = dure.train(task, Pipeline(8, 1, "naive"), dure.Processes(2), dure.Stop(steps=6))
    assert same_bits(one, two)


def test_where_another_value_stands_for_a_block_the_model_is_refused_with_the_line() -> None:
    with pytest.raises(ValueError, match=r"the model itself at .*`.*torch\.rand\(\[\]\) < 0\.5:`"):
        prove(chain_task(plain, drops=halves))


# What is refused, and what is left as it was.


def draws_from_numpy(self: Any, hidden: Tensor) -> Tensor:
    return hidden * numpy.random.rand() if hidden.sum() > -1e9 else hidden


def test_draws_that_nobody_seeds_are_refused_inside_such_modules_too() -> None:
    with pytest.raises(ValueError, match=r"module blocks\.0 draws random numbers from Python or"):
        prove(chain_task(draws_from_numpy))


class Marked(nn.Module):
    """Gives another shape for a batch that has a mark in it."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:2] if hidden.max() > 99 else hidden


def test_a_module_that_gives_another_shape_later_is_named() -> None:
    inputs = torch.randn(16, FEATURES, dtype=torch.float64)
    inputs[-1] = 1000
    targets = torch.zeros(16, dtype=torch.long)

    def model() -> nn.Module:
        layers = nn.Tanhshrink(), Marked(), nn.Linear(FEATURES, CLASSES)
        return nn.Sequential(*layers).double()

    task = dure.Task(model, F.cross_entropy, (inputs, targets))
    with pytest.raises(
        ValueError, match=r"module 1 returns \[2, 6\], but returned \[4, 6\] at first"
    ):
        prove(task)


def test_a_cut_inside_such_a_module_and_too_many_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks\.1\.routed\.experts\.0 is inside the module"):
        check_all(Pipeline(8, cut=("blocks.1.routed.experts.0",)), chain_task(routes), 2)
    layers = (nn.Flatten(), Marked())
    task = small_task(model=lambda: nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES)).double())
    with pytest.raises(ValueError, match=r"; module 1 is one operation, for what it does in modul"):
        check_all(Pipeline(8), task, 9)


def test_to_look_at_a_model_changes_nothing_in_it() -> None:
    model = Chain(routes, balances=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    blocks_of(model)
    torch.set_rng_state(state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


class Remembering(nn.Module):
    """Puts what it computes into a list that its model makes in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, seen: Any) -> Tensor:
        seen.append(hidden)
        hidden = self.layer(hidden) * len(seen.values)
        return hidden if hidden.sum() > 0 else hidden.sin()


class Seen:
    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def append(self, value: Tensor) -> None:
        self.values.append(value)


class Reminded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Remembering() for _ in range(2))
        self.last = nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden, Seen())
        scores: Tensor = self.last(hidden)
        return scores


def test_an_object_that_is_given_to_a_module_is_new_in_each_call() -> None:
    prove(small_task(model=Reminded))
