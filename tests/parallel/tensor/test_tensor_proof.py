"""A plan is tried beside the undivided model: right ones pass, wrong ones are refused by name."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from divided import mlp, numbers, on_ranks, texts, transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.errors import PlanError
from dure.parallel.tensor import (
    Attributes,
    Column,
    Cut,
    Enter,
    Join,
    OnShards,
    Output,
    OwnDraws,
    Row,
    Vocabulary,
    plan_for,
    prove_plan,
    vocabulary_parallel_cross_entropy,
)
from dure.parallel.tensor.proof import plan_text_for


class Interleaved(nn.Module):
    """Attention whose matrix has each head's query, key and value next to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.query_key_value = nn.Linear(16, 48)
        self.query_norm = nn.LayerNorm(4)
        self.projection = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        each = self.query_key_value(hidden).view(rows, length, self.heads, 12).transpose(1, 2)
        query, key, value = each.split(4, -1)
        mixed = F.scaled_dot_product_attention(self.query_norm(query), key, value, is_causal=True)
        joined: Tensor = self.projection(mixed.transpose(1, 2).reshape(rows, length, -1))
        return joined


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.attention = Interleaved()
        self.output = nn.Linear(16, 13)

    def forward(self, symbols: Tensor) -> Tensor:
        hidden = self.embedding(symbols)
        scores: Tensor = self.output(hidden + self.attention(hidden))
        return scores.transpose(1, 2)


class Doubly(nn.Module):
    """Two norms with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.again = nn.LayerNorm(4)
        self.again.weight = self.norm.weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.again(self.norm(inputs))
        return outputs


def doubly() -> Reader:
    model = Reader()
    model.attention.query_norm = Doubly()  # type: ignore[assignment]
    return model


class Gated(nn.Module):
    """A branch whose last weight begins as zeros, so that nothing before it has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 8)
        self.key = nn.Linear(6, 8)
        self.contract = nn.Linear(8, 3)
        self.skip = nn.Linear(6, 3)
        nn.init.zeros_(self.contract.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.query(inputs).tanh() * self.key(inputs)
        outputs: Tensor = self.contract(hidden) + self.skip(inputs)
        return outputs


class Dropped(nn.Module):
    """A pair with dropout in its middle and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Linear(6, 8)
        self.inner = nn.Dropout(0.5)
        self.contract = nn.Linear(8, 3)
        self.outer = nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        dropped: Tensor = self.outer(self.contract(self.inner(self.expand(inputs).relu())))
        return dropped


class Lazy(nn.Module):
    """Computes otherwise in evaluation: all features together, which are then parts."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Linear(6, 8)
        self.contract = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.expand(inputs).tanh()
        if not self.training:
            hidden = hidden - hidden.mean(-1, keepdim=True)
        outputs: Tensor = self.contract(hidden)
        return outputs


class Noting(nn.Module):
    """Notes in a buffer, which it does not use, what its hidden features were on average."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Linear(6, 8)
        self.contract = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.expand(inputs).tanh()
        with torch.no_grad():
            self.mean.copy_(hidden.mean())
        outputs: Tensor = self.contract(hidden)
        return outputs


class Counting(nn.Module):
    """Everything that a pass may change: a buffer, an attribute, parameters, all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.embedding = nn.Embedding(13, 6, max_norm=0.5)
        self.normed = nn.BatchNorm1d(6)
        self.pair = mlp()

    def forward(self, symbols: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.normed(self.embedding(symbols).mean(1))
        scores: Tensor = self.pair(F.dropout(hidden, 0.2, self.training) * (1 + random.random()))
        return scores


def loss_of(targets: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda outputs: F.cross_entropy(outputs.double(), targets)


READER = {
    "attention": Attributes("heads"),
    "attention.query_key_value": Column(unit=12),
    "attention.query_norm": OnShards(),
    "attention.projection": Row(unit=4),
}
SEQUENCE = plan_for(transformer(), sequence=True)
PAIR = {"expand": Column(), "contract": Row()}


def without(plan: Any, *patterns: str) -> dict[str, Any]:
    return {pattern: kinds for pattern, kinds in plan.items() if pattern not in patterns}


def double(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(3)
        return make().double()

    return made


(TEXTS,) = texts(1)
(NUMBERS,) = numbers(1)

RIGHT: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "an MLP": (mlp, plan_for(mlp()), NUMBERS),
    "interleaved heads": (double(Reader), READER, TEXTS),
    "vocabulary": (
        double(Reader),
        {**READER, "embedding": Vocabulary(), "output": Output()},
        TEXTS,
    ),
    "zeros": (double(Gated), {"query": Column(), "key": Column(), "contract": Row()}, NUMBERS),
    "dropout": (double(Dropped), PAIR, NUMBERS),
    "tied": (partial(transformer, True, dropout=0.1), plan_for(transformer(True)), TEXTS),
    "a sequence": (partial(transformer, dropout=0.1), SEQUENCE, TEXTS),
    "norms with one weight, and around them, on shards": (
        double(doubly),
        {**READER, "attention.query_norm.*": OnShards()},
        TEXTS,
    ),
}

WRONG: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "nothing enters": (
        mlp,
        {"2": Column(enters=False), "4": Row()},
        NUMBERS,
        r"^0\.weight: the plan has no entry for it; its gradient differs by [\d.]+ of its largest "
        r"value \(the sum over the ranks is right.*\); the last that differs is that of 0\.bias:",
    ),
    "it enters twice": (
        mlp,
        {"2": (Enter(), Column()), "4": Row()},
        NUMBERS,
        r"^0\.weight: .* \(it is 2 times too large: it is summed once too often\)",
    ),
    "heads that are not in blocks": (
        double(Reader),
        {**READER, "attention.query_key_value": Column(blocks=3)},
        TEXTS,
        r"^embedding\.weight: .*the first output that differs is that of attention\.projection",
    ),
    "heads in blocks that are not said to be": (
        transformer,
        {**plan_for(transformer()), "blocks.*.query_key_value": Column(unit=4)},
        TEXTS,
        r"the first output that differs is that of blocks\.0\.projection \(the plan has Row\(",
    ),
    "a norm of a rank's own heads": (
        double(Reader),
        without(READER, "attention.query_norm"),
        TEXTS,
        r"^attention\.query_norm\.weight: the plan has Attributes\('heads'\) of attention, and "
        r"nothing of it; .*the sum over the ranks is right, as OnShards\(\) of its module makes it",
    ),
    "on shards that are none": (
        mlp,
        {"0": Column(), "2": Row(), "8": OnShards()},
        NUMBERS,
        r"^8\.weight: the plan has OnShards\(\); .*2 times too large",
    ),
    "a divided layer on shards": (
        mlp,
        {"0": (Column(), OnShards()), "2": Row(), "": OnShards()},
        NUMBERS,
        r"^0\.weight: the plan has Column\(\) and OnShards\(\); its gradient differs",
    ),
    "a part of what zeros hide": (
        double(Gated),
        {"query": Column(), "key": Column(blocks=2), "contract": Row()},
        NUMBERS,
        r"^query\.weight: the plan has Column\(\); its gradient differs",
    ),
    "heads that are not divided": (
        transformer,
        without(plan_for(transformer()), "blocks.*"),
        TEXTS,
        r"the first output that differs is that of blocks\.0\.projection \(the plan has Row\(",
    ),
    "positions on shards": (
        transformer,
        {**SEQUENCE, "position": Cut(0)},
        TEXTS,
        r"^position\.weight: the plan has Cut\(dim=0\); .*the sum over the ranks is right",
    ),
    "the last norm on shards": (
        transformer,
        without(SEQUENCE, "norm"),
        TEXTS,
        r"^norm\.weight: the plan has OwnDraws\(\) of the model, and nothing of it;",
    ),
    "dropout of shards that is the same": (
        partial(transformer, dropout=0.1),
        without(SEQUENCE, ""),
        TEXTS,
        r"^random numbers of the shape \[3, 4, 16\], in a Transformer, are for a part of "
        r"\[3, 8, 16\], but by the plan all ranks draw the same",
    ),
    "dropout of the whole that is not": (
        double(Dropped),
        {**PAIR, "outer": OwnDraws()},
        NUMBERS,
        r"^random numbers of the shape \[7, 3\], in a Dropout, are for what all ranks have whole",
    ),
    "another model in evaluation": (
        double(Lazy),
        PAIR,
        NUMBERS,
        "^divided by the plan, the model has another loss in evaluation: correct",
    ),
    "a note of what a rank has": (
        double(Noting),
        PAIR,
        NUMBERS,
        "^divided by the plan, the model has another buffer mean after a pass: ",
    ),
    "shards that are joined twice": (
        transformer,
        {**SEQUENCE, "blocks.1": Join(1)},
        TEXTS,
        "^divided by the plan, the model fails",
    ),
}


def tried(make: Callable[[], nn.Module], plan: Any, examples: Any, group: Group) -> str:
    inputs, targets = examples
    try:
        prove_plan(make(), plan, inputs, loss_of(targets), group)
    except PlanError as error:
        return str(error)
    return ""


def test_right_plans_pass_and_wrong_ones_are_refused_by_name() -> None:
    def program(context: RankContext) -> list[str]:
        cases = [(*right, "") for right in RIGHT.values()] + list(WRONG.values())
        return [tried(make, plan, examples, context.group) for make, plan, examples, _ in cases]

    rows = on_ranks(2, program)
    assert rows[0] == rows[1], "all ranks raise the same"
    right, wrong = rows[0][: len(RIGHT)], rows[0][len(RIGHT) :]
    assert dict(zip(RIGHT, right, strict=True)) == dict.fromkeys(RIGHT, "")
    missed = {
        name: found
        for (name, (*_, message)), found in zip(WRONG.items(), wrong, strict=True)
        if not re.search(message, found)
    }
    assert not missed, "\n".join(f"{name}: {found}" for name, found in missed.items())


def everything(model: nn.Module) -> Any:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    hooks = [module._forward_hooks for module in model.modules()]
    return state, gradients, list(map(len, hooks)), model.calls, model.training


def kept(make: Any, group: Group) -> list[bool]:
    """Whether a proof leaves a model, the generators and the meter as they were."""
    torch.manual_seed(group.rank)
    random.seed(group.rank)
    model = double(Counting)().train()
    if make is None:
        model.unlike = lambda: model  # cannot be copied
    before = everything(model)
    generators = torch.get_rng_state(), random.getstate()
    inputs, _ = TEXTS
    targets = torch.tensor([0, 1, 2])
    plan = {"pair.0": Column(), "pair.2": Row()}
    prove_plan(model, plan, inputs, loss_of(targets), group, make=double(Counting))
    after = everything(model)
    return [
        all(torch.equal(one, after[0][name]) for name, one in before[0].items()),
        before[1:] == after[1:],
        torch.equal(generators[0], torch.get_rng_state()),
        generators[1] == random.getstate(),
        group.meter.counters.bytes_sent == 0,
        group.meter.counters.messages_sent == 0,
    ]


def test_a_proof_leaves_everything_as_it_was() -> None:
    """Also a model whose forward pass writes into its weights, and one that cannot be copied."""

    def program(context: RankContext) -> list[bool]:
        return kept(double(Counting), context.group) + kept(None, context.group)

    for row in on_ranks(2, program):
        assert all(row), row


class Halved(nn.Module):
    """Computes its layers in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.pair = nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs: Tensor = checkpoint(self.pair, inputs.float(), use_reentrant=False)
        return outputs


def other_ways(group: Group) -> list[str]:
    """What is right though it looks otherwise, and what is wrong on one rank."""
    inputs, targets = NUMBERS
    said_of: list[str] = [tried(Halved, {"pair.0": Column(), "pair.2": Row()}, NUMBERS, group)]
    model = transformer()
    prove_plan(
        model,
        plan_for(model, gather_scores=False),
        TEXTS[0],
        lambda scores: F.cross_entropy(scores, TEXTS[1]),
        group,
        divided_loss=lambda scores: vocabulary_parallel_cross_entropy(scores, TEXTS[1], group),
    )
    others = (inputs + group.rank, targets)
    said_of.append(tried(mlp, plan_for(mlp()), others, group))
    # The last rank forgets a half of its gradient.
    with pytest.raises(PlanError) as caught:
        prove_plan(
            mlp(),
            {"0": Column(), "2": Row()},
            inputs,
            loss_of(targets),
            group,
            divided_loss=lambda outputs: F.cross_entropy(
                outputs if group.rank == 0 else outputs.detach() / 2 + outputs / 2, targets
            ),
        )
    return [*said_of, str(caught.value)]


def test_what_is_computed_in_half_precision_and_what_is_wrong_on_one_rank() -> None:
    for halved, unlike, one in on_ranks(2, lambda context: other_ways(context.group)):
        assert halved == ""
        assert unlike.startswith("undivided, the model's loss differs between the ranks")
        assert " of its largest value on rank 1" in one


def test_what_a_plan_says_of_a_parameter() -> None:
    plan = {"blocks.*": (Attributes("heads"), OwnDraws()), "blocks.*.first": Column(blocks=3)}
    assert plan_text_for(plan, ["blocks.0.first.weight"]) == "the plan has Column(blocks=3)"
    assert plan_text_for(plan, ["tied", "blocks.0.first.weight"]) == "the plan has Column(blocks=3)"
    assert plan_text_for(plan, ["blocks.0.norm.bias"]) == (
        "the plan has Attributes('heads') and OwnDraws() of blocks.0, and nothing of it"
    )
    assert plan_text_for(plan, ["output.weight"]) == "the plan has no entry for it"


def test_a_model_that_cannot_be_copied_needs_another_one() -> None:
    model = mlp()
    model.known = lambda: model
    with pytest.raises(ValueError, match=r"this Sequential cannot be copied, .*: give make="):
        prove_plan(model, plan_for(mlp()), NUMBERS[0], loss_of(NUMBERS[1]), Group())
