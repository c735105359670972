"""Built-in plans, for models whose layers are known.

    dure's Transformer          query, key and value in a single matrix; output layer tied to the
                                embedding, or not
    GPT-2 of Hugging Face       the same, in Conv1D
    Llama of Hugging Face       grouped queries: heads of keys and values are divided as well, and
                                shared by neighbours if there are fewer heads than ranks; gated MLP
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
from dure.parallel.tensor.changes import Cut, Enter, Join, OnShards, OwnDraws
from dure.parallel.tensor.plan import Column, DivisionPlan, Output, PlanEntry, Row, Vocabulary
from dure.parallel.tensor.written_plan import TensorPlan
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
    # Classes of Hugging Face are known by name, so that transformers need not be installed.
    kinds = {f"{each.__module__}.{each.__name__}" for each in type(model).__mro__}
    for kind, (prefix, make) in _HUGGING_FACE.items():
        if kind in kinds:
            return make(model, prefix, sequence, gather_scores)
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


def _gpt2(model: Any, prefix: str, sequence: bool, gather: bool) -> DivisionPlan:
    if model.config.add_cross_attention:
        raise ValueError(
            "the built-in plan for GPT-2 does not support cross-attention: write a plan for this "
            "model"
        )
    along = 1 if sequence else None
    # the width of a head is the unit, so that heads are never cut
    width = model.config.n_embd // model.config.n_head
    plan: dict[str, PlanEntry | tuple[PlanEntry, ...]] = {
        f"{prefix}wte": Vocabulary(),
        # Hugging Face reshapes queries, keys and values with these, so they count a rank's heads
        f"{prefix}h.*.attn": Attributes("num_heads", "embed_dim", "split_size"),
        f"{prefix}h.*.attn.c_attn": Column(blocks=3, unit=width, sequence=along),
        f"{prefix}h.*.attn.c_proj": Row(unit=width, sequence=along),
        f"{prefix}h.*.mlp.c_fc": Column(sequence=along),
        f"{prefix}h.*.mlp.c_proj": Row(sequence=along),
    }
    if prefix:
        # Along a sequence the norm before it joins the shards, so the input has already entered.
        plan["lm_head"] = Output(gather, enters=not sequence)
    if sequence:
        if not prefix:
            raise ValueError(
                "the built-in plan with sequence=True needs the output layer of GPT2LMHeadModel"
            )
        plan |= _shards_between(f"{prefix}h", norms="ln_*", last=f"{prefix}ln_f")
    return plan


def _llama(model: Any, prefix: str, sequence: bool, gather: bool) -> DivisionPlan:
    along = 1 if sequence else None
    width = model.get_submodule(f"{prefix}layers.0.self_attn").head_dim
    keys = model.config.num_key_value_heads
    # Keys and values: if they have fewer heads than ranks, neighbours share a head.
    shared = Column(unit=width, enters=False, shares=True)
    gate = Column(enters=False)
    plan: dict[str, PlanEntry | tuple[PlanEntry, ...]] = {
        f"{prefix}embed_tokens": Vocabulary(),
        f"{prefix}layers.*.self_attn": (
            Attributes("num_key_value_groups", units=keys),
            Enter(along),
        ),
        f"{prefix}layers.*.self_attn.q_proj": Column(unit=width, enters=False),
        f"{prefix}layers.*.self_attn.k_proj": shared,
        f"{prefix}layers.*.self_attn.v_proj": shared,
        f"{prefix}layers.*.self_attn.o_proj": Row(unit=width, sequence=along),
        f"{prefix}layers.*.mlp": Enter(along, "x"),
        f"{prefix}layers.*.mlp.gate_proj": gate,
        f"{prefix}layers.*.mlp.up_proj": gate,
        f"{prefix}layers.*.mlp.down_proj": Row(sequence=along),
    }
    if prefix:
        # as for GPT-2
        plan["lm_head"] = Output(gather, enters=not sequence)
    if sequence:
        if not prefix:
            raise ValueError(
                "the built-in plan with sequence=True needs the output layer of LlamaForCausalLM"
            )
        plan |= _shards_between(f"{prefix}layers", norms="*_layernorm", last=f"{prefix}norm")
    return plan


def _shards_between(
    layers: str, norms: str, last: str
) -> dict[str, PlanEntry | tuple[PlanEntry, ...]]:
    """Return entries for shards of a sequence from the first of `layers` to the `last` norm."""
    return {
        f"{layers}.*": OwnDraws(),
        f"{layers}.0": Cut(1),
        f"{layers}.*.{norms}": OnShards(),
        last: (OnShards(), Join(1)),
    }


_HUGGING_FACE: dict[str, tuple[str, Callable[[Any, str, bool, bool], DivisionPlan]]] = {
    "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel": ("transformer.", _gpt2),
    "transformers.models.gpt2.modeling_gpt2.GPT2Model": ("", _gpt2),
    "transformers.models.llama.modeling_llama.LlamaForCausalLM": ("model.", _llama),
    "transformers.models.llama.modeling_llama.LlamaModel": ("", _llama),
}
"""Classes of Hugging Face: the prefix of layers' names, and the function that makes the plan."""


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
