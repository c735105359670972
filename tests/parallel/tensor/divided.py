"""Models that train divided over ranks, beside the same model undivided."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.parallel.tensor import (
    DivisionPlan,
    gradient_norm,
    load_whole,
    parallelize,
    plan_for,
    whole_state_dict,
)

Scores = Callable[[nn.Module, Tensor], Tensor]


def on_ranks(
    ranks: int, program: Callable[[RankContext], Any], backend: Any = "dure", deadline: float = 60
) -> list[Any]:
    """What `program` returns on every rank, in order of rank."""

    def gathered(context: RankContext) -> list[Any]:
        return [
            pickle.loads(part)
            for part in context.group.gather_bytes(pickle.dumps(program(context)))
        ]

    result: list[Any] = dure.Processes(ranks, deadline=deadline, backend=backend).run(
        gathered, lambda event: None
    )
    return result


def at_all_degrees(program: Callable[[Group], Any], deadline: float = 60) -> dict[int, list[Any]]:
    """What it returns on the ranks of a group of 1, of 2 and of 4, in one world."""

    def each(context: RankContext) -> dict[int, Any]:
        found = {}
        for ranks in ([2], [0, 1], [0, 1, 2, 3]):
            group = dist.new_group(ranks, backend="dure")
            if context.group.rank in ranks:
                found[len(ranks)] = program(Group(group))
        return found

    rows = on_ranks(4, each, deadline=deadline)
    found: dict[int, list[Any]] = {}
    for degree in (1, 2, 4):
        found[degree] = [row[degree] for row in rows if degree in row]
    return found


def transformer(tied: bool = False, **options: Any) -> nn.Module:
    """A small one in float64 of an odd vocabulary, whose gradients are large enough to be seen."""
    torch.manual_seed(1)
    settings = {"context": 8, "layers": 2, "heads": 4, "width": 16, **options}
    model = dure.models.Transformer(13, tied=tied, **settings).double()
    enliven(model)
    return model


def enliven(model: nn.Module) -> None:
    """Biases that are not 0, weights that are not tiny."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            )


def mlp() -> nn.Module:
    torch.manual_seed(1)
    layers = [
        nn.Linear(6, 12),
        nn.Tanh(),
        nn.Linear(12, 8),
        nn.ReLU(),
        nn.Linear(8, 16),
        nn.GELU(),
        nn.Linear(16, 5),
    ]
    return nn.Sequential(*layers, nn.Softplus(), nn.Linear(5, 3)).double()


def texts(
    count: int, vocabulary: int = 13, length: int = 8, batch: int = 3
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    shape = (batch, length)
    made = []
    for _ in range(count):
        inputs = torch.randint(0, vocabulary, shape, generator=generator)
        made.append((inputs, torch.randint(0, vocabulary, shape, generator=generator)))
    return made


def numbers(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    inputs = [torch.randn(7, 6, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(each, torch.randint(0, 3, (7,), generator=generator)) for each in inputs]


def own_scores(model: nn.Module, inputs: Tensor) -> Tensor:
    """Classes second."""
    scores: Tensor = model(inputs)
    return scores


def face_scores(model: nn.Module, inputs: Tensor) -> Tensor:
    """Of a model of Hugging Face."""
    scores: Tensor = model(input_ids=inputs).logits
    return scores.transpose(1, 2)


def backward(model: nn.Module, batch: tuple[Tensor, Tensor], scores: Scores = own_scores) -> float:
    loss = F.cross_entropy(scores(model, batch[0]), batch[1])
    loss.backward()
    return loss.item()


def train(
    model: nn.Module, data: Sequence[tuple[Tensor, Tensor]], scores: Scores = own_scores
) -> list[float]:
    """SGD with momentum; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        losses.append(backward(model, batch, scores))
        optimizer.step()
    return losses


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """As the state of a model whose parameters are its gradients."""
    shadow = copy.deepcopy(model)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in shadow.named_parameters():
            gradient = own[name].grad
            assert gradient is not None, name
            parameter.copy_(gradient)
    names = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in whole_state_dict(shadow).items() if name in names}


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def compare(
    group: Group,
    make: Callable[[], nn.Module],
    data: Sequence[tuple[Tensor, Tensor]],
    scores: Scores = own_scores,
    plan: DivisionPlan | None = None,
    **options: Any,
) -> dict[str, float]:
    """How far the divided model is from the undivided one: gradients, losses, final weights.

    plan: None is the ready one, with these options.
    """
    alone = make()
    model = copy.deepcopy(alone)
    parallelize(model, plan_for(model, **options) if plan is None else plan, group)
    begins = apart(whole_state_dict(model), alone.state_dict())
    backward(alone, data[0], scores)
    backward(model, data[0], scores)
    of_gradients = apart(gradients(model), gradients(alone))
    of_norms = abs(float(gradient_norm(model, group) - gradient_norm(alone, Group())))
    one = train(alone, data, scores)
    other = train(model, data, scores)
    found = {
        "begin": begins,
        "gradients": of_gradients,
        "norm": of_norms,
        "losses": max(abs(a - b) for a, b in zip(one, other, strict=True)),
        "weights": apart(whole_state_dict(model), alone.state_dict()),
    }
    load_whole(model, alone.state_dict())
    found["loaded"] = apart(whole_state_dict(model), alone.state_dict())
    return found
