"""Divided models learn what undivided ones do, gradient by gradient, at every degree."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from divided import at_all_degrees, compare, face_scores, mlp, numbers, texts, transformer
from torch import nn

from dure.collectives.group import Group
from dure.parallel.tensor import parallelize, plan_for

CLOSE = 1e-10


def check(rows: dict[int, list[dict[str, dict[str, float]]]]) -> None:
    for degree, of_ranks in rows.items():
        for rank, row in enumerate(of_ranks):
            for name, distances in row.items():
                assert distances["begin"] == 0, (degree, rank, name)
                assert max(distances.values()) < CLOSE, (degree, rank, name, distances)


def test_own_models() -> None:
    def program(group: Group) -> dict[str, Any]:
        found = {"mlp": compare(group, mlp, numbers(4))}
        for tied in (False, True):
            for sequence in (False, True):
                make = partial(transformer, tied)
                found[f"tied {tied}, sequence {sequence}"] = compare(
                    group, make, texts(3), sequence=sequence
                )
        return found

    check(at_all_degrees(program))


def gpt2(implementation: str = "sdpa") -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=13, n_positions=8, n_embd=16, n_layer=2, n_head=4, use_cache=False, **none
    )
    config._attn_implementation = implementation
    return GPT2LMHeadModel(config).double()


def llama(heads: int, tied: bool, implementation: str = "sdpa") -> nn.Module:
    """Its norms compute in float32 whatever they are given: here they are torch's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=heads,
        max_position_embeddings=8,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    config._attn_implementation = implementation
    model = LlamaForCausalLM(config)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, nn.RMSNorm(16, eps=1e-6))
    return model.double()


def written_alike(group: Group) -> None:
    """Text goes on the same, with a cache of this rank's heads."""
    ((start, _),) = texts(1, length=3)
    for make in (gpt2, partial(llama, 4, False), partial(llama, 1, False)):
        alone = make().eval()
        model = make().eval()
        parallelize(model, plan_for(model), group)
        with torch.no_grad():
            one, other = (
                each.generate(
                    start, max_new_tokens=4, do_sample=False, use_cache=True, pad_token_id=0
                )  # type: ignore[operator]
                for each in (alone, model)
            )
        assert torch.equal(one, other)


def test_models_of_hugging_face() -> None:
    for name in ("gpt2", "llama"):  # here, so that the fork server does it once and not every rank
        pytest.importorskip(f"transformers.models.{name}.modeling_{name}")

    def program(group: Group) -> dict[str, Any]:
        found = {}
        for sequence in (False, True):
            for implementation in ("sdpa",) if sequence else ("sdpa", "eager"):
                make = partial(gpt2, implementation)
                name = f"GPT-2, {implementation}, sequence {sequence}"
                found[name] = compare(group, make, texts(2), face_scores, sequence=sequence)
            # Four ranks share heads of keys, or one.
            for heads, tied in ((1, False),) if sequence else ((4, False), (2, True), (1, False)):
                name = f"Llama, {heads} heads, tied {tied}, sequence {sequence}"
                make = partial(llama, heads, tied)
                found[name] = compare(group, make, texts(2), face_scores, sequence=sequence)
        written_alike(group)
        return found

    check(at_all_degrees(program))
