"""What a trace has frozen is refused with its name before training; what it has trains the same."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import dure
from dure.contracts.learner import Proof
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.pipeline import Pipeline
from dure.parallel.mesh.strategy import Parallel
from small import CLASSES, FEATURES, check_all, largest_difference, network, small_task

PASSES = 0
SEEN: list[int] = []


class Shared:
    passes = 0


class Slotted:
    __slots__ = ("passes",)

    def __init__(self) -> None:
        self.passes = 0


def counted_in_a_closure() -> Callable[[], int]:
    passes = 0

    def count() -> int:
        nonlocal passes
        passes += 1
        return passes

    return count


COUNT = counted_in_a_closure()


class Keeping(nn.Module):
    """Two layers, and between them what `step` does with the module and the hidden values."""

    def __init__(self, step: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.last = nn.Linear(8, CLASSES)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("late", None)
        self.scale = torch.ones(())
        self.settings = SimpleNamespace(passes=0)
        self.slotted = Slotted()
        self.table = {"passes": 0}
        self.lengths: list[int] = []
        self.vector = numpy.zeros(2)
        self.own = random.Random(0)
        self.numbers = itertools.count()
        self.on = False
        self.memory: Any = None
        self.step = step
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        scores: Tensor = self.last(torch.tanh(self.step(self, hidden)))
        return scores


def warmed_up(passes: float) -> float:
    """Nothing yet, and something later: no try of a few passes would see it."""
    return 1.0 if passes < 100 else 0.5


def by_a_number(self: Any, hidden: Tensor) -> Tensor:
    self.count = getattr(self, "count", 0) + 1
    return hidden * warmed_up(self.count)


def by_a_flag(self: Any, hidden: Tensor) -> Tensor:
    self.on = not self.on
    return hidden


def by_a_dict(self: Any, hidden: Tensor) -> Tensor:
    self.table["passes"] += 1
    return hidden * warmed_up(self.table["passes"])


def by_a_list(self: Any, hidden: Tensor) -> Tensor:
    self.lengths.append(len(hidden))
    return hidden * warmed_up(len(self.lengths))


def by_an_object(self: Any, hidden: Tensor) -> Tensor:
    self.settings.passes += 1
    return hidden * warmed_up(self.settings.passes)


def by_a_slot(self: Any, hidden: Tensor) -> Tensor:
    self.slotted.passes += 1
    return hidden * warmed_up(self.slotted.passes)


def by_a_class(self: Any, hidden: Tensor) -> Tensor:
    Shared.passes += 1
    return hidden * warmed_up(Shared.passes)


def by_a_global(self: Any, hidden: Tensor) -> Tensor:
    global PASSES
    PASSES += 1
    return hidden * warmed_up(PASSES)


def by_a_global_list(self: Any, hidden: Tensor) -> Tensor:
    SEEN.append(1)
    return hidden * warmed_up(len(SEEN))


def by_a_closure(self: Any, hidden: Tensor) -> Tensor:
    return hidden * warmed_up(COUNT())


def by_a_default(self: Any, hidden: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return hidden * warmed_up(len(seen))


def by_a_tensor(self: Any, hidden: Tensor) -> Tensor:
    self.scale = self.scale + 1
    return hidden * torch.where(self.scale < 100, 1.0, 0.5)


def by_a_tensor_in_place(self: Any, hidden: Tensor) -> Tensor:
    self.scale += 1
    return hidden * torch.where(self.scale < 100, 1.0, 0.5)


def by_a_late_buffer(self: Any, hidden: Tensor) -> Tensor:
    self.late = torch.zeros(()) if self.late is None else self.late + 1
    return hidden * torch.where(self.late < 100, 1.0, 0.5)


def by_an_array(self: Any, hidden: Tensor) -> Tensor:
    self.vector[0] += 1
    return hidden * warmed_up(self.vector[0])


def by_a_generator(self: Any, hidden: Tensor) -> Tensor:
    return hidden * (2.0 if self.own.random() > 0.99 else 1.0)


def by_an_iterator(self: Any, hidden: Tensor) -> Tensor:
    return hidden * warmed_up(next(self.numbers))


def by_a_hidden_state(self: Any, hidden: Tensor) -> Tensor:
    before, self.memory = self.memory, hidden.mean(0).detach()
    return hidden if before is None else hidden + 1e-4 * before


def by_the_first_pass(self: Any, hidden: Tensor) -> Tensor:
    first, self.on = not self.on, True
    return hidden * 2 if first else hidden


def by_the_clock(self: Any, hidden: Tensor) -> Tensor:
    return hidden + time.time() % 1


def by_an_old_weight(self: Any, hidden: Tensor) -> Tensor:
    if self.memory is None:
        self.memory = self.last.weight.detach().mean()
    return hidden * self.memory


def by_what_evaluation_leaves(self: Any, hidden: Tensor) -> Tensor:
    self.on = self.on or not self.training
    return hidden * 2 if self.on and self.training else hidden


def not_where_it_is_compiled(self: Any, hidden: Tensor) -> Tensor:
    return hidden if torch.compiler.is_compiling() else hidden * 2


def not_without_gradients(self: Any, hidden: Tensor) -> Tensor:
    return hidden if torch.is_grad_enabled() else hidden * 2


def freezing(self: Any, hidden: Tensor) -> Tensor:
    self.first.weight.requires_grad_(False)
    return hidden


REFUSED: dict[Callable[[Any, Tensor], Any], str] = {
    by_a_number: "forward pass changes count,",
    by_a_flag: "forward pass changes on,",
    by_a_dict: "forward pass changes table['passes'],",
    by_a_list: "forward pass changes the length of lengths,",
    by_an_object: "forward pass changes settings.passes,",
    by_a_slot: "forward pass changes slotted.passes,",
    by_a_class: "forward pass changes Shared.passes,",
    by_a_global: "forward pass changes PASSES of test_pipeline_proof.py,",
    by_a_global_list: "forward pass changes the length of SEEN of test_pipeline_proof.py,",
    by_a_closure: "forward pass changes passes of count,",
    by_a_default: "forward pass changes the length of a default of by_a_default,",
    by_a_tensor: "forward pass changes scale,",
    by_a_tensor_in_place: "forward pass changes scale,",
    by_a_late_buffer: "forward pass changes late,",
    by_an_array: "forward pass changes vector,",
    by_a_generator: "forward pass changes own,",
    by_an_iterator: "forward pass changes numbers,",
    by_a_hidden_state: "when a pass is repeated",
    by_the_first_pass: "such as on;",
    by_the_clock: "on time or on other draws",
    by_an_old_weight: "in a later step of training the model returns another output",
    by_what_evaluation_leaves: "in a later step of training the model returns another output",
    not_where_it_is_compiled: "in training the model returns another output",
    not_without_gradients: "in evaluation the model returns another output",
    freezing: "in training the model returns another gradient of first.weight",
}


def proven(strategy: Any, task: dure.Task, workers: int) -> Proof | None:
    """What a strategy has to say of the task's model, which is found fit before."""
    check_all(strategy, task, workers)
    said: Proof | None = strategy.prove(task, task.model(), dure.Processes(workers))
    return said


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_what_a_trace_would_freeze_is_refused_with_its_name(step: Any) -> None:
    task = small_task(model=lambda: Keeping(step))
    with pytest.raises(ValueError, match=re.escape(REFUSED[step])) as caught:
        proven(Pipeline(8, 2), task, 2)
    said = str(caught.value)
    assert said.startswith("a Keeping cannot be cut, for")
    assert said.endswith("or trust the trace with check=False (--no-check)")
    assert "\n" not in said


def test_a_model_that_differs_from_its_trace_is_named_with_its_place() -> None:
    def model() -> nn.Module:
        inner = nn.Sequential(Keeping(not_where_it_is_compiled), nn.Tanh())
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), inner).double()

    with pytest.raises(ValueError, match=r"first in module 1\.0 \(Keeping at test_.*\.py:\d+\)"):
        proven(Pipeline(8, 2), small_task(model=model), 2)


def test_hooks_that_count_are_refused() -> None:
    def model() -> nn.Module:
        made = Keeping(kept)
        passes = [0]

        def hook(_: Any, __: Any, output: Tensor) -> Tensor:
            passes[0] += 1
            return output * warmed_up(passes[0])

        made.first.register_forward_hook(hook)
        return made

    with pytest.raises(ValueError, match=r"each forward pass changes passes of hook\[0\]"):
        proven(Pipeline(8, 2), small_task(model=model), 2)


def kept(self: Any, hidden: Tensor) -> Tensor:
    """To be looked at: nobody computes with it."""
    self.memory = hidden
    self.table["hidden"] = hidden.detach()
    return hidden


def cached(self: Any, hidden: Tensor) -> Tensor:
    if self.memory is None:
        self.memory = torch.arange(8, dtype=hidden.dtype, device=hidden.device) / 8
        self.lengths.append(len(hidden))
    return hidden * self.memory


def counted_in_a_buffer(self: Any, hidden: Tensor) -> Tensor:
    self.passes = self.passes + self.training
    return hidden * (1 + self.passes / 10)


def detached_between(self: Any, hidden: Tensor) -> Tensor:
    return hidden.detach()


def dropped(self: Any, hidden: Tensor) -> Tensor:
    dropped: Tensor = self.drop(hidden)
    return dropped


def in_training_alone(self: Any, hidden: Tensor) -> Tensor:
    return hidden * 2 if self.training else hidden


def within_no_grad(self: Any, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        mean = hidden.mean()
    return hidden - mean


def clamped(self: Any, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        self.last.weight.clamp_(-0.2, 0.2)
    return hidden


TRAINED = [
    kept,
    cached,
    counted_in_a_buffer,
    detached_between,
    dropped,
    in_training_alone,
    within_no_grad,
    clamped,
]


@pytest.mark.parametrize("step", TRAINED, ids=lambda step: step.__name__)
def test_what_a_trace_has_is_proven_and_trains_as_one_worker_does(step: Any) -> None:
    task = small_task(
        model=lambda: Keeping(step), optimizer=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    )
    stop = dure.Stop(steps=7)
    one = dure.train(task, dure.SingleWorker(8), stop=stop)
    two = dure.train(task, dure.Pipeline(8, 1, "naive"), dure.Processes(2), stop)
    assert largest_difference(one, two) < 1e-12
    assert [proof["what"] for proof in two.summary["proofs"]] == [
        "the traced stages compute what the model computes"
    ]


def varied() -> nn.Module:
    """A spectral norm writes buffers, a batch norm too, and dropout draws."""
    return nn.Sequential(
        nn.Linear(FEATURES, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.Tanh(),
        spectral_norm(nn.Linear(8, 8)),
        nn.ReLU(),
        nn.Linear(8, CLASSES),
    ).double()


@pytest.mark.parametrize(
    ("strategy", "made", "workers"),
    [
        (Pipeline(8, 2, "zero-bubble"), varied, 2),
        (Pipeline(8, 2, "interleaved", recompute=True), varied, 2),
        (Parallel(Mesh(2, 2, 1), 16, zero=1), varied, 4),
        (Parallel(Mesh(1, 2, 2), 8), network, 4),
    ],
)
def test_every_way_through_the_stages_is_proven(strategy: Any, made: Any, workers: int) -> None:
    # No batch leaves an example alone, of which batch norm has no statistics.
    task = small_task(n=48, model=made)
    model = made()
    before = torch.get_rng_state()
    assert strategy.prove(task, model, dure.Processes(workers)) is not None
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_in_one_stage_that_is_not_traced_has_nothing_to_prove() -> None:
    assert (
        Parallel(Mesh(2), 8, zero=3).prove(small_task(), small_task().model(), dure.Processes(2))
        is None
    )


def test_the_model_that_will_be_trained_stays_as_it_is() -> None:
    task = small_task(model=lambda: Keeping(kept))
    model = task.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Pipeline(8, 2).prove(task, model, dure.Processes(2))
    assert model.memory is None
    assert "hidden" not in model.table
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_trace_that_is_trusted_trains() -> None:
    task = small_task(model=lambda: Keeping(by_a_flag))
    run = dure.train(task, dure.Pipeline(8, 2), dure.Processes(2), dure.Stop(steps=2), check=False)
    assert run.summary["proofs"] == []


class Steered(nn.Module):
    """Its inner module decides by numbers in tensors."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layer(inputs)
        if self.how == "draws" and torch.rand(()) < 0.0:
            return -scores
        if self.how == "routes":
            for row in (scores > 0).nonzero():
                scores = scores + row.sum()
        if self.how == "reads":
            scores = scores * float(scores.sum())
        if self.how == "picks":
            scores = scores + scores[scores > 0].mean()
        if self.how == "numpy":
            scores = scores + scores.detach().numpy().mean()
        return scores


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("draws", r'if self\.how == "draws" and torch\.rand\(\(\)\) < 0\.0:'),
        ("routes", r"for row in \(scores > 0\)\.nonzero\(\):"),
        ("reads", r"scores = scores \* float\(scores\.sum\(\)\)"),
        ("picks", r"scores = scores \+ scores\[scores > 0\]\.mean\(\)"),
        ("numpy", r"scores = scores \+ scores\.detach\(\)\.numpy\(\)\.mean\(\)"),
    ],
)
def test_a_refusal_names_module_file_line_and_text(
    how: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    task = small_task(model=lambda: nn.Sequential(nn.Identity(), Steered(how)).double())
    with pytest.raises(ValueError, match=rf"module 1 at test_\w+\.py:\d+, `{line}`") as caught:
        check_all(Pipeline(8, 2), task, 2)
    assert "\n" not in str(caught.value)
    # Torch's graph and warnings would hide it.
    assert capfd.readouterr().err == ""


def without_a_gradient(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.detach(), targets)


def from_the_fifth_on(outputs: Any, targets: Tensor) -> Tensor:
    # two micro-batches a step; evaluation has no gradients
    LOSSES.extend([1] * outputs.requires_grad)
    return F.cross_entropy(outputs.detach() if len(LOSSES) > 8 else outputs, targets)


LOSSES: list[int] = []


def of_whole_numbers(outputs: Any, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).sum()


def of_other_things(outputs: Any, targets: Tensor) -> Tensor:
    return targets.double().mean()


@pytest.mark.parametrize(
    ("loss", "step", "schedule"),
    [
        (without_a_gradient, 1, "1f1b"),
        (from_the_fifth_on, 5, "1f1b"),
        (of_whole_numbers, 1, "1f1b"),
        (of_other_things, 1, "1f1b"),
        # Here gradients of weights come later than those of values.
        (without_a_gradient, 1, "zero-bubble-v"),
        (from_the_fifth_on, 5, "zero-bubble-v"),
    ],
)
def test_a_loss_without_a_gradient_is_an_error(loss: Any, step: int, schedule: str) -> None:
    with pytest.raises(
        dure.errors.WorkerFailedError,
        match=rf"failed in step {step}: RuntimeError: element 0 of tensors does not require grad",
    ):
        dure.train(
            small_task(loss=loss),
            dure.Pipeline(8, 2, schedule),
            dure.Processes(2),
            dure.Stop(steps=6),
        )


def test_a_loss_of_several_numbers_is_an_error() -> None:
    task = small_task(loss=lambda *pair: F.cross_entropy(*pair, reduction="none"), test=None)
    with pytest.raises(dure.errors.WorkerFailedError, match="4 elements cannot be converted"):
        dure.train(task, dure.Pipeline(8, 2), dure.Processes(2), dure.Stop(steps=2))


class TwoHeads(nn.Module):
    """The second output comes from the first layers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.aside = nn.Linear(8, CLASSES)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(inputs))
        aside = self.aside(hidden)
        return self.last(torch.tanh(self.middle(hidden))), aside


@pytest.mark.parametrize("output", [0, 1])
def test_what_the_loss_does_not_depend_on_is_left_alone(output: int) -> None:
    """Weight decay would shrink what has a gradient of zeros, and leaves what has none."""
    task = small_task(
        model=TwoHeads,
        loss=lambda outputs, targets: F.cross_entropy(outputs[output], targets),
        optimizer=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
        test=None,
    )
    stop = dure.Stop(steps=4)
    one = dure.train(task, dure.SingleWorker(8), stop=stop)
    cut = dure.Pipeline(8, 2, cut=("last",))
    assert largest_difference(one, dure.train(task, cut, dure.Processes(2), stop)) < 1e-12
