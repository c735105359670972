"""Whether a model, its examples and its optimizer fit a mesh: found out before any work.

Each raises ValueError with what does not fit, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dure.data.examples import Examples
from dure.parallel.divisible import check_element_wise, check_parameter_wise
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.tensor.dividing import check_lengths, check_plan
from dure.parallel.tensor.plan import Plan, divides_sequences
from dure.randomness.seeds import generators_state, restore_generators

EVALUATED = 2
"""Examples on which evaluation is tried: batches of it have lengths of their own."""


def check_optimizer(optimizer: Optimizer, mesh: Mesh, zero: int) -> None:
    """The optimizer.

    What is divided inside of parameters wants one that treats every element for itself; stages want
    one that treats every parameter for itself.
    """
    if mesh.tensor > 1 or zero:
        check_element_wise(optimizer)
    elif mesh.pipeline > 1:
        check_parameter_wise(optimizer)


def check_layers(
    model: nn.Module, plan: Plan, degree: int, examples: Sequence[Examples | None]
) -> None:
    """The layers, and where sequences are divided, the lengths of the examples."""
    check_plan(model, plan, degree)
    if not divides_sequences(plan):
        return
    for each in examples:
        if each is not None and len(each):
            check_lengths(model, plan, degree, sample(each, 1))


def check_cut(cut: CutModel, replicas: int, recompute: bool, evaluates: bool) -> None:
    """A cut that is decided: parameters that forward passes change, and evaluation's trace."""
    if cut.changed and (replicas > 1 or recompute):
        what = "replicas would go apart" if replicas > 1 else "recomputation would change it again"
        raise ValueError(f"{cut.changed[0]} changes in a forward pass (as by max_norm), and {what}")
    if evaluates:
        try:
            # raises where the traces of evaluation and of training do not go together
            cut.homes(EVALUATED, False)
        except ValueError as error:
            raise ValueError(f"in evaluation, {error}") from error


def sample(examples: Examples, count: int, backwards: bool = False) -> Any:
    """Inputs of so many examples, the first ones; no generator is advanced.

    backwards: the last ones, from the last on.
    """
    # Reading may draw, such as for augmentation, and must not change what training draws.
    before = generators_state()
    indices = torch.arange(count) % len(examples)
    inputs, _ = examples.batch(len(examples) - 1 - indices if backwards else indices)
    restore_generators(before)
    return inputs
