"""Changed settings of parameter groups belong to a client and travel with its optimizer's state:
with a handed head and into checkpoints. They are reset where an optimizer begins anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.data.client_part import divide
from dure.errors import RunFolderError
from dure.parallel.pipeline.rng import RandomStream
from dure.split.blame import InvalidMessageError
from dure.split.cutting import CutStages, cut_at
from dure.split.head_checks import HeadChecks
from dure.split.messages import HeadHandover, SideState
from dure.split.network.frames import SplitFrameError, decode, encode
from dure.split.optimizer_settings import check_settings
from dure.split.sides import Side, state_from_tree, state_to_tree, weighted_loss
from dure.split.strategy import Split
from dure.tasks.loss_shares import CountedLoss
from small import small_task

BATCH = 8
CLIENTS = 2


class Counting(torch.optim.Optimizer):
    """Gradient descent whose rate falls with a count, which lies where `kind` says."""

    def __init__(self, params: Any, kind: str, lr: float = 0.3) -> None:
        first: dict[str, Any] = {"lr": lr}
        if kind == "number":
            first["count"] = 0
        if kind == "tensor":
            first["count"] = torch.zeros(())
        if kind == "list":
            first["count"] = [0, None]
        super().__init__(params, first)
        self.kind = kind

    def counted(self) -> float:
        (group,) = self.param_groups
        state: Any = self.state
        if self.kind == "shared":
            state.setdefault("counts", {"steps": 0})["steps"] += 1
            return float(state["counts"]["steps"])
        if self.kind == "list":
            group["count"][0] += 1
            return float(group["count"][0])
        if self.kind == "tensor":
            group["count"].add_(1)
        else:
            group["count"] = group.get("count", 0) + 1
        return float(group["count"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        rate = group["lr"] / self.counted()
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-rate)


KINDS = ("number", "added later", "tensor", "list", "shared")


def made(kind: str) -> Callable[[Any], torch.optim.Optimizer]:
    return partial(Counting, kind=kind)


def task_of(kind: str, **others: Any) -> dure.Task:
    return small_task(n=24, optimizer=made(kind), **others)


def batches(task: dure.Task, rounds: int, clients: int = CLIENTS) -> list[list[list[Tensor]]]:
    """Return the indices of the batches of each round and client."""
    parts = divide(dure.SplitLearning().partition, clients, task.train, BATCH, 0, joins=False)
    steps = [part.batches.steps_per_epoch for part in parts]
    return [
        [
            [part.at(number * n + step) for step in range(n)]
            for part, n in zip(parts, steps, strict=True)
        ]
        for number in range(rounds)
    ]


def step(task: dure.Task, model: nn.Module, optimizer: Any, batch: Tensor) -> None:
    inputs, targets = task.train.batch(batch)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def in_turn(task: dure.Task, rounds: int) -> Tensor:
    model = seeded_model(task, 0)
    optimizer = task.optimizer(model.parameters())
    for of_round in batches(task, rounds):
        for batch in [one for of_client in of_round for one in of_client]:
            step(task, model, optimizer, batch)
    return flat(model)


def jointly(task: dure.Task, rounds: int) -> Tensor:
    model = seeded_model(task, 0)
    optimizer = task.optimizer(model.parameters())
    for of_round in batches(task, rounds):
        for together in zip(*of_round, strict=True):
            step(task, model, optimizer, torch.cat(together))
    return flat(model)


def averaged(task: dure.Task, rounds: int) -> Tensor:
    """Federated averaging: each client's optimizer begins anew in every round."""
    model = seeded_model(task, 0)
    for of_round in batches(task, rounds):
        found = []
        for of_client in of_round:
            own = seeded_model(task, 0)
            own.load_state_dict(model.state_dict())
            optimizer = task.optimizer(own.parameters())
            for batch in of_client:
                step(task, own, optimizer, batch)
            found.append(flat(own))
        nn.utils.vector_to_parameters(torch.stack(found).mean(0), model.parameters())
    return flat(model)


def personal(task: dure.Task, rounds: int) -> Tensor:
    """In turn with a head for each client and one tail; the mean of the heads, and the tail."""
    whole = seeded_model(task, 0)
    cut = 1
    heads = [seeded_model(task, 0)[:cut] for _ in range(CLIENTS)]  # type: ignore[index]
    tail = whole[cut:]  # type: ignore[index]
    optimizers = [task.optimizer(one.parameters()) for one in (*heads, tail)]
    for of_round in batches(task, rounds):
        for client, of_client in enumerate(of_round):
            for batch in of_client:
                inputs, targets = task.train.batch(batch)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                F.cross_entropy(tail(heads[client](inputs)), targets).backward()
                optimizers[client].step()
                optimizers[-1].step()
    mean = torch.stack([flat(one) for one in heads]).mean(0)
    return torch.cat([mean, flat(tail)])


SETTINGS: dict[str, Any] = {"clients": CLIENTS, "batch_size": BATCH, "cut": ("1",)}
SYSTEMS: Mapping[str, tuple[Split, Callable[[dure.Task, int], Tensor]]] = {
    "in turn, peers": (dure.SplitLearning(**SETTINGS), in_turn),
    "in turn, server": (dure.SplitLearning(handover="server", **SETTINGS), in_turn),
    "in turn, personal": (dure.SplitLearning(personal_heads=True, **SETTINGS), personal),
    "parallel": (dure.ParallelSplit(**SETTINGS), jointly),
    "SplitFed v1": (dure.SplitFed(**SETTINGS), averaged),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_run_and_a_resumed_one_are_plain_pytorch(system: str, kind: str, tmp_path: Path) -> None:
    strategy, oracle = SYSTEMS[system]
    task = task_of(kind)
    folder = tmp_path / "run"
    dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=1), out=folder)
    resumed = dure.resume(folder, task=task, stop=dure.Stop(rounds=3))
    assert (flat(resumed.model) - oracle(task, 3)).abs().max() < 1e-12


def test_an_optimizer_that_looks_at_its_weights_when_it_is_made_begins_anew_with_a_round() -> None:
    class Anchored(torch.optim.SGD):
        """Pulls towards the weights with which it was made."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.3)
            for one in self.param_groups[0]["params"]:
                self.state[one]["anchor"] = one.detach().clone()

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for one, state in self.state.items():
                if one.grad is not None:
                    one.grad.add_(one.detach() - state["anchor"])
            super().step()

    task = small_task(n=24, optimizer=Anchored)
    strategy, oracle = SYSTEMS["SplitFed v1"]
    run = dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=3))
    assert (flat(run.model) - oracle(task, 3)).abs().max() < 1e-12


# Runs that an earlier version has saved


def without_settings(folder: Path, monkeypatch: pytest.MonkeyPatch, task: dure.Task) -> None:
    """Save a run as earlier versions of dure did."""

    def as_before(own: SideState | None) -> Any:
        tree = state_to_tree(own)
        return tree and {name: tree[name] for name in ("weights", "buffers", "optimizer")}

    monkeypatch.setattr("dure.split.simulated.state_to_tree", as_before)
    strategy, _ = SYSTEMS["in turn, peers"]
    dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=1), out=folder)


def test_an_older_run_goes_on_where_steps_change_no_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = small_task(n=24, optimizer=partial(torch.optim.Adam, lr=0.01))
    without_settings(tmp_path / "run", monkeypatch, task)
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=3))
    assert (flat(resumed.model) - in_turn(task, 3)).abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_an_older_run_is_refused_by_name_where_they_do(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_settings(tmp_path / "run", monkeypatch, task_of(kind))
    with pytest.raises(RunFolderError, match="that Counting changes"):
        dure.resume(tmp_path / "run", task=task_of(kind), stop=dure.Stop(rounds=3))


# What can neither be saved nor sent


class Odd(torch.optim.SGD):
    """Has an object among its settings, or a key of the state that is no name."""

    def __init__(self, params: Any, what: str) -> None:
        super().__init__(params, lr=0.1)
        self.what = what
        self.param_groups[0]["odd"] = object()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state: Any = self.state
        if self.what == "object":
            self.param_groups[0]["odd"] = object()
        if self.what == "key":
            state[7] = {"count": 1}
        super().step()


@pytest.mark.parametrize(
    ("what", "said"), [("object", "changes its setting odd"), ("key", "keeps state under 7")]
)
def test_what_can_neither_be_saved_nor_sent_is_refused_before_any_work(
    what: str, said: str
) -> None:
    task = small_task(n=24, optimizer=partial(Odd, what=what))
    with pytest.raises(ValueError, match=said):
        dure.train(task, SYSTEMS["in turn, peers"][0], dure.Simulated(), dure.Stop(rounds=1))


def test_an_object_that_no_step_changes_is_the_optimizers_own() -> None:
    check_settings(Odd([nn.Parameter(torch.ones(2))], "nothing"))
    task = small_task(n=24, optimizer=partial(Odd, what="nothing"))
    run = dure.train(task, SYSTEMS["parallel"][0], dure.Simulated(), dure.Stop(rounds=1))
    assert flat(run.model).isfinite().all()


# Heads that others send


def side_of(task: dure.Task) -> Side:
    """The heads' side of a small model that is cut."""
    cut = cut_at(task, seeded_model(task, 0), ("1",), 4)
    loss = weighted_loss(CountedLoss(task.loss, None))
    return Side(CutStages(cut, [0], RandomStream(0, carried=False), loss), task)


def after_a_step(side: Side) -> SideState:
    side.update([torch.ones_like(one) for one in side.parameters.values()], 0)
    return side.own()


def as_message(own: SideState) -> SideState:
    frame: Any = decode(bytearray(b"".join(map(bytes, encode(HeadHandover(0, own))))))
    head: SideState = frame.head
    return head


def as_saved(own: SideState) -> SideState:
    return state_from_tree(state_to_tree(own) or {})


@pytest.mark.parametrize("way", [as_message, as_saved])
@pytest.mark.parametrize("kind", KINDS)
def test_what_has_changed_travels_and_is_saved(
    kind: str, way: Callable[[SideState], SideState]
) -> None:
    side = side_of(task_of(kind))
    begun = side.own().weights[0]
    own = way(after_a_step(side))
    other = side_of(task_of(kind))
    HeadChecks(other).check(own)
    other.take(own)
    moved = begun - after_a_step(other).weights[0]
    assert torch.allclose(moved, torch.full_like(moved, 0.3 / 1 + 0.3 / 2))


def test_an_unchanged_rate_is_each_clients_own() -> None:
    side = side_of(task_of("number"))
    assert after_a_step(side).groups == ({"count": 1},)
    assert after_a_step(side_of(small_task())).groups == ({},)


LIES: Mapping[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"groups": ({"count": math.nan},)}, "is nan"),
    "infinite": ({"groups": ({"lr": math.inf},)}, "is inf"),
    "a text": ({"groups": ({"count": "1"},)}, "a str, and has to be a int"),
    "a tensor": ({"groups": ({"count": torch.zeros(1000)},)}, "a Tensor, and has to be"),
    "a list": ({"groups": ({"count": [1]},)}, "a list, and has to be"),
    "another name": ({"groups": ({"maximise": True},)}, "changed maximise"),
    "a group more": ({"groups": ({}, {})}, "2 parameter groups"),
    "no groups": ({"groups": None}, "steps of the optimizer change are missing"),
    "shared": ({"shared": {"counts": 1}}, "changed counts"),
}


@pytest.mark.parametrize("lie", LIES)
def test_settings_that_this_optimizer_cannot_have_are_refused(lie: str) -> None:
    side = side_of(task_of("number"))
    changes, said = LIES[lie]
    own = msgspec.structs.replace(after_a_step(side), **changes)
    with pytest.raises(InvalidMessageError, match=said):
        HeadChecks(side).check(own)


@pytest.mark.parametrize("groups", [({"lr": 100.0},), ({"maximize": True},)])
def test_nobody_changes_a_setting_of_an_optimizer_of_torchs_own(groups: Any) -> None:
    side = side_of(small_task())
    own = msgspec.structs.replace(after_a_step(side), groups=groups)
    with pytest.raises(InvalidMessageError, match="does not change that here"):
        HeadChecks(side).check(own)


def test_where_optimizers_begin_anew_no_settings_come() -> None:
    side = side_of(task_of("number"))
    with pytest.raises(InvalidMessageError, match="ends with the round"):
        HeadChecks(side, forgets=True).check(after_a_step(side))


@pytest.mark.parametrize("value", [object(), {1: 2}, {"deep": [object()]}, b"code", {3}])
def test_a_setting_that_cannot_travel_is_named_before_it_leaves(value: Any) -> None:
    own = msgspec.structs.replace(side_of(small_task()).own(), groups=({"odd": value},))
    with pytest.raises(SplitFrameError, match="odd"):
        encode(HeadHandover(0, own))
