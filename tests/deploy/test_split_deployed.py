"""Split learning between real processes over TLS: the bits of the simulation, whatever happens to
the server and to clients; and what reaches the server."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deployed import Deployment, Ended, Plan, deployed, tracing
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dure
from dure.data.client_part import divide
from dure.data.partition import IID
from dure.record.checkpoint import read_tree
from small import CLASSES, FEATURES, small_task


@pytest.fixture(autouse=True, scope="module")
def loaded() -> Iterator[None]:
    with tracing():
        yield


Adam = partial(torch.optim.Adam, lr=0.01)


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(8, 7),
        nn.Tanh(),
        nn.Linear(7, CLASSES),
    ).double()


class Decaying(torch.optim.Adam):
    """Adam whose rate falls with a count of steps in its parameter groups."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.01 / group["count"]
        return super().step(closure)


def decaying() -> dure.Task:
    return small_task(optimizer=Decaying)


def with_adam() -> dure.Task:
    return small_task(optimizer=Adam)


def with_statistics() -> dure.Task:
    return small_task(model=normed, optimizer=Adam)


def weighed() -> dure.Task:
    weight = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
    return small_task(loss=nn.CrossEntropyLoss(weight=weight))


PEERS = dure.SplitLearning(clients=3, batch_size=4)
U_SHAPE = dure.SplitLearning(cut=("1", "2"), clients=3, batch_size=4)

PLANS = {
    "in turn": Plan(PEERS, task=with_adam),
    "U-shape, through the server": Plan(
        dure.SplitLearning(cut=("2", "3"), clients=3, batch_size=4, handover="server"),
        task=with_statistics,
    ),
    "parallel": Plan(dure.ParallelSplit(clients=3, batch_size=4), task=weighed),
    "SplitFed v1": Plan(dure.SplitFed(clients=3, batch_size=4), task=with_adam),
    "SplitFed v2, int8": Plan(
        dure.SplitFed(version=2, clients=3, batch_size=4, compression="int8"), rounds=2
    ),
}


def newest_head(folder: Path) -> list[Tensor]:
    """The weights that clients have written down after the newest of all turns."""
    files = folder.glob("site-*/head-*.tree")
    newest = max(files, key=lambda path: int(path.stem.rpartition("-")[2]))
    return list(read_tree(newest)["own"]["weights"])


def check_same(ended: Ended, plan: Plan, folder: Path) -> None:
    """The tail at the server, and the head that its clients have kept, are the simulation's."""
    right = plan.simulated()
    elsewhere = ended.summary.get("weights_elsewhere", [])
    tail = {name: one for name, one in right.tensors.items() if name not in elsewhere}
    assert ended.tensors.keys() == tail.keys()
    assert all(torch.equal(one, ended.tensors[name]) for name, one in tail.items())
    if elsewhere:
        heads = newest_head(folder)
        assert all(
            torch.equal(mine, right.tensors[name])
            for mine, name in zip(heads, elsewhere, strict=True)
        )
    assert repr(ended.losses) == repr(right.losses)
    assert repr(ended.metrics) == repr(right.metrics)
    for count in ("steps", "samples"):
        assert ended.summary[count] == right.summary[count]


@pytest.mark.parametrize("name", PLANS)
def test_deployed_split_learning_has_the_bits_of_the_simulation(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    check_same(deployed(tmp_path, plan, 3, traces=True), plan, tmp_path)


# Head and tail of two files


def make_head() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)).double()


def make_tail() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()


def make_middle() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh()).double()


def make_end() -> nn.Module:
    return nn.Linear(7, CLASSES).double()


def head() -> dure.HeadTask:
    whole = small_task()
    return dure.HeadTask(make_head, train=whole.train, test=whole.test, optimizer=Adam)


def tail() -> dure.TailTask:
    return dure.TailTask(make_tail, loss=cross_entropy, optimizer=Adam)


def head_and_end() -> dure.HeadTask:
    whole = small_task()
    return dure.HeadTask(
        make_head,
        train=whole.train,
        end=make_end,
        loss=cross_entropy,
        test=whole.test,
        optimizer=Adam,
    )


def middle() -> dure.TailTask:
    return dure.TailTask(make_middle, optimizer=Adam)


def both() -> dure.Task:
    return dure.joined(head(), tail())


def both_and_end() -> dure.Task:
    return dure.joined(head_and_end(), middle())


@pytest.mark.parametrize(
    ("strategy", "mine", "theirs", "together"),
    [
        (dure.SplitLearning(clients=2, batch_size=4), head, tail, both),
        (dure.SplitFed(clients=2, batch_size=4), head_and_end, middle, both_and_end),
    ],
    ids=["in turn", "SplitFed, U-shape"],
)
def test_two_files_have_the_bits_of_the_simulation_and_each_side_has_its_own(
    strategy: Any, mine: Any, theirs: Any, together: Any, tmp_path: Path
) -> None:
    plan = Plan(strategy, task=theirs, rounds=3)
    ended = deployed(tmp_path, plan, 2, traces=True, task=mine)
    right = Plan(strategy, task=together, rounds=3).simulated()
    names = right.tensors.keys()
    assert ended.tensors.keys() == {name for name in names if name.startswith("tail.")}
    heads = [load_file(path) for path in tmp_path.glob("site-*/head-*.safetensors")]
    # In turn the second client has the newest; of an average all have the same.
    newest = heads if isinstance(strategy, dure.SplitFed) else [max(heads, key=counted)]
    for found in newest:
        assert found.keys() == names - ended.tensors.keys()
        for name, one in {**ended.tensors, **found}.items():
            assert torch.equal(one, right.tensors[name]), name
    assert repr(ended.losses) == repr(right.losses)
    for one, other in zip(ended.metrics, right.metrics, strict=True):
        assert one["test_loss"] == other["test_loss"]


def counted(weights: dict[str, Tensor]) -> int:
    """Batches that have passed through a head."""
    return int(weights["head.1.num_batches_tracked"])


def test_heads_that_do_not_fit_the_tail_are_refused_by_both_shapes(tmp_path: Path) -> None:
    plan = Plan(dure.SplitLearning(clients=2, batch_size=4), task=middle, rounds=1)
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(2, task=wider_head)
        kind, reason, _ = deployment.server.wait_for("error")
        assert "the tail rejects what the head gives" in reason, (kind, reason)


def make_wider() -> nn.Module:
    return nn.Linear(FEATURES, 9).double()


def wider_head() -> dure.HeadTask:
    whole = small_task()
    return dure.HeadTask(make_wider, train=whole.train, end=make_end, loss=cross_entropy)


# Faults


def training(number: int) -> Callable[[Any], bool]:
    return lambda about: bool(about["round"] >= number)


def test_a_client_that_is_killed_in_its_turn_and_comes_again_changes_no_bit(tmp_path: Path) -> None:
    plan = Plan(PEERS, task=decaying, rounds=5)
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(3)
        for number in (1, 0, 2):
            deployment.clients[number].wait_for("training", training(number + 1))
            deployment.clients[number].kill()
            deployment.join(number)
        check_same(deployment.ended(), plan, tmp_path)


@pytest.mark.parametrize("strategy", [U_SHAPE, dure.ParallelSplit(clients=3, batch_size=4)])
def test_a_server_that_is_killed_goes_on_with_the_turn_after(
    strategy: dure.Strategy, tmp_path: Path
) -> None:
    plan = Plan(strategy, task=decaying, rounds=6)
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(3)
        for at in (2, 4):
            deployment.clients[1].wait_for("training", training(at))
            deployment.restart()
        check_same(deployment.ended(), plan, tmp_path)


def test_the_round_goes_on_without_a_client_that_never_takes_over(tmp_path: Path) -> None:
    plan = Plan(PEERS, rounds=3, options={"deadline": 1.5})
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(3)
        stopped = deployment.clients[1]
        stopped.wait_for("training", training(0))
        stopped.signal(signal.SIGSTOP)
        ended = deployment.ended()
        told = [about.get("waiting", "") for about in deployment.server.said("progress")]
        assert any(text.startswith("client 1 is left out") for text in told), told
        assert ended.summary["samples"] < plan.simulated().summary["samples"]


def wrong_shapes() -> None:
    """From its second round on this client sends values of one number too few."""
    from dure.split.client import SplitClient

    right = SplitClient._ascend

    def ascend(self: SplitClient, now: float) -> Any:
        said = right(self, now)
        if self._turn is None or self._turn.round == 0:
            return said
        (to, message), *rest = said
        values = tuple(value[:, 1:] for value in message.values)  # type: ignore[union-attr]
        import msgspec

        return [(to, msgspec.structs.replace(message, values=values)), *rest]

    SplitClient._ascend = ascend  # type: ignore[method-assign]


def test_values_of_another_shape_are_refused_and_the_others_go_on(tmp_path: Path) -> None:
    plan = Plan(PEERS, rounds=3)
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        for number in range(3):
            deployment.join(number, before=wrong_shapes if number == 1 else int)
        kind, reason, _ = deployment.clients[1].wait_for("error")
        assert kind == "RefusedError"
        assert "values at the cut are float64 [4, 11], but have to be float64 [4, 12]" in reason
        ended = deployment.ended()
        assert all(loss is not None for loss in ended.losses)


def with_nan() -> dure.Task:
    task = small_task()
    task.train.inputs[:, 0] = float("nan")
    return task


def test_no_number_at_the_cut_is_refused_by_name_and_ends_a_run_that_nobody_else_is_in(
    tmp_path: Path,
) -> None:
    plan = Plan(dure.SplitLearning(clients=2, batch_size=4), rounds=2)
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join(0, task=with_nan)
        deployment.join(1, task=with_nan)
        for number in (0, 1):
            kind, reason, _ = deployment.clients[number].wait_for("error")
            assert kind == "RefusedError"
            assert "values at the cut have NaN" in reason
        kind, reason, _ = deployment.server.wait_for("error")
        assert kind == "LossNotFiniteError"
        assert "client 0 and client 1" in reason


def test_a_client_that_has_lost_its_keys_is_not_taken_for_the_one_it_was(tmp_path: Path) -> None:
    plan = Plan(dure.SplitLearning(clients=2, batch_size=4), rounds=40)
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(2)
        deployment.clients[1].wait_for("training", training(1))
        deployment.clients[1].kill()
        deployment.join(1, state=False)
        kind, _, _ = deployment.clients[1].wait_for("error")
        assert kind == "RefusedError"


# What reaches the server


def dumps(path: Path) -> None:
    """All frames that reach this process are written down."""
    from dure.deploy.server import channels

    class Noted(channels.ClientFrame):  # type: ignore[misc]
        def __new__(cls, client: int, frame: bytes) -> Any:
            with path.open("ab") as file:
                pickle.dump((client, bytes(frame)), file)
            return super().__new__(cls, client, frame)

    channels.ClientFrame = Noted  # type: ignore[misc]


def frames_in(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while file.peek(1):  # type: ignore[attr-defined]
            yield pickle.load(file)[1]


def test_neither_examples_nor_labels_nor_heads_reach_the_server(tmp_path: Path) -> None:
    plan = Plan(U_SHAPE, rounds=2)
    seen = tmp_path / "frames"
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve(before=partial(dumps, seen))
        deployment.join_all(3)
        deployment.ended()
    traffic = b"".join(frames_in(seen))
    assert len(traffic) > 10_000
    task = plan.task()
    inputs, targets = task.train.batch(torch.arange(len(task.train)))
    for row in inputs:
        assert row.numpy().tobytes() not in traffic
    # Of a batch of four there are only so many: as 64-bit numbers, one after another.
    for start in range(len(targets) - 3):
        assert targets[start : start + 4].numpy().tobytes() not in traffic
    for weight in newest_head(tmp_path):
        assert weight.numpy().tobytes() not in traffic
    # It would be found: what leaves the head does reach the server.
    assert traffic.count(b"Smashed") == traffic.count(b"OutputGradients") > 0


def test_with_one_cut_the_same_search_finds_the_labels(tmp_path: Path) -> None:
    plan = Plan(dure.SplitLearning(clients=1, batch_size=4), rounds=1)
    seen = tmp_path / "frames"
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve(before=partial(dumps, seen))
        deployment.join(0)
        deployment.ended()
    traffic = b"".join(frames_in(seen))
    train = plan.task().train
    part = divide(IID(), 1, train, 4, 0, joins=False)[0]
    for step in range(part.batches.steps_per_epoch):
        _, targets = train.batch(part.at(step))
        assert targets.numpy().tobytes() in traffic
