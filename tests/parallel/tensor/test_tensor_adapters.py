"""Adapters are divided with their layer: a plan of the model without adapters is enough."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.adapter import ADAPTER
from dure.contracts.fresh_model import seeded_model
from dure.parallel.tensor.chain_plans import chains_of, traced_chains
from dure.parallel.tensor.dividing import check_plan
from dure.parallel.tensor.plan import Column, Row
from small import largest_difference, network, small_task

SYMBOLS = 32


def llama(keys: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": keys}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=SYMBOLS, **sizes, **heads))
    found: nn.Module = model.double()
    return found


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=SYMBOLS, **sizes, **still, **ends))
    found: nn.Module = model.double()
    return found


def next_symbol(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def text(model: Any, adapter: dure.LoRA) -> dure.Task:
    drawn = torch.randint(SYMBOLS, (16, 9), generator=torch.Generator().manual_seed(0))
    return dure.Task(
        model,
        next_symbol,
        train=(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        metrics={},
        adapter=adapter,
    )


CASES = {
    "llama": (llama, dure.LoRA(2), {}),
    "llama, neighbours share keys": (partial(llama, 1), dure.LoRA(2), {}),
    "llama, shards of sequences": (llama, dure.LoRA(2), {"sequence": True}),
    "gpt2": (gpt2, dure.LoRA(2), {}),
    "gpt2, shards of sequences, A frozen": (
        gpt2,
        dure.LoRA(2, "c_attn|c_proj", freeze_a=True),
        {"sequence": True},
    ),
}


@pytest.mark.parametrize(("model", "adapter", "settings"), CASES.values(), ids=CASES)
def test_a_divided_transformer_trains_as_the_whole(
    model: Any, adapter: dure.LoRA, settings: dict[str, Any]
) -> None:
    """Columns, rows and the output layer, inside regions that other modules begin and end."""
    task = text(model, adapter)
    stop = dure.Stop(steps=3)
    whole = dure.train(task, dure.SingleWorker(8), stop=stop)
    divided = dure.train(task, dure.TensorParallel(8, **settings), dure.Processes(2), stop)
    moved = [value for name, value in whole.model.state_dict().items() if "lora_B" in name]
    assert all(bool(value.any()) for value in moved)
    assert largest_difference(whole, divided) < 1e-12


def adapted_network() -> nn.Module:
    return seeded_model(small_task(adapter=dure.LoRA(2)), 0)


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = adapted_network()

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs)
        return found


def test_chains_have_adapted_layers_as_their_links() -> None:
    model = adapted_network()
    assert isinstance(model, nn.Sequential)
    plain = network()
    assert isinstance(plain, nn.Sequential)
    assert chains_of(model) == chains_of(plain) == [["0", "2", "4"]]
    assert traced_chains(Called()) == [["layers.0", "layers.2", "layers.4"]]


def test_parts_of_features_are_refused_by_name() -> None:
    check_plan(adapted_network(), {"0": Column(), "2": Row()}, 2)
    for plan in ({"2": Column(features=True)}, {"2": Row(features=True)}):
        with pytest.raises(ValueError, match="for 2, which has an adapter") as told:
            check_plan(adapted_network(), plan, 2)
        assert "\n" not in str(told.value)


def test_factors_are_divided_with_their_layer() -> None:
    from dure.parallel.tensor.adapted import with_adapters

    found = with_adapters(adapted_network(), [("0", Column()), ("2", Row())])
    assert [name for name, _ in found] == [
        "0.base_layer",
        f"0.lora_B.{ADAPTER}",
        "2.base_layer",
        f"2.lora_A.{ADAPTER}",
    ]
