"""Built-in plans, for models whose layers are known.

    dure's Transformer          query, key and value in a single matrix; output layer tied to the
                                embedding, or not
    models of Hugging Face      GPT-2, Llama, BERT, OPT, T5, ViT and Whisper (`hf_models`)
    nn.Sequential, dure's TwoNN linear layers in pairs, a column-parallel and a row-parallel layer

A transformer's layer enters and leaves twice, for its attention and its MLP: two all-reduces of
b·s·h elements forward and two backward (Shoeybi et al. 2019). In addition the embedding sums b·s·h
elements forward, and the output layer backward.

With `sequence`, every rank holds a shard of the sequence between those regions, in norms, dropout
and residuals, and their memory is divided as well: reduce-scatters and all-gathers replace the
all-reduces, and each parameter there costs an all-reduce of its gradient (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dure.parallel.tensor.attributes import Attributes
from dure.parallel.tensor.chain_plans import chain_plan, chains_of, is_sequential, pairs
from dure.parallel.tensor.changes import Cut, OnShards, OwnDraws
from dure.parallel.tensor.hf_models import plan_by_class
from dure.parallel.tensor.hf_plan import hugging_face_plan
from dure.parallel.tensor.plan import Column, DivisionPlan, Output, PlanEntry, Row, Vocabulary
from dure.parallel.tensor.written_plan import HUGGING_FACE, TensorPlan
from dure.tasks.models import Transformer, TwoNN


def plan_for(
    model: nn.Module, *, sequence: bool = False, gather_scores: bool = True
) -> DivisionPlan:
    """Return the built-in plan for a model of a known class or a subclass.

    sequence: whether ranks hold shards of the sequence between the divided regions. gather_scores:
    False leaves every rank its part of the scores, for `vocabulary_parallel_cross_entropy`. Raises
    ValueError if there is no such plan.
    """
    if isinstance(model, Transformer):
        return _transformer(model, sequence, gather_scores)
    by_class = plan_by_class(model, sequence, gather_scores)
    if by_class is not None:
        return by_class
    layers = model.layers if isinstance(model, TwoNN) else model
    if isinstance(layers, nn.Sequential) and is_sequential(layers) and not sequence:
        return _pairs(layers, "" if layers is model else "layers.")
    raise ValueError(
        f"there is no built-in plan{' with sequence=True' if sequence else ''} for a "
        f'{type(model).__name__}; write one: {{"layers.*.first": Column(), "layers.*.second": '
        "Row()} for modules one after the other; strategies take it as plan=, "
        "dure.parallel.tensor.parallelize in your own training loop"
    )


def plan_of(model: nn.Module, sequence: bool, own: TensorPlan) -> DivisionPlan:
    """Return the user-defined plan; otherwise the named plan for a model or a module inside it.

    Raises ValueError if there is no such plan, or if `sequence` cannot be combined with the plan.
    """
    if sequence and not own.is_ready:
        raise ValueError(
            "your own plan defines where sequences are divided: leave sequence out"
            if own.entries
            else f"the plan {own} divides no sequences: leave sequence out"
        )
    if own.entries:
        return own.plan
    if own.named == HUGGING_FACE:
        return hugging_face_plan(model)
    if own.is_ready:
        return _within(model, lambda module: plan_for(module, sequence=sequence))
    return _within(model, lambda module: chain_plan(own.named, module))


def _within(model: nn.Module, make: Callable[[nn.Module], DivisionPlan]) -> DivisionPlan:
    """Return the plan for a model, or for the first of its children that has a plan."""
    try:
        return make(model)
    except ValueError as error:
        # For a wrapper around a known model, the child's name is prepended to the plan's patterns.
        for name, child in model.named_children():
            try:
                inner = make(child)
            except ValueError:
                continue
            return {
                f"{name}.{pattern}" if pattern else name: kind for pattern, kind in inner.items()
            }
        # the error about the model itself, not about its children
        raise error


def _transformer(model: Any, sequence: bool, gather: bool) -> DivisionPlan:
    along = 1 if sequence else None
    width = model.embedding.embedding_dim // model.blocks[0].heads
    plan: dict[str, PlanEntry | tuple[PlanEntry, ...]] = {
        "embedding": Vocabulary(along),
        "blocks.*": Attributes("heads"),
        # three blocks, each divided by heads, so that a rank's queries meet its keys and values
        "blocks.*.query_key_value": Column(blocks=3, unit=width, sequence=along),
        "blocks.*.projection": Row(unit=width, sequence=along),
        "blocks.*.expand": Column(sequence=along),
        "blocks.*.contract": Row(sequence=along),
        "output": Output(gather, sequence=along),
    }
    if sequence:
        # Each rank adds positions to its own shard, so their gradients must be summed.
        plan["position"] = (Cut(0), OnShards())
        plan["blocks.*.*_norm"] = plan["norm"] = OnShards()
        plan[""] = OwnDraws()
    return plan


def _pairs(layers: nn.Sequential, prefix: str) -> DivisionPlan:
    """Return a plan with the pairs of every chain."""
    plan: dict[str, PlanEntry] = {}
    for chain in chains_of(layers, prefix):
        plan |= pairs(chain)
    if not plan:
        raise ValueError(
            "there is no pair of linear layers with only element-wise layers between them in "
            "this nn.Sequential, so there is no built-in plan for it: write one"
        )
    return plan
