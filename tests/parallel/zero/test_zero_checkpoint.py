"""Checkpoints of divided models: on any number of ranks, in one process, and between all of
them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Batch, batches, network, on_ranks, part
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from dure.contracts.world import RankContext
from dure.errors import RunFolderError
from dure.parallel.zero import ZeroRedundancy, read_whole
from dure.parallel.zero.gather_order import GatherAction
from dure.parallel.zero.passes import MessageOrders

JOINT = batches(6, 12)


class Net(nn.Module):
    """A frozen layer, a shared one, a single number, one that is never used, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.body[2].requires_grad_(False)  # type: ignore[index]
        self.norm = nn.BatchNorm1d(3).double()
        self.shared = nn.Linear(3, 3, bias=False).double()
        self.again = self.shared
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.never = nn.Linear(2, 2).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm.eval()(
            self.body(inputs)
        )  # statistics stay, so that parts of a batch are as the whole
        result: torch.Tensor = self.scale * self.again(torch.tanh(self.shared(hidden)))
        return result


def make() -> Net:
    torch.manual_seed(1)
    return Net()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[:3], "lr": 0.02}, {"params": trained[3:], "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=0.01)


def train(
    model: nn.Module, optimizer: Any, joint: list[Batch], context: RankContext | None = None
) -> None:
    for batch in joint:
        inputs, targets = batch if context is None else part(batch, context)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def divided(context: RankContext, stage: int, **options: Any) -> tuple[Net, Any, ZeroRedundancy]:
    model = make()
    optimizer = optimizer_of(model)
    zero = ZeroRedundancy(model, optimizer, stage, context.group, units=60, **options)  # type: ignore[arg-type]
    return model, optimizer, zero


def vector(state: Any) -> torch.Tensor:
    return torch.cat([value.double().reshape(-1) for value in state.values()])


def goes_on_from(folder: Path, stage: int, context: RankContext) -> torch.Tensor:
    model, optimizer, zero = divided(context, stage)
    zero.load(folder)
    train(model, optimizer, JOINT[3:], context)
    return vector(zero.state_dict(everywhere=True))


def test_what_some_ranks_write_other_numbers_of_ranks_and_one_process_go_on_with(
    tmp_path: Path,
) -> None:
    def writes(context: RankContext) -> None:
        model, optimizer, zero = divided(context, 3)
        train(model, optimizer, JOINT[:3], context)
        zero.save(tmp_path)

    on_ranks(3, writes)
    reference = make()
    train(reference, optimizer := optimizer_of(reference), JOINT)
    expected = vector(reference.state_dict())
    for ranks, stage in ((2, 1), (4, 3), (1, 2)):
        found = on_ranks(ranks, partial(goes_on_from, tmp_path, stage))
        assert max(float((each - expected).abs().max()) for each in found) < 1e-12

    alone = make()
    optimizer = optimizer_of(alone)
    weights, state = read_whole(tmp_path)
    alone.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(alone, optimizer, JOINT[3:])
    assert float((vector(alone.state_dict()) - expected).abs().max()) < 1e-12


def test_whole_states_go_from_one_process_to_ranks_and_back() -> None:
    start = make()
    optimizer = optimizer_of(start)
    train(start, optimizer, JOINT[:2])

    def program(stage: int, context: RankContext) -> Any:
        model, divided_optimizer, zero = divided(context, stage)
        zero.load_state_dict(start.state_dict())
        zero.load_optimizer_state_dict(optimizer.state_dict())
        train(model, divided_optimizer, JOINT[2:4], context)
        return zero.state_dict(), zero.optimizer_state_dict()

    reference = make()
    train(reference, optimizer_of(reference), JOINT)
    for stage in (2, 3):
        (weights, state), (nothing, _) = on_ranks(2, partial(program, stage))
        assert nothing == {}
        assert list(weights) == list(start.state_dict())
        alone = make()
        alone.load_state_dict(weights)
        back = optimizer_of(alone)
        back.load_state_dict(state)
        train(alone, back, JOINT[4:])
        assert (
            float((vector(alone.state_dict()) - vector(reference.state_dict())).abs().max()) < 1e-12
        )


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RunFolderError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    def program(context: RankContext) -> list[Any]:
        model, _, zero = divided(context, 3)
        zero.save(tmp_path / "mine")
        before = vector(zero.state_dict(everywhere=True))
        other = network()
        ZeroRedundancy(other, torch.optim.Adam, 2, context.group).save(tmp_path / "other")
        state = model.state_dict(keep_vars=True)
        wrong = {name: torch.zeros(2, 2) for name in state}
        said = [
            refused(lambda: zero.load(tmp_path / "none")),
            refused(lambda: zero.load(tmp_path / "other")),
            refused(lambda: zero.load_state_dict({"a": torch.zeros(1)})),
            refused(lambda: zero.load_state_dict(wrong)),
            refused(
                lambda: zero.load_optimizer_state_dict(
                    torch.optim.Adam(other.parameters()).state_dict()
                )
            ),
        ]
        return [*said, bool(torch.equal(before, vector(zero.state_dict(everywhere=True))))]

    for none, other, names, shapes, groups, same in on_ranks(2, program):
        assert none.startswith("RunFolderError: ")
        assert "does not contain a complete checkpoint of ZeRO" in none
        assert other.startswith("ValueError: ")
        assert "belongs to another model" in other
        assert "missing ['again.weight'" in names
        assert "unknown ['a']" in names
        assert "has the shape (2, 2) in the state_dict" in shapes
        assert "this state has groups of [6] parameters" in groups
        assert same


def test_a_checkpoint_without_all_of_its_parts_is_refused(tmp_path: Path) -> None:
    def program(context: RankContext) -> None:
        divided(context, 2)[2].save(tmp_path)

    on_ranks(2, program)
    (tmp_path / "00001-of-00002.safetensors").unlink()
    with pytest.raises(RunFolderError, match="does not contain a complete checkpoint of ZeRO"):
        read_whole(tmp_path)


def test_what_version_1_wrote_is_read_and_what_a_later_one_writes_is_refused(
    tmp_path: Path,
) -> None:
    def program(context: RankContext) -> None:
        model, optimizer, zero = divided(context, 3)
        train(model, optimizer, JOINT[:1], context)
        zero.save(tmp_path)

    on_ranks(2, program)
    weights, state = read_whole(tmp_path)
    for path in tmp_path.glob("*-of-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        runs = json.loads(metadata["runs"])
        metadata["runs"] = json.dumps(
            {name: [run["start"], run["stop"]] for name, run in runs.items()}
        )
        save_file(tensors, path, metadata)
    index = json.loads((tmp_path / "index.json").read_text())
    version = index.pop("version")
    # Neither had checksums.
    del index["checksum"], index["files"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    before, state_before = read_whole(tmp_path)
    assert before.keys() == weights.keys()
    assert all(torch.equal(before[name], weights[name]) for name in weights)
    assert state_before["param_groups"] == state["param_groups"]
    for number, own in state["state"].items():
        there = state_before["state"][number]
        assert all(torch.equal(there[name], own[name]) for name in own)

    (tmp_path / "index.json").write_text(json.dumps({**index, "version": version + 1}))
    with pytest.raises(RunFolderError, match=f"has version {version + 1}"):
        read_whole(tmp_path)


def test_the_order_of_messages_is_taken_as_either_version_wrote_it() -> None:
    def orders() -> MessageOrders:
        return MessageOrders([[0], [2, 1]], set(), 1)

    learned = orders()
    assert not learned.restore([])
    assert learned.restore([1, 0, 1, -1 - 1, 0, -1 - 0, -1 - 2])
    assert learned.units == [1, 0]
    assert learned.events[:2] == [GatherAction("gather", 1), GatherAction("reduce", 1)]
    again = orders()
    assert not again.restore(orders().state())
    assert again.restore(learned.state())
    assert (again.units, again.events) == (learned.units, learned.events)
    with pytest.raises(RunFolderError, match="has version 9"):
        orders().restore({**learned.state(), "version": 9})


def without(index: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in index.items() if name != key}


def flip(file: Path) -> None:
    """Its last byte is another one, which no header tells."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


DAMAGES: list[Callable[[Path, dict[str, Any]], Any]] = [
    lambda folder, index: (folder / "index.json").write_text("["),
    lambda folder, index: (folder / "index.json").write_text("[]"),
    lambda folder, index: (folder / "index.json").write_text(json.dumps(without(index, "ranks"))),
    lambda folder, index: (folder / "index.json").write_text(json.dumps(without(index, "names"))),
    lambda folder, index: (folder / "index.json").write_text(json.dumps({**index, "shapes": {}})),
    lambda folder, index: (folder / "index.json").write_text(json.dumps({**index, "ranks": "2"})),
    lambda folder, index: (folder / "index.json").write_text(
        json.dumps({**index, "order": index["order"][::-1]})
    ),
    lambda folder, index: flip(folder / "00000-of-00002.safetensors"),
    lambda folder, index: (folder / "rest.safetensors").write_bytes(b"\x08" + bytes(15)),
    lambda folder, index: (folder / "00001-of-00002.safetensors").write_bytes(b"\xff" * 64),
    lambda folder, index: save_file(
        {"weights/first.weight": torch.zeros(1)}, folder / "00001-of-00002.safetensors"
    ),
    lambda folder, index: save_file(
        {"weights/first.weight": torch.zeros(1)},
        folder / "00001-of-00002.safetensors",
        {"runs": "{}", "numbers": "{}"},
    ),
]


def test_a_damaged_checkpoint_is_refused_on_every_rank_and_nothing_changes(tmp_path: Path) -> None:
    def program(context: RankContext) -> list[Any]:
        model, optimizer, zero = divided(context, 2)
        train(model, optimizer, JOINT[:1], context)
        zero.save(tmp_path / "good")
        train(model, optimizer, JOINT[1:2], context)
        before = vector(zero.state_dict(everywhere=True))
        said = []
        for number, damage in enumerate(DAMAGES):
            bad = tmp_path / str(number)
            if context.group.rank == 0:
                shutil.copytree(tmp_path / "good", bad)
                damage(bad, json.loads((bad / "index.json").read_text()))
            context.group.all_gather_values([0.0])
            # rank 0 reads the one that is damaged, and rank 1 another
            one = bad if context.group.rank == 0 else tmp_path / "good"
            said.append(refused(lambda one=one: zero.load(one)))  # type: ignore[misc]
        same = bool(torch.equal(before, vector(zero.state_dict(everywhere=True))))
        train(model, optimizer, JOINT[2:3], context)
        return [same, *said]

    (same, *mine), (_, *theirs) = on_ranks(2, program)
    assert same
    for number, (own, other) in enumerate(zip(mine, theirs, strict=True)):
        assert own.startswith("RunFolderError: "), (number, own)
        assert "does not contain a complete checkpoint of ZeRO" in own
        assert other.startswith("RunFolderError: rank 0: "), (number, other)
        with pytest.raises(RunFolderError, match="does not contain a complete checkpoint of ZeRO"):
            read_whole(tmp_path / str(number))


def test_what_one_rank_cannot_write_or_load_no_rank_waits_for(tmp_path: Path) -> None:
    def program(context: RankContext) -> list[str]:
        _, _, zero = divided(context, 3)
        # each host its own folder; and a folder that is a file
        apart = tmp_path / f"of rank {context.group.rank}"
        blocked = tmp_path / "file" if context.group.rank == 1 else tmp_path / "folder"
        (tmp_path / "file").write_text("")
        state = zero.state_dict(everywhere=True)
        if context.group.rank == 1:
            state["norm.running_mean"] = torch.zeros(1, dtype=torch.float64)
        return [
            refused(lambda: zero.save(apart)),
            refused_anyhow(lambda: zero.save(blocked)),
            refused(lambda: zero.load_state_dict(state)),
        ]

    def refused_anyhow(call: Callable[[], Any]) -> str:
        try:
            return refused(call)
        except OSError as error:
            return f"{type(error).__name__}: {error}"

    zero, one = on_ranks(2, program)
    assert "rank 0 cannot find" in zero[0]
    assert one[0].startswith("RunFolderError: rank 0: rank 0 cannot find")
    assert zero[1].startswith("RunFolderError: rank 1: ")
    assert one[1].startswith("FileExistsError")
    assert zero[2].startswith("ValueError: rank 1: norm.running_mean has the shape (1,)")
    assert one[2].startswith("ValueError: norm.running_mean has the shape (1,)")
