"""Blocks that a model skips at random, as LayerDrop does.

    for block in self.layers:
        if self.training and torch.rand([]) < self.layerdrop:
            continue
        hidden = block(hidden)

Whether a block is called depends on a number in a tensor, and a trace does not have that number. So
the trace contains both: the number and the comparison as operations, which draw from the model's
generator, and the block as a single operation (`dure.parallel.pipeline.opaque_modules`) that takes
the outcome as an input. If the block is not called, its first input of the same shape replaces its
result; or zeros do, for a model that computes hidden + block(hidden).

The model itself is run to check this interpretation, with forced outcomes: all blocks skipped, and
every second block skipped. The outputs must equal the outputs of a run in which the replacement
stands for these blocks. A module that fails this check decides something else and is no chooser.

Source: Fan et al. 2019, "Reducing Transformer Depth on Demand with Structured Dropout".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from dure.parallel.pipeline.model_location import module_of
from dure.parallel.pipeline.observation import run_copy
from dure.parallel.pipeline.opaque_modules import ObservedCall, OpaqueTensorSpec, Skip, skipped
from dure.parallel.pipeline.patching import patched_modules
from dure.parallel.tensor_comparison import first_difference, tolerance_same_code
from dure.randomness.seeds import generators_state, restore_generators

Outcome = Callable[[int], bool]
"""Outcome of a decision as a function of the decision's number in a pass."""


@dataclass(frozen=True)
class BlockChooser:
    """Module that decides which of its blocks it calls.

    name: the module's name. called_if: the outcome of a decision with which its block is called.
    skip: the replacement of a skipped block's result. guards: the decision before each call that
    depends on a decision, by the block's name and the call's number among the calls of that block.
    """

    name: str
    called_if: bool
    skip: Skip
    guards: Mapping[tuple[str, int], int]


@torch.library.custom_op("dure::decision", mutates_args=())
def _decision(value: Tensor) -> Tensor:
    return value.clone()


@_decision.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


class Decisions:
    """Decisions of a module's code on tensors in a pass, and their prescribed outcomes."""

    def __init__(self, module: nn.Module, outcome: Outcome) -> None:
        self.module = module
        self.values: list[Tensor] = []
        """Tensors on which the module decided, in order."""
        self._outcome = outcome
        self._numbers: dict[int, int] = {}
        self._asked: list[Tensor] = []

    def decide(self, tensor: Tensor) -> bool:
        """Return the outcome for a tensor; repeated calls return the same outcome."""
        if id(tensor) not in self._numbers:
            # Keep a reference: a freed tensor would leave its id to another tensor.
            self._asked.append(tensor)
            self._numbers[id(tensor)] = len(self.values)
            self.values.append(torch.ops.dure.decision(tensor))
        return self._outcome(self._numbers[id(tensor)])

    def forget(self) -> None:
        """Clear the state at the end of a pass."""
        self.values.clear()
        self._numbers.clear()
        self._asked.clear()


@contextmanager
def record_decisions(all_decisions: Sequence[Decisions]) -> Iterator[None]:
    """Context manager: `bool` or `item` of a tensor in the code of these modules is a decision."""
    by_module = {id(decisions.module): decisions for decisions in all_decisions}
    before = {name: vars(Tensor).get(name) for name in ("__bool__", "item")}
    ask = Tensor.__bool__
    read = Tensor.item

    def is_true(tensor: Tensor) -> bool:
        decisions = by_module.get(id(module_of(sys._getframe(1))))
        return ask(tensor) if decisions is None else decisions.decide(tensor)

    def item(tensor: Tensor) -> Any:
        decisions = by_module.get(id(module_of(sys._getframe(1))))
        return read(tensor) if decisions is None else _Number(tensor, decisions)

    setattr(Tensor, "__bool__", is_true)  # noqa: B010
    setattr(Tensor, "item", item)  # noqa: B010
    try:
        yield
    finally:
        for name, method in before.items():
            # Tensor inherits both methods, so its own dictionary has neither unless it was patched.
            delattr(Tensor, name) if method is None else setattr(Tensor, name, method)


class _Number:
    """Number in a tensor of a trace; only comparisons work, as the value is unknown."""

    def __init__(self, tensor: Tensor, decisions: Decisions) -> None:
        self._tensor = tensor
        self._decisions = decisions

    def __bool__(self) -> bool:
        return self._decisions.decide(self._tensor != 0)

    def __lt__(self, other: Any) -> bool:
        return self._decisions.decide(self._tensor < other)

    def __le__(self, other: Any) -> bool:
        return self._decisions.decide(self._tensor <= other)

    def __gt__(self, other: Any) -> bool:
        return self._decisions.decide(self._tensor > other)

    def __ge__(self, other: Any) -> bool:
        return self._decisions.decide(self._tensor >= other)


Made = list[tuple[str, int, int]]
"""Calls that a module's code makes: the called module's name, the number of decisions made before,
and the number of the call among the calls of that module.
"""


def find_chooser(model: nn.Module, inputs: Any, name: str) -> BlockChooser | None:
    """Return how a module chooses among its blocks; None if its decisions do not choose blocks."""
    try:
        return _chooser(model, inputs, name)
    except Exception:  # with forced outcomes a module may fail in any way
        return None


def _chooser(model: nn.Module, inputs: Any, name: str) -> BlockChooser | None:
    runs = {each: _run(model, inputs, name, partial(always, each)) for each in (False, True)}
    called_if = len(runs[True].made) > len(runs[False].made)
    with_all = runs[called_if]
    without = set(runs[not called_if].made_at)
    guards = {
        (block, number): decisions - 1
        for block, decisions, number in with_all.made
        if (block, decisions) not in without
    }
    if not guards or min(guards.values()) < 0 or len(set(guards.values())) < len(guards):
        return None
    for skip in ("given", "zeros"):
        found = BlockChooser(name, called_if, skip, guards)
        if _holds(model, inputs, found, runs[not called_if].outputs):
            return found
    return None


@dataclass
class _Run:
    """Outputs of a pass, and the calls that the module's code made."""

    outputs: Any
    made: Made

    @property
    def made_at(self) -> list[tuple[str, int]]:
        """Return the calls as pairs of name and number of decisions before."""
        return [(block, decisions) for block, decisions, _ in self.made]


def _run(
    model: nn.Module,
    inputs: Any,
    name: str,
    outcome: Outcome,
    tried: BlockChooser | None = None,
    skips: Outcome = lambda _: False,
) -> _Run:
    """Run a pass with the given outcomes.

    Args:
        model: the model to run.
        inputs: inputs of the model.
        name: name of the module that decides.
        outcome: outcome of each decision.
        tried: a chooser to check; None runs the blocks as the model does.
        skips: the decisions whose block is replaced according to `tried`.
    """
    module = model.get_submodule(name)
    decisions = Decisions(module, outcome)
    made: Made = []
    counts: dict[str, int] = {}
    # the modules that are running, the innermost last
    stack: list[str] = []

    def around(child: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if stack:
                return function(*args, **kwargs)
            number = counts[child] = counts.get(child, -1) + 1
            made.append((child, len(decisions.values), number))
            before = generators_state()
            stack.append(child)
            try:
                outputs = function(*args, **kwargs)
            finally:
                stack.pop()
            guard = None if tried is None else tried.guards.get((child, number))
            if tried is None or guard is None or not skips(guard):
                return outputs
            # A block that is not called draws nothing.
            restore_generators(before)
            return _stand_in(tried.skip, args, kwargs, outputs)

        return noted

    prefix = f"{name}." if name else ""
    children = [f"{prefix}{path}" for path, _ in module.named_modules() if path]
    with patched_modules(model, children, around), record_decisions([decisions]), torch.no_grad():
        outputs = run_copy(model, inputs)
    return _Run(outputs, made)


def _stand_in(skip: Skip, args: Any, kwargs: Any, outputs: Any) -> Any:
    """Return the replacement of a block's result."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    leaves, structure = tree_flatten(outputs)
    likes = tuple(
        OpaqueTensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    )
    call = ObservedCall("", likes, structure, {}, (), (), (), (), False, 0.0)
    tensors = iter(skipped(call, skip, given))
    return structure.unflatten(
        [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    )


def _holds(model: nn.Module, inputs: Any, found: BlockChooser, all_skipped: Any) -> bool:
    """Return whether skipping blocks and replacing their results give equal outputs."""

    def every(_: int) -> bool:
        return True

    def even(number: int) -> bool:
        return number % 2 == 0

    def odd(number: int) -> bool:
        return number % 2 == 1

    for pattern in (every, even, odd):
        right = all_skipped
        if pattern is not every:
            forced = partial(_forced, found.called_if, pattern)
            right = _run(model, inputs, found.name, forced).outputs
        tried = _run(
            model,
            inputs,
            found.name,
            partial(always, found.called_if),
            tried=found,
            skips=pattern,
        ).outputs
        if not _alike(right, tried):
            return False
    return True


def always(outcome: bool, _: int) -> bool:
    """Return `outcome` for every decision."""
    return outcome


def _forced(called_if: bool, skips: Outcome, number: int) -> bool:
    return called_if != skips(number)


def _alike(right: Any, tried: Any) -> bool:
    one, form = tree_flatten(right)
    other, other_form = tree_flatten(tried)
    if form != other_form:
        return False
    tensors = [
        ({"": a}, {"": b})
        for a, b in zip(one, other, strict=True)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
    ]
    return all(first_difference(a, b, tolerance=tolerance_same_code) is None for a, b in tensors)
