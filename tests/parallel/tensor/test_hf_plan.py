"""Plans of Hugging Face, and dure's own for its models: divided equals undivided, in float64."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from divided import apart, compare, enliven, face_scores, on_ranks, texts
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import dure
from dure.contracts.world import RankContext
from dure.errors import PlanError
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.strategy import ParallelLearner
from dure.parallel.tensor import (
    Attributes,
    Column,
    DivisionPlan,
    OnShards,
    Output,
    Row,
    Vocabulary,
    plan_for,
    prove_plan,
)
from dure.parallel.tensor.builtin_plans import plan_of
from dure.parallel.tensor.written_plan import TensorPlan

CLOSE = 1e-10
SYMBOLS = {"vocab_size": 13, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
GROUPED = {**SYMBOLS, **SIZES, "num_key_value_heads": 2, "use_cache": False}
PHI3 = {"original_max_position_embeddings": 16}
WHISPER = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_mel_bins": 4,
    "max_source_positions": 8,
    "max_target_positions": 16,
}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
NEAR = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
OPT = {"ffn_dim": 24, "word_embed_proj_dim": 16, "layerdrop": 0.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
NONE = {
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout_rate": 0.0,
    "activation_dropout": 0.0,
    "hidden_dropout": 0.0,
}


class InDouble(TorchFunctionMode):
    """float64 wherever a model asks for float32, as norms and softmax of Hugging Face do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        wide = {torch.float32: torch.float64}
        given = [wide.get(each, each) if isinstance(each, torch.dtype) else each for each in args]
        named = {
            name: wide.get(each, each) if isinstance(each, torch.dtype) else each
            for name, each in (kwargs or {}).items()
        }
        return (Tensor.double if func is Tensor.float else func)(*given, **named)


@contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def made(kind: str, task: str, **settings: Any) -> nn.Module:
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
    name = {"gptneo_x": "gpt_neox", "vi_t": "vit"}.get(name, name)
    configs = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    models = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(1)
    text = "Text" if hasattr(configs, f"{kind}TextConfig") else ""
    config = getattr(configs, f"{kind}{text}Config")(**NONE, **settings)
    model: nn.Module = getattr(models, kind + task)(config).double()
    # Whisper's positions are frozen, and `compare` takes a gradient of every parameter.
    model.requires_grad_(True)
    enliven(model)
    return model


def hf(model: nn.Module) -> DivisionPlan:
    return plan_of(model, False, TensorPlan("hf"))


def seq2seq_scores(model: nn.Module, symbols: Tensor) -> Tensor:
    scores: Tensor = model(input_ids=symbols, decoder_input_ids=symbols.roll(1, 1)).logits
    return scores.transpose(1, 2)


def speech_scores(model: nn.Module, symbols: Tensor) -> Tensor:
    waves = torch.linspace(-1, 1, 3 * 4 * 16).reshape(3, 4, 16).sin()
    scores: Tensor = model(input_features=waves, decoder_input_ids=symbols).logits
    return scores.transpose(1, 2)


def image_scores(model: nn.Module, images: Tensor) -> Tensor:
    scores: Tensor = model(pixel_values=images).logits
    return scores


def images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    pictures = torch.randn((3, 1, 16, 16), generator=generator, dtype=torch.float64)
    return [(pictures, torch.randint(0, 3, (3,), generator=generator))]


Family = tuple[Callable[[], nn.Module], Callable[[nn.Module], DivisionPlan], Any, Any]


def text(kind: str, **settings: Any) -> Family:
    """A language model, with the plan of Hugging Face."""
    make = partial(made, kind, "ForCausalLM", **{**GROUPED, **settings})
    return make, hf, face_scores, texts(1)


SEQ2SEQ = {**SYMBOLS, "decoder_start_token_id": 0, "use_cache": False}
IMAGES = {"image_size": 16, "patch_size": 4, "num_channels": 1, "num_labels": 3}

FAMILIES: dict[str, Family] = {
    "Llama, tied": text("Llama", tie_word_embeddings=True),
    "Qwen3, norms of heads": text("Qwen3", head_dim=4),
    "Gemma3, an embedding with a scale": text("Gemma3", head_dim=4, sliding_window=4),
    "Phi3, packed, gathered": text("Phi3", **PHI3),
    "GPT-NeoX, heads side by side": text("GPTNeoX", rotary_pct=0.5),
    "Olmo2, norms of all heads": text("Olmo2"),
    "Glm4, halves in one matrix": text("Glm4", head_dim=4),
    "BERT": (
        partial(made, "Bert", "ForMaskedLM", **SYMBOLS, **SIZES),
        plan_for,
        face_scores,
        texts(1),
    ),
    "OPT": (
        partial(made, "OPT", "ForCausalLM", **SYMBOLS, **SIZES, **OPT),
        plan_for,
        face_scores,
        texts(1),
    ),
    "T5": (
        partial(made, "T5", "ForConditionalGeneration", **SEQ2SEQ, **T5, **NEAR),
        plan_for,
        seq2seq_scores,
        texts(1),
    ),
    "T5, gated": (
        partial(
            made,
            "T5",
            "ForConditionalGeneration",
            **SEQ2SEQ,
            **T5,
            **NEAR,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        ),
        plan_for,
        seq2seq_scores,
        texts(1),
    ),
    "ViT": (
        partial(made, "ViT", "ForImageClassification", **SIZES, **IMAGES),
        plan_for,
        image_scores,
        images(),
    ),
    "Whisper": (
        partial(made, "Whisper", "ForConditionalGeneration", **SEQ2SEQ, **WHISPER),
        plan_for,
        speech_scores,
        texts(1),
    ),
}


def test_families_learn_divided_what_they_learn_undivided() -> None:
    for name, (make, *_) in FAMILIES.items():  # here: the fork server imports it once for all ranks
        assert make(), name

    def program(context: RankContext) -> dict[str, dict[str, float]]:
        found = {}
        with in_double():
            for name, (make, plan, scores, data) in FAMILIES.items():
                found[name] = compare(context.group, make, data, scores, plan(make()))
        return found

    for rows in on_ranks(2, program):
        for name, row in rows.items():
            assert max(row.values()) < CLOSE, (name, row)


def refused(model: nn.Module) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        hf(model)
    return str(caught.value)


def test_what_a_plan_of_hugging_face_says_becomes_entries_of_dure() -> None:
    plan = hf(FAMILIES["Qwen3, norms of heads"][0]())
    layer = "model.layers.*"
    heads = Column(unit=4, shares=True)
    assert plan == {
        "lm_head": (Output(),),
        "model.embed_tokens": (Vocabulary(),),
        f"{layer}.self_attn": (Attributes("num_key_value_groups", units=2),),
        f"{layer}.self_attn.q_proj": (Column(unit=4),),
        f"{layer}.self_attn.k_proj": (heads,),
        f"{layer}.self_attn.v_proj": (heads,),
        f"{layer}.self_attn.q_norm": (OnShards(),),
        f"{layer}.self_attn.k_norm": (OnShards(),),
        f"{layer}.self_attn.o_proj": (Row(),),
        f"{layer}.mlp.gate_proj": (Column(),),
        f"{layer}.mlp.up_proj": (Column(),),
        f"{layer}.mlp.down_proj": (Row(),),
    }
    packed = hf(FAMILIES["Phi3, packed, gathered"][0]())
    assert packed[f"{layer}.self_attn.qkv_proj"] == (Column(gather_output=True),)
    assert packed[f"{layer}.self_attn.o_proj"] == (Row(input_is_parallel=False),)


def test_an_embedding_that_does_more_stays_whole_with_its_output_layer() -> None:
    plan = hf(FAMILIES["Gemma3, an embedding with a scale"][0]())
    assert "lm_head" not in plan
    assert "model.embed_tokens" not in plan
    assert "model.layers.*.mlp.down_proj" in plan


def test_styles_without_a_meaning_in_dure_are_refused_by_name() -> None:
    settings = {**GROUPED, **EXPERTS, "head_dim": 4}
    said = refused(made("Qwen3Moe", "ForCausalLM", **settings))
    assert "divides experts (moe_tp_experts of model.layers.*.mlp.experts)" in said
    assert "\n" not in said
    # Without a layer of experts the plan divides the others.
    dense = made("Qwen3Moe", "ForCausalLM", **settings, mlp_only_layers=[0, 1])
    assert "model.layers.*.mlp.down_proj" in hf(dense)
    model: Any = FAMILIES["Llama, tied"][0]()
    model._tp_plan["model.norm"] = "sequence_parallel"
    assert "the style 'sequence_parallel' for model.norm" in refused(model)
    model._tp_plan["model.norm"] = "a name\nof two lines"
    assert "\n" not in refused(model)
    assert "gives this BertForMaskedLM no tensor plan" in refused(FAMILIES["BERT"][0]())
    with pytest.raises(ValueError, match="no built-in plan with sequence=True for a Bert"):
        plan_for(FAMILIES["BERT"][0](), sequence=True)


class Scored(nn.Module):
    """A model of Hugging Face inside a model that takes a single argument."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def forward(self, symbols: Tensor) -> Tensor:
        return face_scores(self.model, symbols)


WRONG: dict[str, tuple[str, str, str, str]] = {
    "a gradient that is not summed": (
        "Qwen3, norms of heads",
        "model.layers.*.self_attn.q_norm",
        "replicate",
        "the sum over the ranks is right, as OnShards() of its module makes it",
    ),
    "half of a pair": (
        "Llama, tied",
        "model.layers.*.mlp.up_proj",
        "replicate",
        "divided by the plan, the model fails in model.model.layers.0.mlp",
    ),
    "a sum too many": (
        "Llama, tied",
        "model.layers.*.input_layernorm",
        "replicated_with_grad_allreduce",
        "input_layernorm.weight: the plan has OnShards()",
    ),
    "another order": (
        "GPT-NeoX, heads side by side",
        "gpt_neox.layers.*.attention.query_key_value",
        "packed_colwise",
        "the first output that differs is that of model.gpt_neox.layers.0.attention.dense",
    ),
}
"""A family, a pattern whose style is changed, the wrong style, and a part of the error."""


def test_the_proof_finds_a_wrong_plan() -> None:
    ((symbols, targets),) = texts(1)

    def program(context: RankContext) -> dict[str, str]:
        found = {}
        with in_double():
            for name, (family, pattern, style, _) in WRONG.items():
                model: Any = Scored(FAMILIES[family][0])
                prove_plan(model, hf(model), symbols, partial(loss, targets), context.group)
                model.model._tp_plan[pattern] = style
                with pytest.raises(PlanError) as caught:
                    prove_plan(model, hf(model), symbols, partial(loss, targets), context.group)
                found[name] = str(caught.value)
        return found

    for row in on_ranks(2, program):
        for name, (*_, said) in WRONG.items():
            assert said in row[name], (name, row[name])


def test_the_proof_finds_a_mistake_of_hugging_face_which_an_own_plan_corrects() -> None:
    """The plan for Apertus leaves out the parameters of the activation in the divided MLP."""
    ((symbols, targets),) = texts(1)
    make = text("Apertus")[0]

    def program(context: RankContext) -> str:
        model = Scored(make)
        with in_double():
            right = {**hf(model), "model.model.layers.*.mlp.act_fn": OnShards()}
            prove_plan(model, right, symbols, partial(loss, targets), context.group)
            with pytest.raises(PlanError) as caught:
                prove_plan(model, hf(model), symbols, partial(loss, targets), context.group)
        return str(caught.value)

    for said in on_ranks(2, program):
        assert "mlp.act_fn.alpha_p: the plan has no entry for it" in said


def loss(targets: Tensor, scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets)


ON_MESHES = [
    dure.TensorParallel(6, plan="hf").on(4),
    dure.Parallel(Mesh(1, 2, 2), 6, 2, plan="hf"),
    dure.Parallel(Mesh(2, 1, 2), 6, 1, plan="hf", zero=3),
]


def test_meshes_with_a_tensor_axis_take_the_plan_of_hugging_face() -> None:
    """Also with four ranks, of which two share a head of keys."""
    ((symbols, targets),) = texts(1, batch=12)
    make = partial(Scored, FAMILIES["Qwen3, norms of heads"][0])
    sgd = partial(torch.optim.SGD, lr=0.1)
    task = dure.Task(make, F.cross_entropy, (symbols, targets), optimizer=sgd)

    def program(context: RankContext) -> list[dict[str, Tensor]]:
        found = []
        with in_double():
            for strategy in ON_MESHES:
                learner = ParallelLearner(task, context, 0, strategy)
                for _ in range(2):
                    learner.advance(0)
                found.append(learner.weights())
        return found

    with in_double():
        right = dure.train(task, dure.SingleWorker(6), stop=dure.Stop(steps=2), seed=0)
    for strategy, weights in zip(ON_MESHES, on_ranks(4, program)[0], strict=True):
        assert apart(weights, right.model.state_dict()) < CLOSE, strategy
    assert "hf" in ON_MESHES[0].label
