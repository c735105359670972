"""Vertical split learning: nobody shares anything with the others but messages, which are plain."""

from __future__ import annotations

import gc
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.data.batches import Batches
from dure.data.examples import Examples
from dure.errors import CutNotANumberError, LossNotFiniteError
from dure.split import alignment
from dure.split.alignment import AlignedHolder, AlignedParty
from dure.split.compute_queue import ComputeQueue
from dure.split.parties import messages
from dure.split.parties.label_holder import LabelHolder, LabelParty
from dure.split.parties.messages import ActivationForm, ActivationGradients, Activations, BeginStep
from dure.split.parties.model import VerticalPart
from dure.split.parties.part import TrainedPart
from dure.split.parties.party import Party
from dure.tasks.loss_shares import CountedLoss

ADAM = partial(torch.optim.Adam, lr=0.01)
FEATURES = [[0, 1], [2], [3, 4, 5]]
WIDTH = 4
PEOPLE = 30
BATCH = 8
Drive = Callable[[str, str, Any], Any]


def head(number: int) -> nn.Module:
    return nn.Sequential(nn.Linear(len(FEATURES[number]), WIDTH), nn.Tanh()).double()


def tail() -> nn.Module:
    return nn.Linear(WIDTH * len(FEATURES), 3).double()


def model() -> nn.Module:
    heads = [head(number) for number in range(len(FEATURES))]
    return dure.VerticalModel(heads, tail(), "concat", FEATURES).double()


def data() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    inputs = torch.randn(PEOPLE, 6, generator=draws, dtype=torch.float64)
    return inputs, torch.arange(PEOPLE) % 3


def task() -> dure.Task:
    return dure.Task(model, F.cross_entropy, data(), optimizer=ADAM)


def at_once(examples: int, back: bool) -> float:
    return 0.0


def begun(module: nn.Module, name: str) -> nn.Module:
    """A part with the weights that a run begins with, in tensors of its own."""
    whole = seeded_model(task(), 0)
    module.load_state_dict(whole.get_submodule(name).state_dict())
    return module


def trained(module: nn.Module) -> TrainedPart:
    return TrainedPart(VerticalPart.whole(module), module, ADAM)


def batches() -> Batches:
    return Batches(PEOPLE, BATCH, 0)


def party(number: int, holder: str) -> Party:
    """Of its own head and columns, and the seed that orders people: it has nothing else."""
    own = data()[0][:, FEATURES[number]]
    part = trained(begun(head(number), f"heads.{number}"))
    return Party(
        number, holder, part, lambda rows, step: own[rows], batches(), 100 + number, at_once
    )


def holder(name: str, busy: ComputeQueue) -> LabelHolder:
    """Of the tail and the labels, and what leaves each head."""
    _, labels = data()
    leaving = {
        f"party {number}": ActivationForm((WIDTH,), torch.float64)
        for number in range(len(FEATURES))
    }
    return LabelHolder(
        name,
        leaving,
        trained(begun(tail(), "tail")),
        "concat",
        lambda rows, step: labels[rows],
        batches(),
        CountedLoss(F.cross_entropy, Examples(torch.zeros(PEOPLE, 1), labels.clone())),
        99,
        at_once,
        busy,
    )


Nodes = dict[str, Any]


def everybody(label_party: int | None) -> tuple[str, Nodes]:
    """Whoever has the labels, and all by their names."""
    name = "server" if label_party is None else f"party {label_party}"
    nodes: Nodes = {f"party {number}": party(number, name) for number in range(len(FEATURES))}
    if label_party is None:
        nodes[name] = holder(name, ComputeQueue())
    else:
        nodes[name] = LabelParty(nodes[name], holder(name, nodes[name].busy))
    return name, nodes


def written(value: Any) -> Any:
    """A tensor as plain data."""
    assert isinstance(value, Tensor), type(value)
    assert not value.requires_grad
    return [str(value.dtype), list(value.shape), value.numpy().tobytes()]


def read(kind: Any, value: Any) -> Tensor:
    assert kind is Tensor
    dtype = getattr(torch, value[0].removeprefix("torch."))
    return torch.frombuffer(bytearray(value[2]), dtype=dtype).reshape(value[1])


def carried(message: Any, kind: Any) -> Any:
    """A message as another process reads it."""
    text = msgspec.msgpack.encode(message, enc_hook=written)
    return msgspec.msgpack.decode(text, type=kind, dec_hook=read)


def talk(nodes: Nodes, first: str, said: Sequence[tuple[str, Any]], carry: Any) -> None:
    """Hands messages over, written down and read again, until nobody says anything."""
    waiting = deque((first, to, message) for to, message in said)
    while waiting:
        sender, to, message = waiting.popleft()
        waiting.extend((to, *one) for one in nodes[to].receive(sender, carry(message), 0.0))


def reached(root: object) -> dict[int, object]:
    """All that can be reached from an object and could be changed, by its identity."""
    plain = (ModuleType, type, BuiltinFunctionType, torch.dtype, torch.device, str, bytes, int)
    found: dict[int, object] = {}
    waiting: list[object] = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in found or isinstance(one, plain):
            continue
        found[id(one)] = one
        if isinstance(one, FunctionType):
            # Its module is code; what it keeps is in its closure.
            waiting += [cell.cell_contents for cell in one.__closure__ or ()]
        elif isinstance(one, Tensor):
            waiting += [one.grad if one.is_leaf else None, getattr(one, "__dict__", None)]
        else:
            waiting += gc.get_referents(one)
    kept = (dict, list, set, deque, Tensor, nn.Module, torch.optim.Optimizer)
    return {
        number: one
        for number, one in found.items()
        if isinstance(one, kept) or (hasattr(one, "__dict__") and not _is_code(one))
    }


def _is_code(one: object) -> bool:
    return isinstance(one, FunctionType | MethodType)


def memory(objects: dict[int, object]) -> set[int]:
    """Where the tensors of objects lie."""
    found = {
        one.untyped_storage().data_ptr() for one in objects.values() if isinstance(one, Tensor)
    }
    return found - {0}


@pytest.mark.parametrize("label_party", [None, 0, 1])
def test_messages_that_are_written_down_and_read_again_train_the_same_bits(
    label_party: int | None,
) -> None:
    name, nodes = everybody(label_party)
    for _ in range(6):
        talk(nodes, name, nodes[name].begin(0.0), partial(carried, kind=messages.Message))
    strategy = dure.VerticalSplit(batch_size=BATCH, label_party=label_party)
    run = dure.train(task(), strategy, dure.Simulated(), dure.Stop(steps=6))
    for number in range(len(FEATURES)):
        node = nodes[f"party {number}"]
        one = node.party if isinstance(node, LabelParty) else node
        wanted = run.model.get_submodule(f"heads.{number}").state_dict()
        for key, weight in one.part.module.state_dict().items():
            assert torch.equal(weight, wanted[key])


@pytest.mark.parametrize("label_party", [None, 1])
def test_nobody_reaches_what_another_has(label_party: int | None) -> None:
    name, nodes = everybody(label_party)
    carry = partial(carried, kind=messages.Message)
    talk(nodes, name, nodes[name].begin(0.0), carry)
    # In the midst of a step as well: what was sent is still needed for the way back.
    for to, message in nodes[name].begin(0.0):
        nodes[to].receive(name, carry(message), 0.0)
    had = [reached(node) for node in nodes.values()]
    assert all(len(memory(one)) > 3 for one in had)
    for place, one in enumerate(had):
        for other in had[:place]:
            shared = [found for number, found in one.items() if number in other]
            assert not shared
            assert not memory(one) & memory(other)


def test_what_is_shared_is_found() -> None:
    """The test above can fail: parties of one process that share their columns."""
    one, other = party(0, "server"), party(1, "server")
    own = data()[0]
    one.read = lambda rows, step: own[rows, :2]
    other.read = lambda rows, step: own[rows, 2:3]
    assert memory(reached(one)) & memory(reached(other))


def test_messages_of_an_alignment_are_plain_too() -> None:
    ids = {
        "server": ["ann", "bob", "cem", "eve"],
        "party 0": ["eve", "dan", "bob", "ann"],
        "party 1": ["bob", "eve", "flo"],
    }
    secrets = {name: bytes([place + 1] * 32) for place, name in enumerate(ids)}
    first = AlignedHolder(
        "server", ["party 0", "party 1"], ids["server"], secrets["server"], most=2
    )
    nodes: Nodes = {
        name: AlignedParty(name, "server", ids[name], secrets[name], most=2)
        for name in ("party 0", "party 1")
    }
    nodes["server"] = first
    talk(nodes, "server", first.begin(0.0), partial(carried, kind=alignment.Message))
    orders = [[ids[name][row] for row in nodes[name].rows] for name in ids]
    assert sorted(orders[0]) == ["bob", "eve"]
    assert orders[0] == orders[1] == orders[2]


# What is not as it was agreed upon, by the name of whoever has sent it

ONES = torch.ones(BATCH, WIDTH, dtype=torch.float64)


def with_nan(values: Tensor) -> Tensor:
    values = values.clone()
    values[-1, -1] = float("nan")
    return values


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        (with_nan(ONES), CutNotANumberError, "party 2 sends activations with NaN at step 1"),
        (ONES[:, :3], ValueError, r"party 2 sends activations of shape \[8, 3\]"),
        (ONES[:7], ValueError, r"party 2 sends activations of shape \[7, 4\]"),
        (ONES[..., None], ValueError, r"party 2 sends activations of shape \[8, 4, 1\]"),
        (ONES.sum(), ValueError, r"party 2 sends activations of shape \[\]"),
        (ONES.float(), ValueError, r"party 2 sends .* torch.float32, .* torch.float64"),
    ],
)
def test_activations_that_are_none_name_their_party_and_change_nothing(
    values: Tensor, error: type[Exception], said: str
) -> None:
    name, nodes = everybody(None)
    one = nodes[name]
    one.begin(0.0)
    for number in range(2):
        assert one.receive(f"party {number}", Activations(0, ONES, True), 0.0) == []
    before = [weight.clone() for weight in one.part.module.parameters()]
    with pytest.raises(error, match=said):
        one.receive("party 2", Activations(0, values, True), 0.0)
    assert all(map(torch.equal, before, one.part.module.parameters()))
    # What is right then is taken, and the step is made.
    said_then = one.receive("party 2", Activations(0, ONES, True), 0.0)
    assert [to for to, _ in said_then] == ["party 0", "party 1", "party 2"]


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        (with_nan(ONES), CutNotANumberError, "server sends gradients with NaN at step 1"),
        (ONES[:7], ValueError, r"server sends party 1 gradients of shape \[7, 4\]"),
        (ONES.float(), ValueError, r"server sends party 1 gradients .* torch.float32"),
    ],
)
def test_gradients_that_are_none_name_the_holder_and_change_nothing(
    values: Tensor, error: type[Exception], said: str
) -> None:
    one = party(1, "server")
    before = [weight.clone() for weight in one.part.module.parameters()]
    one.receive("server", BeginStep(0), 0.0)
    with pytest.raises(error, match=said):
        one.receive("server", ActivationGradients(0, values), 0.0)
    assert all(map(torch.equal, before, one.part.module.parameters()))
    # What is right then is taken.
    one.receive("server", ActivationGradients(0, ONES), 0.0)
    assert one.done == 1
    assert not any(map(torch.equal, before, one.part.module.parameters()))


class Root(nn.Module):
    """Its loss is finite at 0, and its gradients there are none."""

    def forward(self, joined: Tensor) -> Tensor:
        return (joined * 0).pow(0.5) * 0 + torch.zeros(len(joined), 1, dtype=joined.dtype)


def test_a_tail_whose_gradients_are_none_is_named_before_anybody_learns_from_them() -> None:
    def model() -> nn.Module:
        heads = [nn.Linear(2, 3), nn.Linear(4, 3)]
        tail = nn.Sequential(Root(), nn.Linear(3, 3))
        return dure.VerticalModel(heads, tail, "sum", [[0, 1], [2, 3, 4, 5]]).double()

    spoilt = dure.Task(model, F.cross_entropy, data(), optimizer=ADAM)
    with pytest.raises(CutNotANumberError, match="server sends gradients with NaN at step 1"):
        dure.train(spoilt, dure.VerticalSplit(batch_size=BATCH), dure.Simulated())


def test_the_error_is_one_of_losses_that_are_not_finite_and_crosses_processes() -> None:
    error = CutNotANumberError("activations", "party 1", "step 4", intact=False)
    assert isinstance(error, LossNotFiniteError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.where, again.intact) == (str(error), "party 1", False)
