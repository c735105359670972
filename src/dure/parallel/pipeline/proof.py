"""Comparison of a cut model with the model itself, before the first step.

A trace is expected to compute the results of the model: forward and backward, in training and in
evaluation, in the first pass and in all later passes. A trace contains operations on tensors only.
State that a model keeps in Python, code that runs only during tracing or only outside it, and
custom gradients are not in it. So the model and the stages, one after another in this process, run
on the same examples with the same random numbers:

    model     a training pass with its gradients, the same pass again, an evaluation pass and the
              same again, and a training pass on other examples and with other parameters
    stages    the first of each

The model must repeat itself: Python state that differs after two equal passes is state that a trace
does not have (`dure.tensors.python_state`). The stages must reproduce the model's outputs,
gradients, parameters and buffers up to rounding (`dure.parallel.tensor_comparison`).

The gradients are those of a sum of the outputs with random weights: each output contributes, and
the task's loss is not called.

Cost: three steps of a worker on a micro-batch (three passes forward and one backward of the
model, two and one of the stages), evaluation of two examples, building the stages and comparing:
docs/pipeline.md has figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
)

from dure.errors import first_line
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.model_location import place_of
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.split_backward import DeferredGradients, compute_now
from dure.parallel.pipeline.stage import Microbatch, Stage
from dure.parallel.pipeline.trace_mismatch import first_mismatch
from dure.parallel.pipeline.without_cache import without_cache
from dure.parallel.tensor_comparison import (
    TensorDifference,
    first_difference,
    tolerance_of,
    tolerance_same_code,
    tolerance_same_operations,
)
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.tasks.loss_shares import ComputedLoss, LossShare
from dure.tensors.python_state import first_change, python_state_of

ADVICE = "or trust the trace with check=False (--no-check)"


class PassInputs(NamedTuple):
    """Inputs and conditions of a pass.

    when: the pass in words, for messages. inputs: the model's inputs. examples: the number of
    examples. training: whether the model is in training mode. draws: a number that seeds the random
    numbers.
    """

    when: str
    inputs: Any
    examples: int
    training: bool
    draws: int


class PassOutputs(NamedTuple):
    """Result of a pass: the leaves of the outputs, the structure of the outputs, and gradients."""

    leaves: Sequence[Any]
    structure: TreeSpec
    gradients: Mapping[str, Tensor | None]


def prove_cut(
    cut: CutModel,
    model: nn.Module,
    others: Any,
    evaluation: int,
    parts_gradients: bool,
    recompute: bool,
) -> None:
    """Raise ValueError, in one line, if the stages do not compute the results of the model.

    Args:
        cut: the cut model, after `decide`; this check leaves it changed.
        model: a second, unused model equal to the cut model; this check leaves it changed.
        others: inputs of a second micro-batch.
        evaluation: the number of examples of an evaluation; 0 for none.
        parts_gradients: whether the stages will split gradients of inputs and weights.
        recompute: whether the stages will recompute activations.
    """
    count = cut.examples
    first = PassInputs("training", cut.inputs(count, True), count, True, 0)
    last = PassInputs("a later step of training", others, count, True, 2)
    tests = None
    if evaluation:
        tests = PassInputs("evaluation", cut.inputs(evaluation, False), evaluation, False, 1)
    before = generators_state()
    try:
        with torch.enable_grad():
            _prove(_Whole(model, cut), _Stages(cut, parts_gradients, recompute), first, tests, last)
    finally:
        restore_generators(before)


def _prove(
    whole: _Whole, stages: _Stages, first: PassInputs, tests: PassInputs | None, last: PassInputs
) -> None:
    """Run the passes of the model, then of the stages; raise ValueError at a difference."""
    # The model runs first, so that its first pass really is its first. All its passes precede those
    # of the stages, because the stages keep the initial weights until they run.
    passes = [(first, whole.run(first, descends=True))]
    whole.repeat(*passes[0])
    if tests is not None:
        passes.append((tests, whole.run(tests)))
        whole.repeat(*passes[1])
    _update(whole.model)
    passes.append((last, whole.run(last)))
    for on, right in passes:
        if on is last:
            _update(stages.cut.model)
        # In evaluation, without gradients, torch may fuse several operations.
        outputs = tolerance_same_operations if on.training else tolerance_of
        tried = stages.run(on, descends=bool(right.gradients))
        found = _difference(right, tried, outputs)
        if found is not None:
            raise whole.refusal(
                f"in {on.when} the model returns {found} than its trace{whole.foreign(on)}: a "
                "trace does not contain what is not an operation on tensors, or happens only "
                "outside tracing; write it as operations on tensors and buffers"
            )
    found = _state_difference(whole.model, stages.cut.model)
    if found is not None:
        raise whole.refusal(f"forward passes leave {found} in the model than in its trace")


class _Whole:
    """Passes of the model itself."""

    def __init__(self, model: nn.Module, cut: CutModel) -> None:
        self.model = model
        self.cut = cut
        # The owner of each buffer, because a pass may replace the buffer by another tensor.
        self._places = [
            (module, name, tensor)
            for module in model.modules()
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]
        self._known = [name for name, _ in model.named_buffers(remove_duplicate=False)]
        self._untouched = python_state_of(model, self._known)
        _copy_weights(self.cut.model, model)

    def run(self, on: PassInputs, descends: bool = False) -> PassOutputs:
        """Run a pass; with gradients of the parameters if it `descends`.

        Records the buffers' values from before the pass, and the Python state after the pass.
        """
        self._before = [module._buffers[name].clone() for module, name, _ in self._places]  # type: ignore[union-attr]
        self.model.train(on.training)
        with torch.set_grad_enabled(on.training):
            leaves, structure = self._outputs(on)
            if descends and (end := _weighed(leaves)) is not None:
                end.backward()  # type: ignore[no-untyped-call]
        gradients = _taken_gradients(self.model) if descends else {}
        self.kept = python_state_of(self.model, self._known)
        return PassOutputs([_detached(leaf) for leaf in leaves], structure, gradients)

    def repeat(self, on: PassInputs, before: PassOutputs) -> None:
        """Raise ValueError if a repetition of pass `before` gives other results or state."""
        # A backward pass may change buffers too, by recomputing forward. It is not repeated, so
        # save the present values here and restore them below.
        left = [module._buffers[name].clone() for module, name, _ in self._places]  # type: ignore[union-attr]
        for (module, name, tensor), value in zip(self._places, self._before, strict=True):
            module._buffers[name] = tensor
            tensor.data.copy_(value)
        if on.training:
            # A pass may have changed parameters; the cut model has not run yet.
            _copy_weights(self.cut.model, self.model)
        kept = self.kept
        again = self.run(on)
        changed = first_change(kept, self.kept)
        if changed is not None:
            raise self.refusal(
                f"in {on.when} each forward pass changes {changed}, which a trace contains only "
                "with its value at tracing; keep it in a buffer, by operations on tensors"
            )
        found = _difference(before, again, tolerance_same_code)
        if found is not None:
            keeps = first_change(self._untouched, self.kept)
            raise self.refusal(
                f"in {on.when} the model itself returns {found} when a pass is repeated with the "
                "same examples, buffers and random numbers, so it depends on what passes keep in "
                f"Python{f', such as {keeps}' if keeps else ', on time or on other draws'}; keep "
                "such things in buffers"
            )
        for (module, name, _), value in zip(self._places, left, strict=True):
            module._buffers[name].data.copy_(value)  # type: ignore[union-attr]

    def refusal(self, why: str) -> ValueError:
        """Return the error that rejects the model for the reason `why`, with advice."""
        return ValueError(f"a {type(self.model).__name__} cannot be cut, for {why}, {ADVICE}")

    def foreign(self, on: PassInputs) -> str:
        """Return the first module that differs from the trace, as ", first in …"; "" if none."""
        _copy_weights(self.cut.model, self.model)
        self.model.train(on.training)
        seed_generators(0, "proof", on.draws, everything=True)
        trace = self.cut.trace(on.examples, on.training)
        with without_cache(self.model):
            module = first_mismatch(self.model, trace, _fresh(on.inputs))
        return f", first in {module}" if module else ""

    def _outputs(self, on: PassInputs) -> tuple[list[Any], TreeSpec]:
        """Return the model's outputs for seeded random numbers, as leaves and their structure."""
        seed_generators(0, "proof", on.draws, everything=True)
        try:
            with without_cache(self.model):
                return tree_flatten(self.model(_fresh(on.inputs)))
        except Exception as error:
            place = place_of(error, self.model)
            said = first_line(error)
            raise ValueError(
                f"a {type(self.model).__name__} fails in {on.when}"
                f"{f', in {place}' if place else ''}: {type(error).__name__}: {said}"
            ) from error


WHOLE = LossShare(1.0, 1.0)
"""Share of a micro-batch that is the whole batch."""


class _Stages:
    """Passes of the stages, one after another in this process."""

    def __init__(self, cut: CutModel, parts_gradients: bool, recompute: bool) -> None:
        self.cut = cut
        self._recompute = recompute
        # A single generator serves all stages, so the stages draw the numbers that the model draws.
        self._stream = RandomStream(0, carried=True)
        self._remaining: DeferredGradients | None = [] if parts_gradients else None
        self._stages = {training: self._all(training) for training in (True, False)}

    def _all(self, training: bool) -> list[Stage]:
        return [self._one(number, training) for number in range(self.cut.stages)]

    def _one(self, number: int, training: bool) -> Stage:
        gradient_handler = compute_now if self._remaining is None else self._remaining.append
        return Stage(
            number,
            last=number == self.cut.stages - 1,
            program_for=lambda examples: self.cut.program(
                number, examples, training, self._stream, gradient_handler if training else None
            ),
            structure_for=lambda examples: self.cut.structure(examples, training),
            loss=self._end,
            stream=self._stream,
            remaining=self._remaining if training else None,
            recompute=self._recompute,
            trains=training,
        )

    def run(self, on: PassInputs, descends: bool) -> PassOutputs:
        """Run a pass; with gradients of the parameters if it `descends`."""
        self._returns = False
        stages = self._stages[on.training]
        batch = Microbatch(on.examples, WHOLE, lambda: (_fresh(on.inputs), None))
        seed_generators(0, "proof", on.draws, everything=True)
        values: list[Tensor] = []
        with torch.set_grad_enabled(on.training):
            for stage in stages:
                stage.begin(0)
                values = stage.forward(0, batch, values)
            if descends and self._returns:
                for stage in reversed(stages):
                    values = stage.backward(0, batch, values)
        gradients = _taken_gradients(self.cut.model) if descends else {}
        return PassOutputs([_detached(leaf) for leaf in self._leaves], self._structure, gradients)

    def _end(self, outputs: Any, targets: Any, examples: int, share: LossShare) -> ComputedLoss:
        """Return the random weighted sum of the outputs, in place of the last stage's loss."""
        self._leaves, self._structure = tree_flatten(outputs)
        end = _weighed(self._leaves)
        self._returns = end is not None
        return ComputedLoss(torch.zeros(()) if end is None else end, 1.0)


def _weighed(leaves: Sequence[Any]) -> Tensor | None:
    """Return the randomly weighted sum of the differentiable outputs; None without any."""
    weights = torch.Generator().manual_seed(0)
    ends = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            # drawn for every leaf, so that each has the same, whichever have a gradient
            weight = torch.randn(leaf.shape, dtype=leaf.dtype, generator=weights).to(leaf.device)
            if leaf.requires_grad:
                total = (leaf * weight).sum()
                ends.append(total.real if total.is_complex() else total)
    return torch.stack([end.double() for end in ends]).sum() if ends else None


def _taken_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the parameters' gradients and remove them from the model."""
    gradients = {
        name: None
        if (gradient := parameter.grad) is None
        else gradient.to_dense()
        if gradient.is_sparse
        else gradient
        for name, parameter in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return gradients


def _fresh(inputs: Any) -> Any:
    """Return copies of the inputs, because a model may write into its inputs."""
    return tree_map_only(Tensor, torch.clone, inputs)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


@torch.no_grad()
def _copy_weights(source: nn.Module, model: nn.Module) -> None:
    theirs = dict(source.named_parameters())
    for name, mine in model.named_parameters():
        # A pass may have created a parameter.
        if name in theirs:
            mine.data.copy_(theirs[name])


@torch.no_grad()
def _update(model: nn.Module) -> None:
    """Change the parameters, equally in every model, as training would."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            # each element by another factor, of its sign, and none of them by much
            factors = torch.linspace(0.9, 1.1, parameter.numel(), dtype=parameter.dtype)
            parameter.data.mul_(factors.to(parameter.device).view_as(parameter))


def _difference(
    right: PassOutputs, tried: PassOutputs, outputs: Callable[[torch.dtype], float]
) -> str | None:
    """Return the first difference of two results, in words; None without a difference.

    outputs: the tolerance of outputs, by dtype.
    """
    if right.structure != tried.structure:
        return "outputs of another form"
    paths, _ = tree_flatten_with_path(right.structure.unflatten(list(right.leaves)))
    for (path, one), other in zip(paths, tried.leaves, strict=True):
        what = f"another output{' ' if path else ''}{keystr(path)}"
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            found = first_difference({"": one}, {"": other}, tolerance=outputs)
            if found is not None:
                return f"{what} ({_by(found)})"
        elif type(one) is not type(other) or one != other:
            return what
    if right.gradients and tried.gradients:
        found = first_difference(right.gradients, tried.gradients)
        if found is not None:
            return f"another gradient of {found.name} ({_by(found)})"
    return None


def _state_difference(model: nn.Module, cut: nn.Module) -> str | None:
    """Return the first parameter or buffer that differs after all passes, in words."""
    for right, tried in (
        (dict(model.named_parameters()), dict(cut.named_parameters())),
        (dict(model.named_buffers()), dict(cut.named_buffers())),
    ):
        # A buffer that a pass has created exists in the model alone (`dure.tensors.buffers`).
        both = [name for name in right if name in tried]
        found = first_difference(
            {name: right[name] for name in both}, {name: tried[name] for name in both}
        )
        if found is not None:
            return f"another {found.name} ({_by(found)})"
    return None


def _by(found: TensorDifference) -> str:
    return f"by {found.share:.0e} of its largest value"
