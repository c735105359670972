"""Checks whether a model, its examples and its optimizer fit a mesh, before any work.

Each check raises ValueError with the cause and a remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from dure.data.examples import Examples
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.optimizer_sharding import check_element_wise, check_parameter_wise
from dure.parallel.pipeline.aliasing import subgraph_of
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.trace import owner_of
from dure.parallel.tensor.dividing import check_lengths, check_plan, fits
from dure.parallel.tensor.plan import DivisionPlan, divides_sequences
from dure.randomness.seeds import generators_state, restore_generators

EVALUATED = 2
"""Number of examples on which evaluation is checked: batches of evaluation have other lengths."""


def check_optimizer(optimizer: Optimizer, mesh: Mesh, zero: int) -> None:
    """Check that the optimizer can work on a mesh.

    A division inside parameters needs an optimizer that updates every element independently; stages
    need an optimizer that updates every parameter independently.
    """
    if mesh.tensor > 1 or zero:
        check_element_wise(optimizer)
    elif mesh.pipeline > 1:
        check_parameter_wise(optimizer)


def check_layers(
    model: nn.Module, plan: DivisionPlan, degree: int, examples: Sequence[Examples | None]
) -> None:
    """Check that the plan fits the layers, and divided sequences the lengths of the examples."""
    check_plan(model, plan, degree)
    if not divides_sequences(plan):
        return
    for each in examples:
        if each is not None and len(each):
            check_lengths(model, plan, degree, sample(each, 1))


def check_regions(nodes: Iterable[fx.Node], plan: DivisionPlan) -> None:
    """Check that no layer of the plan computes within an operation that has a graph of its own.

    A stage calls such an operation, for example a region of `torch.no_grad()`, as a whole.

    nodes: operations of a trace of the undivided model.
    """
    for node in nodes:
        inside = subgraph_of(node)
        if inside is None:
            continue
        for within in inside[0].nodes:
            owner = owner_of(within)
            if any(fits(owner, pattern) for pattern in plan):
                raise ValueError(
                    f"the plan divides {owner}, which the model computes within torch.no_grad(), "
                    "and a stage of a pipeline cannot divide that: use a mesh without a pipeline, "
                    "or leave the layer out of the plan"
                )
        check_regions(inside[0].nodes, plan)


def check_cut(cut: CutModel, replicas: int, recompute: bool, evaluates: bool) -> None:
    """Check a decided cut: parameters that forward passes change, and evaluation's trace."""
    if cut.changed and (replicas > 1 or recompute):
        what = "replicas would diverge" if replicas > 1 else "recomputation would change it again"
        raise ValueError(f"{cut.changed[0]} changes in a forward pass (as by max_norm), and {what}")
    if evaluates:
        try:
            # raises ValueError if the traces of evaluation and of training need different cuts
            cut.homes(EVALUATED, False)
        except ValueError as error:
            raise ValueError(f"in evaluation, {error}") from error


def sample(examples: Examples, count: int, backwards: bool = False) -> Any:
    """Return the inputs of the first `count` examples; generators do not advance.

    backwards: take the last examples in reverse order.
    """
    # Reading may draw, for example for augmentation, and must not change the draws of training.
    before = generators_state()
    indices = torch.arange(count) % len(examples)
    inputs, _ = examples.batch(len(examples) - 1 - indices if backwards else indices)
    restore_generators(before)
    return inputs
