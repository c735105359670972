"""Comparison of a model divided by a plan with the undivided model, before training.

    undivided   forward and backward on some examples, forward once more in evaluation
    divided     the same passes of a model that the ranks divide by the plan
    compared    the gradient of every parameter (each rank compares its part); the loss; the loss
                and the outputs of evaluation; buffers; tensors that all ranks have whole, between
                the ranks; the random numbers of each rank; the norm of the gradient

Every rank compares its own tensors, and all ranks agree on the outcome: the first parameter in the
model's order that is wrong on any rank, even on a single rank.

Random draws return constants during the comparison (`dure.parallel.deterministic_draws`), because
ranks draw different numbers for their parts. The manner of drawing is compared nevertheless: all
ranks must draw equal numbers for whole tensors, and different numbers for parts.

The model itself does not change, because copies of it run. In addition a rank needs memory for its
part of the weights and of the gradients, and for the activations of the undivided model. The meter
counts nothing.

Cost: a step of a single worker, a step of the divided model, and a forward pass of each.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dure.collectives.all_reduce import all_reduce
from dure.collectives.group import Group
from dure.errors import DureError, PlanError, described
from dure.parallel.deterministic_draws import RecordedDraw
from dure.parallel.tensor.dividing import divide, fits
from dure.parallel.tensor.plan import DivisionPlan, entries_of
from dure.parallel.tensor.proof_pass import (
    LossOf,
    ModelCopies,
    ModelFactory,
    ProofExamples,
    ProofPass,
    outputs_of,
    preserved_generators,
    run_pass,
)
from dure.parallel.tensor.state import divisions, gradient_norm
from dure.parallel.tensor.written_plan import entry_text
from dure.parallel.tensor_comparison import SMALL, first_difference, tolerance_of
from dure.parallel.weight_broadcast import share_weights

ADVICE = "correct the plan, or use it unchanged with check=False (--no-check)"


def prove_plan(
    model: nn.Module,
    plan: DivisionPlan,
    inputs: Any,
    loss: LossOf,
    process_group: Group | dist.ProcessGroup | None = None,
    *,
    divided_loss: LossOf | None = None,
    evaluates: bool = True,
    make: ModelFactory | None = None,
    agreeing: Group | None = None,
) -> None:
    """Check that a model computes the same if the ranks of a group divide it by a plan.

    All ranks call this function before `parallelize`, with models of equal shapes and equal inputs.
    All ranks take rank 0's weights and buffers. Otherwise the model and the generators stay
    unchanged.

    Args:
        model: the undivided model.
        plan: the plan to check.
        inputs: inputs of a few examples, as the model takes them, as a single argument.
        loss: the loss of the model's outputs; the function knows the targets.
        process_group: the ranks that divide the model; None is all ranks.
        divided_loss: the loss of the divided model, if the plan leaves its outputs divided, as
            `Output(gather=False)` does.
        evaluates: whether evaluation is checked as well.
        make: returns the same model once more, for models that cannot be copied.
        agreeing: the ranks that agree on the outcome, if several groups check the same plan; None
            is the group.

    Raises:
        PlanError: on all ranks, if the two models differ (a ValueError). The message names the
            first parameter with another gradient, and its plan entries.
        ValueError: as for `parallelize`, and for a model that cannot be copied, without `make`.
    """
    group = Group.of(process_group).unmetered()
    share_weights(model, group)
    with preserved_generators(model):
        twins = ModelCopies(model, make)
        examples = ProofExamples(inputs, evaluates)
        trial = _Trial(twins, plan, examples, loss, divided_loss, group)
        if twins.put_back():
            # A forward pass had written into parameters that both models shared.
            share_weights(model, group)
            trial = _Trial(twins, plan, examples, loss, divided_loss, group)
        trial.judge(agreeing or group)


class _Wrong(NamedTuple):
    """First difference on a rank, as numbers that ranks can exchange; inf stands for none.

    what: the kind of difference. first, last: indices of the first and last differing parameter,
    output or buffer. share: the size of the first difference, as a share of its largest value.
    """

    what: float = math.inf
    first: float = math.inf
    last: float = -math.inf
    share: float = 0.0


_ALONE, _GRADIENT, _LOSS, _EVALUATION, _BUFFER, _RANKS, _DRAW, _NORM = range(8)


class _Trial:
    """Passes of both models on this rank, and their differences."""

    def __init__(
        self,
        twins: ModelCopies,
        plan: DivisionPlan,
        examples: ProofExamples,
        loss: LossOf,
        divided_loss: LossOf | None,
        group: Group,
    ) -> None:
        self.twins = twins
        self.plan = plan
        self.inputs = examples.inputs
        self.group = group
        # Outputs that stay divided cannot equal the outputs of the undivided model.
        self.outputs_alike = divided_loss is None
        divided = twins.one()
        divide(divided, plan, group)
        self.parts = divisions(divided)
        self.squares: dict[str, float] = {}
        undivided = twins.one()
        self.right = run_pass(undivided, examples, loss, self._own_part)
        self.names = _names(undivided)
        self.tried = self._passed(divided, examples, divided_loss or loss)
        for name, parameter in divided.named_parameters():
            parameter.grad = self.tried.gradients[name]
        self.norm = float(gradient_norm(divided, group))

    def _own_part(self, name: str, gradient: Tensor) -> Tensor:
        """Return this rank's part of a whole gradient, and record the square of its norm."""
        # If a gradient arrives in several terms, the norm of their sum is unknown.
        several = name in self.squares
        self.squares[name] = math.nan if several else float(gradient.norm()) ** 2
        return self._part(name, gradient)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the undivided model."""
        if name not in self.parts:
            return whole
        return self.parts[name][0].part(whole, self.group.rank, self.group.size)

    def _passed(self, divided: nn.Module, examples: ProofExamples, loss: LossOf) -> ProofPass:
        try:
            return run_pass(divided, examples, loss)
        except DureError:
            raise
        except Exception as error:
            name = _module_that_failed(divided, error)
            where = "" if name is None else f" in {name} ({plan_text_for(self.plan, [f'{name}.'])})"
            raise PlanError(
                f"divided by the plan, the model fails{where}, which it does not undivided: "
                f"{described(error)}: {ADVICE}"
            ) from error

    @property
    def computed_in(self) -> torch.dtype | None:
        """Coarsest dtype in which either model computed."""
        found = self.right.settled.computed_in, self.tried.settled.computed_in
        return max(filter(None, found), key=tolerance_of, default=None)

    def judge(self, agreeing: Group) -> None:
        """Agree with all ranks on the first difference. Raises PlanError if there is any."""
        # The collective comparison comes first, because all ranks must take part in it.
        between = self._ranks()
        mine = self._gradients() or self._loss() or self._evaluation() or self._buffers()
        mine = mine or self._draws() or self._norm() or _Wrong()
        if between is not None:
            mine = min(mine, between)
        told = [_Wrong(*row) for row in agreeing.all_gather_values(list(mine), "the proof")]
        first = min(told)[:2]
        if first == _Wrong()[:2]:
            return
        those = [rank for rank, wrong in enumerate(told) if wrong[:2] == first]
        wrong = _Wrong(
            *first,
            last=max(told[rank].last for rank in those),
            share=max(told[rank].share for rank in those),
        )
        where = "" if len(those) == len(told) else f" on rank {', '.join(map(str, those))}"
        raise PlanError(f"{self._words(wrong, where, agreeing)}: {ADVICE}")

    # Comparisons.

    def _gradients(self) -> _Wrong | None:
        right = self.right.gradients
        tried = self.tried.gradients
        found = first_difference(right, tried, self.computed_in)
        if found is None:
            return None
        names = list(right)
        last = first_difference(dict(reversed(right.items())), tried, self.computed_in)
        assert last is not None
        return _Wrong(_GRADIENT, names.index(found.name), names.index(last.name), found.share)

    def _loss(self) -> _Wrong | None:
        return self._apart(_LOSS, [self.right.loss], [self.tried.loss])

    def _evaluation(self) -> _Wrong | None:
        """Compare the loss in evaluation, then the outputs with equal shapes."""
        right = self.right.evaluated
        tried = self.tried.evaluated
        found = self._apart(_EVALUATION, right[:1], tried[:1])
        if found is not None or not self.outputs_alike:
            return found
        if len(right) != len(tried):
            return _Wrong(_EVALUATION, 1)
        # Some outputs may differ in shape between ranks, such as cached keys and values of a rank's
        # heads. The loss, which is compared above, covers their effect.
        alike = [mine.shape == theirs.shape for mine, theirs in zip(tried, right, strict=True)]
        right = [one if same else one.new_empty(0) for one, same in zip(right, alike, strict=True)]
        tried = [one if same else one.new_empty(0) for one, same in zip(tried, alike, strict=True)]
        return self._apart(_EVALUATION, right, tried)

    def _apart(self, what: int, right: Sequence[Tensor], tried: Sequence[Tensor]) -> _Wrong | None:
        found = first_difference(
            {str(place): one for place, one in enumerate(right)},
            {str(place): one for place, one in enumerate(tried)},
            self.computed_in,
        )
        return None if found is None else _Wrong(what, int(found.name), share=found.share)

    def _buffers(self) -> _Wrong | None:
        right = {name: self._part(name, one) for name, one in self.right.buffers.items()}
        tried = self.tried.buffers
        # A buffer of another shape belongs to this rank alone, for example a mask for its heads.
        tried = {name: one for name, one in tried.items() if _alike(one, right.get(name))}
        found = first_difference({name: right[name] for name in tried}, tried, self.computed_in)
        if found is None:
            return None
        return _Wrong(_BUFFER, list(self.right.buffers).index(found.name), share=found.share)

    def _ranks(self) -> _Wrong | None:
        """Compare the undivided loss, and gradients of whole parameters by norm, between ranks."""
        whole = [name for name in self.right.gradients if name not in self.parts]
        norms = [float(self.right.loss)]
        for name in whole:
            gradient = self.tried.gradients[name]
            norms.append(0.0 if gradient is None else float(gradient.norm()))
        rows = self.group.all_gather_values(norms, "the proof")
        loss, *others = zip(*rows, strict=True)
        allowed = tolerance_of(self.computed_in or self.right.loss.dtype)
        if max(loss) - min(loss) > allowed * max(map(abs, loss)):
            return _Wrong(_ALONE, 0)
        floor = SMALL * max(map(max, others), default=0.0)
        places = {name: place for place, name in enumerate(self.right.gradients)}
        for name, values in zip(whole, others, strict=True):
            if max(values) - min(values) > allowed * max(*values, floor):
                return _Wrong(_RANKS, places[name])
        return None

    def _draws(self) -> _Wrong | None:
        """Return the first draw of equal numbers for parts, or different ones for whole tensors."""
        right = self.right.settled.drawn
        tried = self.tried.settled.drawn
        if self.group.size == 1 or len(right) != len(tried):
            return None
        for place, (whole, mine) in enumerate(zip(right, tried, strict=True)):
            # A rank with its own draws has reseeded the generator.
            if (whole.shape == mine.shape) != (whole.seed == mine.seed):
                return _Wrong(_DRAW, place)
        return None

    def _norm(self) -> _Wrong | None:
        """Compare the norm of the whole gradient."""
        right = math.sqrt(sum(self.squares.values()))
        allowed = tolerance_of(self.computed_in or self.right.loss.dtype) * right
        # The comparison is false if `right` is unknown (nan) or infinite.
        return _Wrong(_NORM, 0) if abs(self.norm - right) > allowed else None

    # Messages.

    def _words(self, wrong: _Wrong, where: str, agreeing: Group) -> str:
        place = int(wrong.first)
        if wrong.what == _ALONE:
            return (
                "undivided, the model's loss differs between the ranks, which divide one model: "
                "give all ranks the same inputs"
            )
        if wrong.what == _GRADIENT:
            return self._of_gradient(wrong, where, agreeing)
        if wrong.what == _RANKS:
            name = list(self.right.gradients)[place]
            return (
                f"{self._said(name)}; its gradient is not the same on all ranks, which all have it"
            )
        if wrong.what == _DRAW:
            return self._of_draw(place)
        if wrong.what == _LOSS:
            what = f"loss{where}, {self._losses()}"
        elif wrong.what == _EVALUATION:
            what = f"{f'output {place}' if place else 'loss'} in evaluation{where}"
        elif wrong.what == _BUFFER:
            what = f"buffer {list(self.right.buffers)[place]} after a pass{where}"
        else:
            what = f"norm of the gradient, {self.norm:.6g}"
        return f"divided by the plan, the model has another {what}{self._where(agreeing)}"

    def _of_gradient(self, wrong: _Wrong, where: str, agreeing: Group) -> str:
        names = list(self.right.gradients)
        name = names[int(wrong.first)]
        by = (
            f"by {wrong.share:.2g} of its largest value" if math.isfinite(wrong.share) else "wholly"
        )
        words = f"{self._said(name)}; its gradient differs {by}{where}{self._hint(name, agreeing)}"
        if wrong.last > wrong.first:
            words += f"; the last that differs is that of {names[int(wrong.last)]}"
        if self._loss() is not None:
            words += f"; the loss differs as well, {self._losses()}"
        return words + self._where(agreeing)

    def _said(self, name: str) -> str:
        return f"{name}: {plan_text_for(self.plan, self.names[name])}"

    def _where(self, agreeing: Group) -> str:
        """Return the first module with a different output; all ranks search together."""
        right = outputs_of(self.twins.one(), self.inputs)
        divided = self.twins.one()
        divide(divided, self.plan, self.group)
        tried = outputs_of(divided, self.inputs)
        # An output of another shape is a part, and is not compared.
        right = {key: one for key, one in right.items() if _alike(one, tried.get(key))}
        found = first_difference(right, tried, self.computed_in)
        # By index among all outputs of the divided model, which is equal on all ranks.
        keys = list(tried)
        mine = math.inf if found is None else keys.index(found.name)
        first = min(row[0] for row in agreeing.all_gather_values([float(mine)], "the proof"))
        if first == math.inf:
            return ""
        key = keys[int(first)]
        name = key.partition(",")[0]
        return (
            f"; the first output that differs is that of {key} "
            f"({plan_text_for(self.plan, [f'{name}.'])})"
        )

    def _losses(self) -> str:
        return f"{float(self.tried.loss):.6g} instead of {float(self.right.loss):.6g}"

    def _hint(self, name: str, agreeing: Group) -> str:
        """Return a change that would correct the gradient; all ranks try it together."""
        right = self.right.gradients[name]
        if right is None or name in self.parts or self.group.size == 1:
            return ""
        tried = self.tried.gradients[name]
        tried = torch.zeros_like(right) if tried is None else tried.contiguous()
        total = all_reduce(tried.clone(), self.group, "native")

        def is_right(gradient: Tensor) -> bool:
            return first_difference({name: right}, {name: gradient}, self.computed_in) is None

        summed = is_right(total)
        too_often = is_right(tried / self.group.size)
        rows = agreeing.all_gather_values([float(summed), float(too_often)], "the proof")
        if all(row[0] for row in rows):
            return (
                f" (the sum over the ranks is right, as {self._on_shards(name)} makes it, or "
                "Enter() of a divided region that comes after it)"
            )
        if all(row[1] for row in rows):
            return f" (it is {self.group.size} times too large: it is summed once too often)"
        return ""

    def _on_shards(self, name: str) -> str:
        """Return the plan entry that sums the gradient of a parameter."""
        module, _, own = name.rpartition(".")
        within = f"{module}." if module else ""
        # A module with submodules may compute on shards although its submodules do not.
        others = (other for other in self.right.gradients if other.startswith(within))
        alone = all("." not in other.removeprefix(within) for other in others)
        return "OnShards() of its module" if alone else f"OnShards({own!r}) of its module"

    def _of_draw(self, place: int) -> str:
        whole: RecordedDraw = self.right.settled.drawn[place]
        mine = self.tried.settled.drawn[place]
        if whole.shape == mine.shape:
            return (
                f"random numbers of the shape {list(whole.shape)}, in {mine.by}, are for what all "
                "ranks have whole, but by the plan each rank draws others"
            )
        return (
            f"random numbers of the shape {list(mine.shape)}, in {mine.by}, are for a part of "
            f"{list(whole.shape)}, but by the plan all ranks draw the same (OwnDraws)"
        )


def _module_that_failed(model: nn.Module, error: BaseException) -> str | None:
    """Return the innermost submodule that was being called; None if there was none."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        found = names.get(id(owner), found)
    return found


def _alike(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and one.dtype == other.dtype


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, by its first name."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in found.values()}


def plan_text_for(plan: DivisionPlan, names: Sequence[str]) -> str:
    """Return the plan's entries for a parameter, or for the nearest enclosing module.

    names: all names of the parameter.
    """
    # First its own module, then the enclosing modules.
    modules = [name.rpartition(".")[0] for name in names]
    own = True
    while modules:
        for module in modules:
            kinds = [
                entry_text(kind)
                for pattern, each in plan.items()
                if fits(module, pattern)
                for kind in entries_of(each)
            ]
            if kinds:
                of = "" if own else f" of {module or 'the model'}, and nothing of it"
                return f"the plan has {' and '.join(kinds)}{of}"
        modules = [module.rpartition(".")[0] for module in modules if module]
        own = False
    return "the plan has no entry for it"
