"""ZeRO with every kind of model that users bring: the path of one process, in all stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from loops import CLASSES, FEATURES, Batch, batches, distance, on_ranks, part
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dure.contracts.world import RankContext
from dure.parallel.zero import ZeroRedundancy
from dure.worlds.backend import Backend

VARIANTS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3 copied": {"stage": 3, "in_place": False, "prefetch": 0},
    "3 ahead": {"stage": 3, "in_place": False, "prefetch": 2},
}


class Branches(nn.Module):
    """`sometimes` is used in some batches and on some ranks only, `never` in none; `frozen` has no
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(FEATURES, CLASSES)
        self.always = nn.Linear(FEATURES, CLASSES)
        self.sometimes = nn.Linear(FEATURES, CLASSES)
        self.frozen = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.tied = nn.Linear(FEATURES, CLASSES)
        self.tied.weight = self.always.weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.always(inputs) + self.frozen(inputs) + self.tied(inputs)
        chosen = inputs[:, 0] > 0.7
        if chosen.any():
            outputs = outputs + torch.where(chosen[:, None], self.sometimes(inputs), 0.0)
        return outputs


class Disordered(nn.Module):
    """Modules in another order than they are used, one used twice, one whose weight its parent
    uses."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, CLASSES)
        self.twice = nn.Linear(8, 8)
        self.first = nn.Linear(FEATURES, 8)
        self.borrowed = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs)) * self.scale
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(hidden))))
        result: Tensor = self.last(F.linear(hidden, self.borrowed.weight) + self.shift)
        return result


class Turning(nn.Module):
    """Parameters of one block whose gradients come in another order from batch to batch and from
    rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.scales = nn.ParameterList(
            [nn.Parameter(torch.full((8,), 1 + number / 4)) for number in range(4)]
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, turn = self.first(inputs), int(abs(inputs[0, 0]) * 100)
        turned = [self.scales[(turn + number) % 4] for number in range(4)]
        result: Tensor = self.last(sum(torch.tanh(hidden * scale) for scale in turned))
        return result


class Table(nn.Module):
    """Gives back a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2 * FEATURES, 8))

    def forward(self) -> Tensor:
        return self.rows[:FEATURES]


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.out = Table(), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.table()
        hidden = torch.tanh(self.hidden(inputs @ rows))
        result: Tensor = self.out(hidden) + (inputs @ rows).sum(dim=1, keepdim=True)
        return result


class Attention(nn.Module):
    """Attention uses its output layer's weight without calling it; blocks are computed twice, to
    save memory."""

    def __init__(self, recompute: bool = True) -> None:
        super().__init__()
        self.recompute = recompute
        self.places = nn.Parameter(torch.randn(FEATURES, 8))
        make = partial(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs[:, :, None] * self.places
        for block in self.blocks:
            hidden = (
                checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
            )
        result: Tensor = self.out(self.norm(hidden).mean(dim=1))
        return result


class Words(nn.Module):
    """Sparse gradients, and a head that shares the table of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(7, 8, sparse=True)
        self.words = nn.Embedding(CLASSES, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES, bias=False)
        self.head.weight = self.words.weight

    def forward(self, inputs: Tensor) -> Tensor:
        first = inputs.abs().long()[:, 0]
        hidden = self.hidden(
            self.sparse(first.clamp(max=6)) + self.words(first.clamp(max=CLASSES - 1))
        )
        result: Tensor = self.head(torch.tanh(hidden))
        return result


class Frozen(nn.Module):
    """A trained layer below frozen ones, through which its gradient has to go."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(8))
        self.out = nn.Linear(8, CLASSES).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.body(torch.tanh(self.first(inputs))) + self.bias))
        return result


class Mixed(nn.Module):
    """Parameters in float32 and in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.first(inputs.float())).double())
        return result

    def double(self) -> Mixed:
        self.out.double()
        return self


class Convolutions(nn.Module):
    """Weights in another order in memory than their dimensions say."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, (2, 2))
        self.out = nn.Linear(8, CLASSES)
        self.first.to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.first(inputs.view(-1, 1, 2, 3))).flatten(1))
        return result


MODELS = [
    Branches,
    Disordered,
    Turning,
    Views,
    Attention,
    partial(Attention, False),
    Words,
    Frozen,
    Mixed,
    Convolutions,
]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Groups with settings of their own; weight decay tells parameters that are used from those
    that are not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    long, short = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    groups = [{"params": long, "weight_decay": 0.1}, {"params": short, "lr": 0.02}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1, momentum=0.9)


def walk(
    model: nn.Module,
    joint: list[Batch],
    context: RankContext | None,
    zero: ZeroRedundancy | None,
    optimizer: Any,
) -> None:
    """Steps on joint batches, of which each rank has its part, perhaps none; gradients are those of
    the joint mean."""
    for batch in joint:
        inputs, targets = batch if context is None else part(batch, context)
        optimizer.zero_grad()
        if len(inputs):
            (F.cross_entropy(model(inputs), targets, reduction="sum") / len(batch[0])).backward()
        elif zero is not None:
            zero.take_part()
        optimizer.step()


def program(
    make: Callable[[], nn.Module], examples: int, context: RankContext
) -> dict[str, tuple[float, list[int], bytes]]:
    """For each variant: how far it is from one process, bytes sent beyond the formula in each step,
    the bits."""
    torch.manual_seed(1)
    start = make().double()
    joint = batches(3, examples)
    alone = copy.deepcopy(start)
    for module in alone.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False  # one process's optimizers take no sparse gradients
    walk(alone, joint, None, None, optimizer_of(alone))
    results = {}
    for name, options in VARIANTS.items():
        model = copy.deepcopy(start)
        optimizer = optimizer_of(model)
        zero = ZeroRedundancy(
            model, optimizer, process_group=context.group, reduce="sum", units=60, **options
        )
        beyond = []
        for batch in joint:
            before = context.group.meter.counters.bytes_sent
            walk(model, [batch], context, zero, optimizer)
            beyond.append(context.group.meter.counters.bytes_sent - before - zero.bytes_per_step())
        with torch.no_grad(), zero.gathered():
            again = copy.deepcopy(model.state_dict())
        whole = copy.deepcopy(alone)
        whole.load_state_dict(zero.state_dict(everywhere=True))
        assert all(torch.equal(value, again[key]) for key, value in whole.state_dict().items())
        bits = b"".join(value.contiguous().numpy().tobytes() for value in again.values())
        results[name] = distance(whole, alone), beyond, bits
    return results


@pytest.mark.parametrize(
    ("ranks", "examples", "backend"),
    [(3, 7, "dure"), (2, 1, "gloo")],
    ids=["unequal parts", "a rank without examples"],
)
def test_every_model_walks_the_path_of_one_process(
    ranks: int, examples: int, backend: Backend
) -> None:
    # what is used twice is gathered again the first time, for which all ranks need examples
    models = [make for make in MODELS if examples >= ranks or make is not Disordered]
    rows = on_ranks(
        ranks,
        lambda context: [program(make, examples, context) for make in models],
        backend=backend,
    )
    for make, results in zip(models, zip(*rows, strict=True), strict=True):
        for variant in VARIANTS:
            far, beyond, bits = zip(*(result[variant] for result in results), strict=True)
            assert max(far) < (1e-12 if make is not Mixed else 1e-6), (make, variant)
            assert len(set(bits)) == 1, f"{make}, {variant}: the ranks differ"
            assert not any(any(steps[1:]) for steps in beyond), (make, variant, beyond)
