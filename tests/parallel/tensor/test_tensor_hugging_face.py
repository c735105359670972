"""Plans of one's own for models of Hugging Face: what they need that other models do not.

T5 and Swin have biases by heads in tables, Phi-3 its number of heads in the config of the model,
BERT and ALBERT a second name for the bias of their tied output layer. OPT makes rows of all tokens
between its divided layers, and BLOOM gives its layers a bias of examples x heads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import pytest
import torch
from divided import compare, enliven, face_scores, on_ranks, texts
from torch import Tensor, nn
from torch.nn import functional as F

from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.parallel.tensor import (
    Attributes,
    Column,
    Cut,
    DivisionPlan,
    Enter,
    Join,
    OnShards,
    Output,
    OwnDraws,
    Row,
    Tensors,
    Vocabulary,
    prove_plan,
)

CLOSE = 1e-12
IS_FIVE = not version("transformers").startswith("4.")
HEAD = 4
SYMBOLS = {"vocab_size": 13, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}


def made(kind: str, task: str, **settings: Any) -> nn.Module:
    """One in float64, whose norms do not compute in float32."""
    name = kind.lower()
    config = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    models = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(1)
    model: nn.Module = getattr(models, kind + task)(getattr(config, f"{kind}Config")(**settings))
    for place, module in list(model.named_modules()):
        if type(module).__name__ in ("T5LayerNorm", "Phi3RMSNorm"):
            path, _, own = place.rpartition(".")
            norm = nn.RMSNorm(len(module.weight), eps=1e-6)  # type: ignore[arg-type]
            setattr(model.get_submodule(path), own, norm)
    model = model.double()
    enliven(model)
    return model


def t5(dropout: float) -> nn.Module:
    sizes = {"d_model": 16, "d_kv": HEAD, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    near = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
    settings = {**SYMBOLS, **sizes, **near, "dropout_rate": dropout, "use_cache": False}
    return made("T5", "ForConditionalGeneration", decoder_start_token_id=0, **settings)


def t5_scores(model: nn.Module, symbols: Tensor) -> Tensor:
    scores: Tensor = model(input_ids=symbols, decoder_input_ids=symbols.roll(1, 1)).logits
    return scores.transpose(1, 2)


def t5_plan() -> DivisionPlan:
    layer = "*.block.*.layer.*"
    heads = Attributes("n_heads", "inner_dim")
    plan: dict[str, Any] = {
        "shared": Vocabulary(),
        "lm_head": Output(),
        f"{layer}.SelfAttention": (heads, Enter()),
        # The states of the encoder enter as well.
        f"{layer}.EncDecAttention": (heads, Enter(), Enter(argument="key_value_states")),
        # one column a head
        "*.block.0.layer.0.SelfAttention.relative_attention_bias": Column(),
        f"{layer}.*Attention.o": Row(unit=HEAD),
        f"{layer}.DenseReluDense.wi": Column(),
        f"{layer}.DenseReluDense.wo": Row(),
    }
    for each in "qkv":
        plan[f"{layer}.*Attention.{each}"] = Column(unit=HEAD, enters=False)
    # One module with three names until transformers 5, and then three that share a parameter.
    if IS_FIVE:
        plan["*.embed_tokens"] = Vocabulary()
    return plan


def swin(dropout: float) -> nn.Module:
    sizes = {"image_size": 16, "patch_size": 2, "num_channels": 1, "embed_dim": 16}
    layers = {"depths": [2], "num_heads": [4], "window_size": 2, "mlp_ratio": 2.0}
    drops = {"hidden_dropout_prob": dropout, "drop_path_rate": dropout}
    return made("Swin", "ForImageClassification", **sizes, **layers, **drops, num_labels=3)


def swin_scores(model: nn.Module, images: Tensor) -> Tensor:
    scores: Tensor = model(pixel_values=images).logits
    return scores


def swin_plan() -> DivisionPlan:
    if not IS_FIVE:
        return swin_plan_of_four()
    block = "swin.encoder.layers.*.blocks.*"
    plan: dict[str, Any] = {
        f"{block}.attention": Enter(),
        f"{block}.attention.relative_position_bias": Tensors("relative_position_bias_table"),
        f"{block}.attention.o_proj": Row(unit=HEAD),
        f"{block}.mlp.fc1": Column(),
        f"{block}.mlp.fc2": Row(),
    }
    for each in "qkv":
        plan[f"{block}.attention.{each}_proj"] = Column(unit=HEAD, enters=False)
    return plan


def swin_plan_of_four() -> DivisionPlan:
    block = "swin.encoder.layers.*.blocks.*"
    own = (
        Attributes("num_attention_heads", "all_head_size"),
        Tensors("relative_position_bias_table"),
        Enter(),
    )
    plan: dict[str, Any] = {
        f"{block}.attention.self": own,
        f"{block}.attention.output.dense": Row(unit=HEAD),
        f"{block}.intermediate.dense": Column(),
        f"{block}.output.dense": Row(),
    }
    for each in ("query", "key", "value"):
        plan[f"{block}.attention.self.{each}"] = Column(unit=HEAD, enters=False)
    return plan


def phi3(dropout: float) -> nn.Module:
    sizes = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 24}
    lengths = {"max_position_embeddings": 16, "original_max_position_embeddings": 16}
    drops = {"attention_dropout": dropout, "resid_pdrop": dropout}
    return made("Phi3", "ForCausalLM", **SYMBOLS, **sizes, **lengths, **drops, use_cache=False)


def phi3_plan() -> DivisionPlan:
    layer = "model.layers.*"
    return {
        "model.embed_tokens": Vocabulary(),
        f"{layer}.self_attn": Attributes("config.num_attention_heads", "num_key_value_heads"),
        # queries of four heads, keys and values of two
        f"{layer}.self_attn.qkv_proj": Column(blocks=(16, 8, 8), unit=HEAD),
        f"{layer}.self_attn.o_proj": Row(unit=HEAD),
        f"{layer}.mlp.gate_up_proj": Column(blocks=2),
        f"{layer}.mlp.down_proj": Row(),
        "lm_head": Output(),
    }


def bert(dropout: float) -> nn.Module:
    sizes = {**SIZES, "intermediate_size": 24, "max_position_embeddings": 16}
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return made("Bert", "ForMaskedLM", **SYMBOLS, **sizes, **drops)


def bert_plan() -> DivisionPlan:
    layer = "bert.encoder.layer.*"
    return {
        "bert.embeddings.word_embeddings": Vocabulary(),
        f"{layer}.attention.self": Attributes("num_attention_heads", "all_head_size"),
        # Each of the three enters: so no Enter is needed, and three sums travel for one.
        f"{layer}.attention.self.[qkv]*": Column(unit=HEAD),
        f"{layer}.attention.output.dense": Row(unit=HEAD),
        f"{layer}.intermediate.dense": Column(),
        f"{layer}.output.dense": Row(),
        "cls.predictions.decoder": Output(),
    }


def albert(dropout: float) -> nn.Module:
    sizes = {**SIZES, "intermediate_size": 24, "max_position_embeddings": 16, "embedding_size": 8}
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return made("Albert", "ForMaskedLM", **SYMBOLS, **sizes, **drops)


def albert_plan() -> DivisionPlan:
    layer = "albert.encoder.albert_layer_groups.*.albert_layers.*"
    plan: dict[str, Any] = {
        "albert.embeddings.word_embeddings": Vocabulary(),
        f"{layer}.attention": Attributes("num_attention_heads", "all_head_size"),
        f"{layer}.attention.dense": Row(unit=HEAD),
        f"{layer}.ffn": Column(),
        f"{layer}.ffn_output": Row(),
        "predictions.decoder": Output(),
    }
    # The module adds its input to its output, and so has no input that enters as a whole.
    for each in ("query", "key", "value"):
        plan[f"{layer}.attention.{each}"] = Column(unit=HEAD)
    return plan


def opt(dropout: float) -> nn.Module:
    sizes = {**SIZES, "ffn_dim": 24, "max_position_embeddings": 16, "word_embed_proj_dim": 16}
    drops = {"dropout": dropout, "attention_dropout": dropout, "layerdrop": 0.0}
    return made("OPT", "ForCausalLM", **SYMBOLS, **sizes, **drops, use_cache=False)


def opt_plan() -> DivisionPlan:
    """Shards of sequences between the divided layers."""
    layer = "model.decoder.layers.*"
    plan: dict[str, Any] = {
        "model.decoder.embed_tokens": Vocabulary(),
        "model.decoder.layers.0": Cut(1),
        layer: OwnDraws(),
        f"{layer}.*_layer_norm": OnShards(),
        f"{layer}.self_attn": (Attributes("num_heads", "embed_dim"), Enter(1)),
        f"{layer}.self_attn.out_proj": Row(unit=HEAD, sequence=1),
        # rows of (batch, sequence), which these two layers compute one by one
        f"{layer}.fc1": Column(sequence=0),
        f"{layer}.fc2": Row(sequence=0),
        "model.decoder.final_layer_norm": (OnShards(), Join(1)),
        "lm_head": Output(enters=False),
    }
    for each in "qkv":
        plan[f"{layer}.self_attn.{each}_proj"] = Column(unit=HEAD, enters=False)
    return plan


def bloom(dropout: float) -> nn.Module:
    sizes = {"hidden_size": 16, "n_layer": 1, "n_head": 4, "use_cache": False}
    drops = {"hidden_dropout": dropout, "attention_dropout": dropout}
    return made("Bloom", "ForCausalLM", **SYMBOLS, **sizes, **drops)


def bloom_plan() -> DivisionPlan:
    layer = "transformer.h.*"
    return {
        "transformer.word_embeddings": Vocabulary(),
        f"{layer}.self_attention": (Attributes("num_heads"), Enter(), Cut(0, "alibi", units=4)),
        f"{layer}.self_attention.query_key_value": Column(unit=3 * HEAD, enters=False),
        f"{layer}.self_attention.dense": Row(unit=HEAD),
        f"{layer}.mlp.dense_h_to_4h": Column(),
        f"{layer}.mlp.dense_4h_to_h": Row(),
        "lm_head": Output(),
    }


def images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    pictures = torch.randn((3, 1, 16, 16), generator=generator, dtype=torch.float64)
    return [(pictures, torch.randint(0, 3, (3,), generator=generator))]


Model = tuple[Callable[[float], nn.Module], Callable[[], DivisionPlan], Any, Any]
MODELS: dict[str, Model] = {
    "t5": (t5, t5_plan, t5_scores, texts(1)),
    "swin": (swin, swin_plan, swin_scores, images()),
    "phi3": (phi3, phi3_plan, face_scores, texts(1)),
    "bert": (bert, bert_plan, face_scores, texts(1)),
    "albert": (albert, albert_plan, face_scores, texts(1)),
    "opt": (opt, opt_plan, face_scores, texts(1)),
    "bloom": (bloom, bloom_plan, face_scores, texts(1)),
}

DROPPED = ("t5", "bert", "opt")
"""Whose dropout is tried: with one Enter, with several columns that enter, and along sequences."""


class Scored(nn.Module):
    def __init__(self, model: nn.Module, scores: Any) -> None:
        super().__init__()
        self.model = model
        self.scores = scores

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.model, inputs)
        return scores


def prove_draws(
    group: Group,
    make: Callable[[float], nn.Module],
    plan: Callable[[], DivisionPlan],
    scores: Any,
    data: Any,
) -> None:
    ((inputs, targets),) = data
    model = Scored(make(0.3), scores)
    inside = {f"model.{pattern}": kind for pattern, kind in plan().items()}
    prove_plan(model, inside, inputs, lambda outputs: F.cross_entropy(outputs, targets), group)


def test_models_of_hugging_face_learn_what_they_learn_undivided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in MODELS:  # here, so that the fork server does it once and not every rank
        pytest.importorskip(f"transformers.models.{name}.modeling_{name}")

    def program(context: RankContext) -> dict[str, dict[str, float]]:
        softmax = F.softmax
        found = {}
        with monkeypatch.context() as patches:
            # Some compute in float32, whatever they are given.
            patches.setattr(Tensor, "float", Tensor.double)
            patches.setattr(F, "softmax", lambda tensor, dim, dtype=None: softmax(tensor, dim))
            for name, (make, plan, scores, data) in MODELS.items():
                found[name] = compare(context.group, partial(make, 0.0), data, scores, plan())
            for name in DROPPED:
                prove_draws(context.group, *MODELS[name])
        return found

    for rows in on_ranks(2, program):
        for name, row in rows.items():
            assert max(row.values()) < CLOSE, (name, row)
