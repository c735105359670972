"""A language model gives no cache while it is traced, and its config stays as it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.parallel.pipeline.without_cache import without_cache


class Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, inputs: Any, use_cache: bool | None = None) -> Any:
        return self.config.use_cache if use_cache is None else use_cache


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Caches()

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.inner(*given, **named)


def test_what_a_caller_says_stands_and_silence_is_no() -> None:
    model = Around()
    with without_cache(model):
        assert (model(0), model(0, True), model(0, use_cache=True)) == (False, True, True)
    assert model(0)
    model.inner.config.use_cache = False
    with without_cache(model):
        assert not model.inner._forward_pre_hooks


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = (torch.arange(8) + index) % 18 + 1
        return {"input_ids": words, "labels": words}


def speaker() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 19, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).double()


def test_a_causal_language_model_as_it_is_made_learns_what_a_plain_loop_learns() -> None:
    pytest.importorskip("transformers.models.llama.modeling_llama")
    task = dure.Task(speaker, dure.OwnLoss("next-tokens"), Texts())
    strategy = dure.Pipeline(batch_size=None, microbatches=2)
    run = dure.train(task, strategy, dure.Processes(2), dure.Stop(steps=3))
    assert run.model.config.use_cache
    alone: Any = seeded_model(task, 0)
    words = torch.stack([Texts()[index]["input_ids"] for index in range(16)])
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        alone(input_ids=words, labels=words, use_cache=False).loss.backward()
        optimizer.step()
    trained = run.model.state_dict()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-6)
