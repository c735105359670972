"""Loops, optimizers and models that ask for what few ask for: the path is that of one process, or
it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext
from dure.errors import DureError
from dure.parallel.optimizer_sharding import check_element_wise, check_parameter_wise
from dure.parallel.zero import ZeroRedundancy, checkpoint, read_whole
from small import CLASSES, FEATURES, check_all, examples, largest_difference, small_task

CLOSE = 1e-12
TWO = dure.Processes(2, deadline=120)
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def seeded(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return model().double()


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    )


def plain(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


def apart(
    context: RankContext,
    model: Callable[[], nn.Module],
    own: Callable[[Any], Any],
    loss: Loss,
    **options: Any,
) -> float:
    """How far ZeRO's path is from one process's after some steps. own: the parameters that the
    optimizer is given."""
    alone, divided = seeded(model), seeded(model)
    one, many = (torch.optim.SGD(own(each), lr=0.1) for each in (alone, divided))
    zero = ZeroRedundancy(divided, many, process_group=context.group, **options)
    given = examples(16)
    inputs, targets = given.inputs, given.targets
    for _ in range(3):
        alone.zero_grad()
        loss(alone, inputs, targets).backward()
        one.step()
        divided.zero_grad()
        loss(
            divided, inputs.chunk(2)[context.group.rank], targets.chunk(2)[context.group.rank]
        ).backward()
        many.step()
    state = zero.state_dict(everywhere=True)
    return max(
        float((state[name] - value).abs().max()) for name, value in alone.state_dict().items()
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_of_some_of_the_trainable_parameters(stage: Any) -> None:
    program = partial(
        apart, model=layers, own=lambda model: model[2].parameters(), loss=plain, stage=stage
    )
    assert max(on_ranks(2, program)) < CLOSE


def penalty(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    inputs = inputs.clone().requires_grad_(True)
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return F.cross_entropy(outputs, targets) + (gradient.norm(dim=1) - 1).square().mean()


@dataclass
class Rows:
    rows: Tensor


class Table(nn.Module):
    """Gives a view of its parameter, in an object of a class that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8))

    def forward(self) -> Rows:
        return Rows(self.table[:8])


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = Table(), nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.middle = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.table()
        hidden = torch.tanh(self.middle(torch.tanh(self.first(inputs))))
        scores: Tensor = self.last(hidden @ found.rows)
        return scores


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("model", "loss"), [(layers, penalty), (Looked, plain)])
def test_graphs_and_views_that_outlive_a_module(
    model: Callable[[], nn.Module], loss: Loss, in_place: bool
) -> None:
    options: dict[str, Any] = {"stage": 3, "units": 40, "in_place": in_place}
    program = partial(
        apart, model=model, own=lambda model: model.parameters(), loss=loss, **options
    )
    assert max(on_ranks(2, program)) < CLOSE


def test_a_checkpoint_stays_whole_when_the_next_one_is_interrupted(tmp_path: Path) -> None:
    def program(context: RankContext) -> None:
        model = seeded(layers)
        zero = ZeroRedundancy(model, partial(torch.optim.SGD, lr=0.1), process_group=context.group)
        zero.save(tmp_path)
        with zero.gathered(), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        if context.group.rank == 1:
            checkpoint.write_atomically = _fails  # type: ignore[attr-defined]
        zero.save(tmp_path)

    with pytest.raises(DureError, match="no space left"):
        on_ranks(2, program, deadline=8)
    found, _ = read_whole(tmp_path)
    assert all(
        torch.equal(found[name], value) for name, value in seeded(layers).state_dict().items()
    )


def _fails(path: Path, content: bytes) -> None:
    raise OSError("no space left on device")


# Optimizers


def by_place(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Learning rates that fall from layer to layer."""
    own = list(parameters)
    return torch.optim.SGD(
        [{"params": [p], "lr": 0.3 * 0.7**n} for n, p in enumerate(own)], lr=0.1, momentum=0.9
    )


class Normalised(torch.optim.Optimizer):
    """Divides every gradient by the norm of all."""

    def __init__(self, parameters: Any, lr: float = 0.1, kind: float = 2.0) -> None:
        super().__init__(parameters, {"lr": lr, "kind": kind})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(p.grad, self.defaults["kind"]) for p in own])
        norm = torch.linalg.vector_norm(norms, self.defaults["kind"])
        for parameter in own:
            parameter.add_(parameter.grad / norm, alpha=-self.defaults["lr"])


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [(dure.Pipeline(8, 2), 2), (dure.Parallel(dure.Mesh(data=2, pipeline=2), 8, 2, zero=1), 4)],
)
def test_groups_of_an_optimizer_may_go_by_place(strategy: Any, ranks: int) -> None:
    task = small_task(model=lambda: seeded(layers), optimizer=by_place)
    one = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=4))
    assert (
        largest_difference(
            dure.train(task, strategy, dure.Processes(ranks), dure.Stop(steps=4)), one
        )
        < CLOSE
    )


@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_an_optimizer_that_looks_at_all_gradients_is_not_divided(kind: float) -> None:
    optimizer = Normalised(layers().parameters(), kind=kind)
    with pytest.raises(ValueError, match="parameters apart differently than all together"):
        check_parameter_wise(optimizer)
    with pytest.raises(ValueError, match="pieces of a matrix differently than all together"):
        check_element_wise(optimizer)
    task = small_task(optimizer=partial(Normalised, kind=kind))
    for strategy in (dure.Pipeline(8, 2), dure.ZeRO(2, 8)):
        with pytest.raises((ValueError, DureError), match="cannot be divided"):
            dure.train(task, strategy, TWO, dure.Stop(steps=1))


def test_an_optimizer_with_a_closure_is_not_divided() -> None:
    with pytest.raises(ValueError, match="LBFGS cannot be divided over stages"):
        check_all(dure.Pipeline(8, 2), small_task(optimizer=torch.optim.LBFGS), 2)
    check_parameter_wise(torch.optim.Adafactor(layers().parameters()))


# Models


class Renormed(nn.Module):
    """Its forward passes change a weight. tied: the last layer has it too."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(19, 8, max_norm=0.5), nn.Linear(8, 19)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, indices: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.tanh(self.words(indices).mean(1)))
        return scores


@pytest.mark.parametrize(
    ("strategy", "tied", "what"),
    [
        (dure.DataParallel(8), False, "words has max_norm"),
        (dure.DataParallel(8), None, "words has max_norm"),
        (dure.ZeRO(2, 8), False, "words has max_norm"),
        (dure.Pipeline(8, 2, cut=("out",)), True, "stages 0 and 1 use it"),
        (
            dure.Pipeline(8, 2, cut=("out",), recompute=True),
            False,
            "recomputation would change it again",
        ),
        (dure.Parallel(dure.Mesh(data=2), 8), False, "replicas would diverge"),
    ],
)
def test_replicas_whose_forward_passes_change_weights_are_refused(
    strategy: Any, tied: bool | None, what: str
) -> None:
    world = dure.Threads(2) if tied is None else TWO
    indices = torch.randint(0, 19, (32, 5), generator=torch.Generator().manual_seed(0))
    task = small_task(
        model=partial(Renormed, bool(tied)), train=(indices, indices.sum(1) % 19), test=None
    )
    with pytest.raises(ValueError, match=what):
        dure.train(task, strategy, world, dure.Stop(steps=1))


class Spare(nn.Module):
    """The last stage has no parameters but those that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.spare = nn.Linear(FEATURES, CLASSES), nn.Tanh(), nn.Linear(3, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.act(self.first(inputs))
        return scores


@pytest.mark.parametrize("zero", [0, 1])
def test_a_stage_without_parameters_of_its_own(zero: int) -> None:
    strategy = dure.Parallel(dure.Mesh(data=2, pipeline=2), 8, 2, cut=("act",), zero=zero)
    one = dure.train(small_task(model=Spare), dure.SingleWorker(8), stop=dure.Stop(steps=3))
    many = dure.train(small_task(model=Spare), strategy, dure.Processes(4), dure.Stop(steps=3))
    assert largest_difference(many, one) < CLOSE


class Detached(nn.Module):
    """The first layer is trainable, and no gradient comes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.out = nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.out(self.act(self.first(inputs).detach()))
        return scores


def test_a_stage_that_learns_nothing_is_gone_on_with_on_another_mesh(tmp_path: Path) -> None:
    task = small_task(model=Detached, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    stop = dure.Stop(steps=4)
    one = dure.train(task, dure.SingleWorker(8), stop=stop)
    cut = dure.Parallel(dure.Mesh(pipeline=2), 8, 2, cut=("act",))
    dure.train(task, cut, TWO, dure.Stop(steps=2), out=tmp_path / "run")
    replicas = dure.Parallel(dure.Mesh(data=2), 8, 2)
    run = dure.resume(tmp_path / "run", task=task, strategy=replicas, stop=stop)
    assert largest_difference(run, one) < CLOSE


class Noted(nn.Linear):
    """Adds something of its own to a state_dict."""

    note = 7.0

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("my_extra_state", torch.ones(1))

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.note], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.note = float(state[0])


def noted() -> nn.Module:
    return nn.Sequential(Noted(FEATURES, 8), nn.Tanh(), Noted(8, CLASSES)).double()


def test_what_modules_add_to_a_state_dict_is_kept_by_a_pipeline(tmp_path: Path) -> None:
    task = small_task(model=noted)
    dure.train(task, dure.Pipeline(8, 2), TWO, dure.Stop(steps=2), out=tmp_path / "run")
    run = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(steps=4))
    one = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=4))
    assert list(run.model.state_dict()) == list(one.model.state_dict())
    assert largest_difference(run, one) < CLOSE


class Shift(nn.Module):
    """Writes into what it is given, and says so nowhere."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(features, dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        values += self.shift.detach()
        return values * self.shift


def shifting(first: bool, dropout: float) -> nn.Module:
    beginning = (
        [Shift(FEATURES), nn.Linear(FEATURES, 8)] if first else [nn.Linear(FEATURES, 8), Shift(8)]
    )
    behind = [nn.Dropout(dropout), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(8, CLASSES)]
    return nn.Sequential(*beginning, *behind).double()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("first", "dropout"), [(True, 0.0), (True, 1e-12), (False, 0.0)])
def test_layers_in_threads_may_write_into_what_they_are_given(
    first: bool, dropout: float, threads: int
) -> None:
    task = small_task(model=partial(shifting, first, dropout))
    one = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=3))
    many = dure.train(task, dure.LayersPerCore(8, 2), dure.Threads(threads), dure.Stop(steps=3))
    assert largest_difference(many, one) < 1e-9
