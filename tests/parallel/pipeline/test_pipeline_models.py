"""Models that nobody made for pipelines, cut at places that nobody chose for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from beside import CLOSE, compare, on_ranks, pipeline, task_of
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext

ADAM = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def words(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(1))


class Speaker(nn.Module):
    """A language model of one argument; scores as (B, vocabulary, T)."""

    def __init__(self, model: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = model().double()

    def forward(self, indices: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=indices, use_cache=False).logits
        return scores.transpose(1, 2)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=19, n_positions=8, n_embd=8, n_layer=2, n_head=2, **off)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=19, hidden_size=8, intermediate_size=12, **heads)
    )


def opt() -> nn.Module:
    """Its blocks are left out by chance, though here the chance is zero."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 8, "ffn_dim": 12, "word_embed_proj_dim": 8}
    layers: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.0}
    return OPTForCausalLM(OPTConfig(vocab_size=19, max_position_embeddings=8, **sizes, **layers))


def mixtral() -> nn.Module:
    """A mixture of experts: the rows that each of them gets depend on the data."""
    from transformers import MixtralConfig, MixtralForCausalLM

    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    # The products of several experts at once have no float64.
    config = MixtralConfig(
        vocab_size=19, num_local_experts=3, experts_implementation="eager", **heads, **sizes
    )
    return MixtralForCausalLM(config)


class Translator(nn.Module):
    """torch's own Transformer, encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 19)
        self.double()

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.embedding(indices)
        mask = nn.Transformer.generate_square_subsequent_mask(indices.shape[1], dtype=torch.float64)
        scores: Tensor = self.out(
            self.body(hidden, hidden.flip(1), tgt_mask=mask, tgt_is_causal=True)
        )
        return scores.transpose(1, 2)


def block(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
    )


class UNet(nn.Module):
    """What the way down has made is used on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = block(1, 3)
        self.down2 = block(3, 4)
        self.bottom = block(4, 5)
        self.up2 = nn.ConvTranspose2d(5, 4, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.join2 = block(8, 4)
        self.join1 = block(6, 3)
        self.out = nn.Conv2d(3, 2, 1)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        first = self.down1(images)
        second = self.down2(F.max_pool2d(first, 2))
        hidden = self.bottom(F.max_pool2d(second, 2))
        hidden = self.join2(torch.cat([second, self.up2(hidden)], dim=1))
        scores: Tensor = self.out(self.join1(torch.cat([first, self.up1(hidden)], dim=1)))
        return scores


class Normed(nn.Module):
    """A residual network with batch norm, and sums in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(1, 4)
        self.out = nn.Linear(4, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(block(4, 4), nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
            for _ in range(2)
        )
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for one in self.blocks:
            change = one(hidden)
            change += hidden
            hidden = F.relu(change, inplace=True)
        scores: Tensor = self.out(hidden.mean(dim=(2, 3)))
        return scores


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(15, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, (last, _) = self.layers(inputs)
        scores: Tensor = self.out(torch.cat([hidden[:, -1], last[0]], dim=1))
        return scores


class Rows(nn.Module):
    """Puts dimensions back in their places, and sees each example as a row, which takes no copy."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, values: Tensor) -> Tensor:
        return values.permute(self.order).view(len(values), -1)


class Permuted(nn.Module):
    """What travels lies in memory in another order than it is indexed."""

    def __init__(
        self, first: nn.Module, order: tuple[int, ...], back: tuple[int, ...], numbers: int
    ) -> None:
        super().__init__()
        self.first = first
        self.order = order
        self.rows = Rows(*back)
        self.out = nn.Linear(numbers, 2)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.out(self.rows(torch.sin(self.first(inputs).permute(self.order))))
        return scores


def three_dimensions() -> nn.Module:
    return Permuted(nn.Linear(4, 6), (0, 2, 1), (0, 2, 1), 30)


def four_dimensions() -> nn.Module:
    return Permuted(nn.Conv2d(1, 3, 3, padding=1), (0, 3, 1, 2), (0, 2, 3, 1), 192)


def speaking(make: Callable[[], nn.Module]) -> dure.Task:
    """All batches are of one length: these models take seconds to trace."""
    return task_of(partial(Speaker, make), words(19, 16, 6), words(19, 16, 6), optimizer=ADAM)


def seeing(make: Callable[[], nn.Module], *target: int) -> dure.Task:
    return task_of(make, numbers(18, 1, 8, 8), words(2, 18, *target))


TASKS: dict[str, Callable[[], dure.Task]] = {
    "GPT-2": lambda: speaking(gpt2),
    "Llama": lambda: speaking(llama),
    "OPT": lambda: speaking(opt),
    "Mixtral": lambda: speaking(mixtral),
    "torch's Transformer": lambda: task_of(
        Translator, words(19, 16, 6), words(19, 16, 6), optimizer=ADAM
    ),
    "U-Net": lambda: seeing(UNet, 8, 8),
    "ResNet with batch norm": lambda: seeing(Normed),
    "ResNet": lambda: seeing(lambda: dure.models.ResNet(1, 3, width=8).double()),
    "LSTM": lambda: task_of(Recurrent, numbers(16, 5, 4), words(3, 16)),
    "CharLSTM": lambda: task_of(
        lambda: dure.models.CharLSTM(19, 4, 6).double(), words(19, 16, 6), words(19, 16, 6)
    ),
}


SPEAKERS = ["GPT-2", "Llama", "OPT", "Mixtral"]
"""Models of Hugging Face."""


def walked(ranks: int, names: list[str], options: list[dict[str, Any]]) -> dict[str, float]:
    def program(context: RankContext) -> dict[str, float]:
        return {
            name: compare(context, TASKS[name](), pipeline(context, **of))
            for name, of in zip(names, options, strict=True)
        }

    found: dict[str, float] = on_ranks(ranks, program, deadline=200)[0]
    return found


def test_language_models_of_hugging_face() -> None:
    for name in (
        "gpt2",
        "llama",
        "opt",
        "mixtral",
    ):  # here, so that the fork server does it once and not every rank
        pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    schedules = [
        {"schedule": "zero-bubble", "microbatches": 2},
        {"recompute": True, "microbatches": 2},
    ]
    found = walked(2, SPEAKERS, [*schedules, *schedules])
    assert all(distance < CLOSE for distance in found.values()), found


def test_models_of_torch_and_of_ours() -> None:
    options: list[dict[str, Any]] = [
        {"schedule": "interleaved", "microbatches": 2},
        {"schedule": "gpipe", "microbatches": 2, "recompute": True},
        {"schedule": "zero-bubble-v", "microbatches": 2, "recompute": True},
        {"schedule": "zero-bubble", "microbatches": 2},
        {"schedule": "1f1b", "microbatches": 2},
        {"schedule": "gpipe", "microbatches": 2, "balance": "memory"},
    ]
    names = [name for name in TASKS if name not in SPEAKERS]
    found = walked(2, names, options)
    assert all(distance < CLOSE for distance in found.values()), found


class Placed(nn.Module):
    """Adds places to patches, and has channels last in memory, as images of a ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 3, 2, stride=2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.places = nn.Parameter(torch.randn(16, 3))
        self.rows = Rows(0, 1, 2)
        self.out = nn.Linear(48, 2)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        seen = (
            self.patches(images.contiguous(memory_format=torch.channels_last))
            .flatten(2)
            .transpose(1, 2)
        )
        scores: Tensor = self.out(
            self.rows((self.places + seen).contiguous()) + self.rows(seen.contiguous())
        )
        return scores


@pytest.mark.parametrize("recompute", [False, True])
def test_values_whose_memory_is_in_another_order(recompute: bool) -> None:
    """Also in evaluation and in a last batch of another size, traced when a rank has its stage."""
    tasks = [
        task_of(three_dimensions, numbers(16, 5, 4), words(2, 16)),
        seeing(four_dimensions),
        seeing(Placed),
    ]
    tasks += [task_of(three_dimensions, numbers(19, 5, 4), words(2, 19))]

    def program(context: RankContext) -> list[float]:
        options = pipeline(context, microbatches=2, cut=("rows",), recompute=recompute)
        return [compare(context, task, options) for task in tasks]

    assert max(on_ranks(2, program)[0]) < CLOSE
