"""dure's own plans for models of Hugging Face.

    GPT-2     query, key and value in a single matrix, in Conv1D
    Llama     grouped queries: heads of keys and values are divided as well, and shared by
              neighbours if there are fewer heads than ranks; gated MLP
    BERT      with any head; the output layer of masked language models is divided by symbols
    OPT       an MLP of two layers
    T5        also its encoder alone; a table of biases with a column per head
    ViT       with any head
    Whisper   encoder and decoder; the states of the encoder enter the decoder's attention

The input of an attention enters once, where Hugging Face's own plans (`hf_plan`) sum three
gradients. GPT-2 and Llama can divide sequences as well.

Classes are known by name, so that transformers need not be installed.

Sources: Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models" (sequences).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dure.parallel.tensor.attributes import Attributes
from dure.parallel.tensor.changes import Cut, Enter, Join, OnShards, OwnDraws
from dure.parallel.tensor.plan import Column, DivisionPlan, Output, PlanEntry, Row, Vocabulary

_Entries = dict[str, PlanEntry | tuple[PlanEntry, ...]]


def plan_by_class(model: nn.Module, sequence: bool, gather: bool) -> DivisionPlan | None:
    """Return the plan for a model of a known class or a subclass; None if there is no plan.

    sequence, gather: as in `plan_for`. Raises ValueError if the plan does not fit the model.
    """
    kinds = {f"{each.__module__}.{each.__name__}" for each in type(model).__mro__}
    for kind, (prefix, make) in _WITH_SEQUENCES.items():
        if f"transformers.models.{kind}" in kinds:
            return make(model, prefix, sequence, gather)
    for kind, (prefix, plain) in _WITHOUT_SEQUENCES.items():
        if f"transformers.models.{kind}" in kinds and not sequence:
            inner = prefix if hasattr(model, prefix) else ""
            return plain(model, f"{inner}." if inner else "", gather)
    return None


def _gpt2(model: Any, prefix: str, sequence: bool, gather: bool) -> DivisionPlan:
    if model.config.add_cross_attention:
        raise ValueError(
            "the built-in plan for GPT-2 does not support cross-attention: write a plan for this "
            "model"
        )
    along = 1 if sequence else None
    # the width of a head is the unit, so that heads are never cut
    width = model.config.n_embd // model.config.n_head
    plan: _Entries = {
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
    plan: _Entries = {
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


def _shards_between(layers: str, norms: str, last: str) -> _Entries:
    """Return entries for shards of a sequence from the first of `layers` to the `last` norm."""
    return {
        f"{layers}.*": OwnDraws(),
        f"{layers}.0": Cut(1),
        f"{layers}.*.{norms}": OnShards(),
        last: (OnShards(), Join(1)),
    }


def _attention(
    path: str, layers: str, width: int, output: str, *integers: str, states: bool = False
) -> _Entries:
    """Return entries of an attention whose input enters once.

    layers: names of query, key and value. width: the width of a head. output: the projection.
    integers: attributes that count heads. states: whether states of an encoder enter as well.
    """
    enters = (Enter(), Enter(argument="key_value_states")) if states else (Enter(),)
    plan: _Entries = {path: (Attributes(*integers), *enters) if integers else enters}
    for layer in layers.split():
        plan[f"{path}.{layer}"] = Column(unit=width, enters=False)
    return {**plan, output: Row(unit=width)}


def _output(model: nn.Module, name: str, gather: bool) -> _Entries:
    """Return the entry of an output layer, if the model has that layer."""
    names = dict(model.named_modules(remove_duplicate=False))
    return {name: Output(gather)} if name in names else {}


def _bert(model: Any, prefix: str, gather: bool) -> DivisionPlan:
    if model.config.add_cross_attention:
        raise ValueError(
            "the built-in plan for BERT does not support cross-attention: write a plan for this "
            "model"
        )
    layer = f"{prefix}encoder.layer.*"
    own = f"{layer}.attention.self"
    output = f"{layer}.attention.output.dense"
    width = model.get_submodule(f"{prefix}encoder.layer.0.attention.self").attention_head_size
    heads = ("num_attention_heads", "all_head_size")
    return {
        f"{prefix}embeddings.word_embeddings": Vocabulary(),
        **_attention(own, "query key value", width, output, *heads),
        f"{layer}.intermediate.dense": Column(),
        f"{layer}.output.dense": Row(),
        **_output(model, "cls.predictions.decoder", gather),
    }


def _opt(model: Any, prefix: str, gather: bool) -> DivisionPlan:
    layer = f"{prefix}decoder.layers.*"
    own = f"{layer}.self_attn"
    width = model.get_submodule(f"{prefix}decoder.layers.0.self_attn").head_dim
    return {
        f"{prefix}decoder.embed_tokens": Vocabulary(),
        **_attention(
            own, "q_proj k_proj v_proj", width, f"{own}.out_proj", "num_heads", "embed_dim"
        ),
        f"{layer}.fc1": Column(),
        f"{layer}.fc2": Row(),
        **_output(model, "lm_head", gather),
    }


def _t5(model: Any, prefix: str, gather: bool) -> DivisionPlan:
    layer = "*.block.*.layer.*"
    width = model.config.d_kv
    heads = ("n_heads", "inner_dim")
    own = f"{layer}.SelfAttention"
    gates = "wi_0 wi_1" if model.config.is_gated_act else "wi"
    plan: _Entries = {
        "shared": Vocabulary(),
        "*.embed_tokens": Vocabulary(),
        **_attention(own, "q k v", width, f"{own}.o", *heads),
        # one column a head
        "*.block.0.layer.0.SelfAttention.relative_attention_bias": Column(),
        **{f"{layer}.DenseReluDense.{gate}": Column() for gate in gates.split()},
        f"{layer}.DenseReluDense.wo": Row(),
        **_output(model, "lm_head", gather),
    }
    if hasattr(model, "decoder"):
        cross = f"{layer}.EncDecAttention"
        plan |= _attention(cross, "q k v", width, f"{cross}.o", *heads, states=True)
    return plan


def _vit(model: Any, prefix: str, gather: bool) -> DivisionPlan:
    layer = f"{prefix}layers.*"
    own = f"{layer}.attention"
    names = dict(model.named_modules())
    if f"{prefix}layers.0.attention" not in names:
        raise ValueError(
            "the built-in plan for ViT needs the layers of transformers 5: write a plan for this "
            "model"
        )
    width = names[f"{prefix}layers.0.attention"].head_dim
    return {
        **_attention(own, "q_proj k_proj v_proj", width, f"{own}.o_proj"),
        f"{layer}.mlp.fc1": Column(),
        f"{layer}.mlp.fc2": Row(),
    }


def _whisper(model: Any, prefix: str, gather: bool) -> DivisionPlan:
    layer = f"{prefix}*.layers.*"
    own = f"{layer}.self_attn"
    cross = f"{prefix}decoder.layers.*.encoder_attn"
    layers = "q_proj k_proj v_proj"
    width = model.get_submodule(f"{prefix}encoder.layers.0.self_attn").head_dim
    return {
        f"{prefix}decoder.embed_tokens": Vocabulary(),
        **_attention(own, layers, width, f"{own}.out_proj", "num_heads", "embed_dim"),
        **_attention(
            cross, layers, width, f"{cross}.out_proj", "num_heads", "embed_dim", states=True
        ),
        f"{layer}.fc1": Column(),
        f"{layer}.fc2": Row(),
        **_output(model, "proj_out", gather),
    }


_WITH_SEQUENCES: dict[str, tuple[str, Callable[[Any, str, bool, bool], DivisionPlan]]] = {
    "gpt2.modeling_gpt2.GPT2LMHeadModel": ("transformer.", _gpt2),
    "gpt2.modeling_gpt2.GPT2Model": ("", _gpt2),
    "llama.modeling_llama.LlamaForCausalLM": ("model.", _llama),
    "llama.modeling_llama.LlamaModel": ("", _llama),
}
"""Classes with plans that can divide sequences: the prefix of layers' names, and the function that
makes the plan.
"""

_WITHOUT_SEQUENCES: dict[str, tuple[str, Callable[[Any, str, bool], DivisionPlan]]] = {
    "bert.modeling_bert.BertPreTrainedModel": ("bert", _bert),
    "opt.modeling_opt.OPTForCausalLM": ("model", _opt),
    "opt.modeling_opt.OPTForSequenceClassification": ("model", _opt),
    "opt.modeling_opt.OPTForQuestionAnswering": ("model", _opt),
    "opt.modeling_opt.OPTModel": ("", _opt),
    "t5.modeling_t5.T5ForConditionalGeneration": ("", _t5),
    "t5.modeling_t5.T5EncoderModel": ("", _t5),
    "t5.modeling_t5.T5Model": ("", _t5),
    "vit.modeling_vit.ViTPreTrainedModel": ("vit", _vit),
    "whisper.modeling_whisper.WhisperForConditionalGeneration": ("model", _whisper),
    "whisper.modeling_whisper.WhisperModel": ("", _whisper),
}
"""Other classes: the name of the module with the layers, empty if the model has them itself, and
the function that makes the plan.
"""
