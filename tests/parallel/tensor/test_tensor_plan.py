"""Plans: what they send, what they refuse; whole states; the norm of the gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from divided import (
    apart,
    at_all_degrees,
    backward,
    enliven,
    mlp,
    own_scores,
    texts,
    train,
    transformer,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import dure
from dure.collectives.group import Group
from dure.parallel.tensor import (
    Attributes,
    Column,
    Enter,
    Output,
    Row,
    Vocabulary,
    clip_gradients,
    divided_parameters,
    gradient_norm,
    load_whole,
    parallelize,
    plan_for,
    replicated_parameters,
    vocabulary_parallel_cross_entropy,
    whole_state_dict,
)
from dure.parallel.tensor.rng import mark_on_shards, modules_on_shards

LAYERS = 2
WIDTH = 16
CONTEXT = 8
BATCH = 3


def bytes_of_a_step(group: Group) -> list[int]:
    """Without sequence and with it; then of gathered scores."""
    sent = []
    ((inputs, targets),) = texts(1)
    for sequence in (False, True):
        model = transformer()
        parallelize(model, plan_for(model, sequence=sequence, gather_scores=False), group)
        before = group.meter.counters.bytes_sent
        vocabulary_parallel_cross_entropy(model(inputs), targets, group).backward()  # type: ignore[no-untyped-call]
        sent.append(group.meter.counters.bytes_sent - before)
    return sent


def test_bytes() -> None:
    """Two all-reduces of b·s·h forward and backward a layer, one for embedding and output each."""
    for size, rows in at_all_degrees(bytes_of_a_step).items():

        def all_reduce(n: int, size: int = size) -> int:
            return 8 * (2 * (size - 1) * n // size)

        n = BATCH * CONTEXT * WIDTH
        loss = all_reduce(BATCH * CONTEXT) + all_reduce(2 * BATCH * CONTEXT)
        plain = (4 * LAYERS + 2) * all_reduce(n) + loss
        norms = (2 * LAYERS + 1) * 2 * all_reduce(WIDTH) + all_reduce(CONTEXT * WIDTH)
        assert rows == [[plain, plain + norms]] * size


def states(group: Group) -> list[bool]:
    """A whole state goes into any degree and comes back, bit for bit."""
    found = []
    for tied in (False, True):
        source = transformer(tied)
        enliven(source)
        state = source.state_dict()
        model = transformer(tied)
        parallelize(model, plan_for(model), group)
        load_whole(model, state)
        whole = whole_state_dict(model)
        found.append(all(torch.equal(whole[name], value) for name, value in state.items()))
        undivided = transformer(tied)
        undivided.load_state_dict(whole)
        found.append(apart(undivided.state_dict(), state) == 0)
        found.append((whole["output.weight"] is whole["embedding.weight"]) == tied)
        found.append((model.output.weight is model.embedding.weight) == tied)
        on_root = whole_state_dict(model, everywhere=False)
        found.append(bool(on_root) == (group.rank == 0))
        with pytest.raises(
            ValueError, match=r"the state misses norm\.weight: it belongs to another model"
        ):
            load_whole(
                model, {name: value for name, value in state.items() if name != "norm.weight"}
            )
        with pytest.raises(ValueError, match="the state has beside the model's more:"):
            load_whole(model, {**state, "more": torch.zeros(1)})
        with pytest.raises(
            ValueError,
            match=r"norm.weight has the shape \[3\] in the state, but \[16\] in the model",
        ):
            load_whole(model, {**state, "norm.weight": torch.zeros(3)})
        divided = divided_parameters(model)
        replicated = replicated_parameters(model)
        found.append(divided.keys() | replicated.keys() == dict(model.named_parameters()).keys())
        found.append("blocks.0.expand.bias" in divided and "blocks.0.contract.bias" in replicated)
    return found


def test_whole_states() -> None:
    for rows in at_all_degrees(states).values():
        assert all(map(all, rows)), rows


def norms(group: Group) -> float:
    worst = 0.0
    for sequence in (False, True):
        (batch,) = texts(1)
        alone = transformer()
        model = transformer()
        parallelize(model, plan_for(model, sequence=sequence), group)
        backward(alone, batch)
        backward(model, batch)
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        worst = max(worst, abs(float(gradient_norm(model, group) - expected)))
        worst = max(worst, abs(float(clip_gradients(model, 0.5, group) - expected)))
        worst = max(worst, abs(float(gradient_norm(model, group)) - 0.5))
        copied = copy.deepcopy(model)  # with its hooks
        copied.zero_grad()
        before = train(copied, texts(2))
        fresh = transformer()
        worst = max(
            worst, *(abs(a - b) for a, b in zip(before, train(fresh, texts(2)), strict=True))
        )
    return worst


def test_norm_of_the_gradient() -> None:
    for rows in at_all_degrees(norms).values():
        assert max(rows) < 1e-5  # torch divides by the norm and a millionth


class Unknown(nn.Module):
    pass


class Scaled(nn.Linear):
    def forward(self, tensor: Tensor) -> Tensor:
        return 2 * super().forward(tensor)


class Louder(nn.Embedding):
    def forward(self, indices: Tensor) -> Tensor:
        return 2 * super().forward(indices)


class Branched(nn.Sequential):
    """Its outputs are not only those of one layer behind the other."""

    def forward(self, tensor: Tensor) -> Tensor:
        hidden = self[0](tensor)
        return self[2](self[1](hidden)) + hidden.mean(-1, keepdim=True)


def more_than_linear() -> dict[str, nn.Module]:
    """What a divided layer would leave out, by what is said."""
    layers = [nn.Linear(6, 8) for _ in range(3)]
    layers[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    prune.random_unstructured(layers[2], "weight", 0.5)
    return {
        "a Scaled with a forward of its own": Scaled(6, 8),
        "a Louder with a forward of its own": Louder(6, 8),
        "a ParametrizedLinear with a parametrization": parametrizations.weight_norm(layers[0]),
        "a Linear with hooks": layers[1],
        "with hooks, as of pruning": layers[2],
    }


def refusals(group: Group) -> None:
    def refused(model: nn.Module, plan: Any, message: str) -> None:
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=message):
            parallelize(model, plan, group)
        assert apart(model.state_dict(), before) == 0
        assert not divided_parameters(model)

    refused(
        mlp(),
        {"nothing.*": Column()},
        r"the plan's 'nothing.\*' matches no module of this Sequential",
    )
    refused(
        mlp(),
        {"0": "column"},
        "the plan has 'column' for '0', which is not one of the available kinds",
    )
    refused(mlp(), {"1": Column()}, "1: a Tanh is not a linear layer")
    refused(mlp(), {"0": Column(), "2": Vocabulary()}, "2 is a Linear: only an nn.Embedding")
    refused(mlp(), {"": Row()}, "cannot replace the model itself")
    refused(mlp(), {"0": Attributes("heads")}, "0 has no integer 'heads'")
    refused(mlp(), {"0": Column(blocks=5)}, "0 has 12 outputs, which are not 5 equal blocks")
    for message, layer in more_than_linear().items():
        kind = Vocabulary() if isinstance(layer, nn.Embedding) else Column()
        refused(nn.Sequential(layer, nn.Tanh()), {"0": kind}, message)
        with pytest.raises(ValueError, match="there is no pair of linear layers"):
            plan_for(nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 4)))
    tied = transformer(True)
    refused(
        tied,
        {"embedding": Vocabulary()},
        "embedding and output share a parameter: the plan has to divide both",
    )
    with pytest.raises(ValueError, match="there is no built-in plan for a Unknown; write one"):
        plan_for(Unknown())
    with pytest.raises(
        ValueError, match="there is no built-in plan with sequence=True for a Sequential"
    ):
        plan_for(mlp(), sequence=True)
    with pytest.raises(ValueError, match="there is no pair of linear layers"):
        plan_for(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)))
    if group.size == 4:
        odd = transformer(heads=2)
        refused(odd, plan_for(odd), "blocks.0 has heads = 2, not a multiple of the degree 4")
        refused(
            mlp(),
            {"6": Row(), "8": Column()},
            "8 with 3 outputs has 3 to divide, not a multiple of the degree 4",
        )
    done = mlp()
    parallelize(done, plan_for(done), group)
    with pytest.raises(ValueError, match="this model is divided already"):
        parallelize(done, {"0": Column()}, group)


def test_refusals() -> None:
    at_all_degrees(refusals)


def test_ready_plans_of_multilayer_perceptrons() -> None:
    plan = plan_for(mlp())
    assert plan == {"0": Column(), "2": Row(), "4": Column(), "6": Row()}
    assert plan_for(dure.models.TwoNN()) == {"layers.1": Column(), "layers.3": Row()}
    assert plan_for(transformer())["output"] == Output()


def test_pairs_are_where_layers_stand() -> None:
    """Layers that stand in several places are seen in each: a linear one would end a pair."""
    again = nn.Linear(6, 6)
    softmax = nn.Softmax(-1)
    several = {
        "a linear layer twice": nn.Sequential(again, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), again),
        "a softmax twice": nn.Sequential(softmax, nn.Linear(6, 8), softmax, nn.Linear(8, 4)),
        "another forward": Branched(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)),
    }
    for what, model in several.items():
        with pytest.raises(ValueError, match=r"there is no (pair|built-in plan)"):
            pytest.fail(f"{what}: {plan_for(model)}")
    relu = nn.ReLU()
    model = nn.Sequential(
        nn.Linear(6, 8), relu, nn.Linear(8, 4), relu, nn.Linear(4, 6), relu, nn.Linear(6, 2)
    )
    assert plan_for(model) == {"0": Column(), "2": Row(), "4": Column(), "6": Row()}


class Repeated(nn.Module):
    """One block under two names, whose input enters once for two layers."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.ModuleDict(
            {"one": nn.Linear(6, 8), "two": nn.Linear(6, 8), "back": nn.Linear(8, 6)}
        )
        self.blocks = nn.ModuleList([Gated(block)] * 2)

    def forward(self, tensor: Tensor) -> Tensor:
        for block in self.blocks:
            tensor = tensor + block(tensor)
        return tensor


class Gated(nn.Module):
    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, tensor: Tensor) -> Tensor:
        gate, value = (self.layers[name](tensor) for name in ("one", "two"))
        back: Tensor = self.layers["back"](torch.sigmoid(gate) * value)
        return back


def repeated(group: Group) -> float:
    torch.manual_seed(1)
    alone = Repeated().double()
    model = copy.deepcopy(alone)
    part = Column(enters=False)
    names = {"one": part, "two": part, "back": Row()}
    plan: dict[str, Any] = {f"blocks.*.layers.{name}": kind for name, kind in names.items()}
    parallelize(model, {"blocks.*": Enter(), **plan}, group)
    inputs = [
        torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6).requires_grad_() for _ in range(2)
    ]
    for each, given in zip((alone, model), inputs, strict=True):
        each(given).square().sum().backward()
    return float((inputs[0].grad - inputs[1].grad).abs().max())  # type: ignore[operator]


def test_a_block_of_two_names_is_changed_once() -> None:
    for rows in at_all_degrees(repeated).values():
        assert max(rows) < 1e-12, rows


def dropped(group: Group) -> None:
    """With dropout, in shards and without: all ranks learn the same, and go on drawing the same."""
    for sequence in (False, True):
        model = transformer(dropout=0.3)
        parallelize(model, plan_for(model, sequence=sequence), group)
        torch.manual_seed(9)
        train(model, texts(3), own_scores)
        state = [float(value.double().sum()) for value in whole_state_dict(model).values()]
        rows = group.all_gather_values([*state, float(torch.rand(()))])
        assert all(row == rows[0] for row in rows)
        with pytest.raises(IndexError):
            model(texts(1)[0][0] + 13)
        rows = group.all_gather_values([float(torch.rand(()))])
        assert all(row == rows[0] for row in rows)
        model.eval()
        with torch.no_grad():
            one, other = (model(texts(1)[0][0]) for _ in range(2))
        assert torch.equal(one, other)


def test_dropout_leaves_ranks_alike() -> None:
    at_all_degrees(dropped)


def test_a_module_on_shards_is_known_by_all_of_its_names() -> None:
    shared = nn.Dropout(0.5)
    model = nn.ModuleDict({"first": shared, "second": shared, "other": nn.Dropout(0.5)})
    mark_on_shards(shared)
    assert modules_on_shards(model) == {"first", "second"}
