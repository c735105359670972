"""Vertical split learning between real processes over TLS: the bits of the simulation, whatever
happens to the holder of the labels and to parties; and what goes over the wire."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deployed import Deployment, Ended, Plan
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.data.batches import Batches
from dure.record.checkpoint import read_tree
from dure.split import alignment
from dure.split.network.frames import decode

PEOPLE = 45
COLUMNS = [[0, 1], [2, 5], [3, 4]]


class Steps(Plan):
    """Which counts steps."""

    @property
    def stop(self) -> dure.Stop:
        return dure.Stop(steps=self.rounds)


def model() -> nn.Module:
    heads = [
        nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2))
        for _ in COLUMNS
    ]
    tail = nn.Sequential(nn.Linear(15, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    return dure.VerticalModel(heads, tail, "concat", COLUMNS).double()


def examples(people: int, seed: int) -> dure.Examples:
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(people, 6, generator=draws, dtype=torch.float64)
    targets = (inputs[:, :3] + 0.3 * torch.randn(people, 3, generator=draws)).argmax(1)
    return dure.Examples(inputs, targets, keys=[f"person {number}" for number in range(people)])


def task(make: Callable[[], nn.Module] = model) -> dure.Task:
    return dure.Task(
        make,
        F.cross_entropy,
        examples(PEOPLE, 0),
        examples(20, 1),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        eval_batch_size=8,
    )


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def by_columns() -> dure.Task:
    return task(linear)


def newest_heads(folder: Path, number: int) -> dict[str, Tensor]:
    """What a party has written down after the newest step."""
    files = folder.glob(f"site-{number}/head-*.tree")
    newest = max(files, key=lambda path: int(path.stem.rpartition("-")[2]))
    values: dict[str, Tensor] = read_tree(newest)["part"]["values"]
    return values


def check_same(ended: Ended, right: Ended) -> None:
    """Whatever the holder has is the simulation's."""
    elsewhere = ended.summary["weights_elsewhere"]
    mine = {name: one for name, one in right.tensors.items() if name not in elsewhere}
    assert ended.tensors.keys() == mine.keys()
    assert all(torch.equal(one, ended.tensors[name]) for name, one in mine.items())
    assert len(ended.losses) == len(right.losses) > 0
    assert repr(ended.losses) == repr(right.losses)
    assert repr(ended.metrics) == repr(right.metrics)
    for count in ("steps", "samples"):
        assert ended.summary[count] == right.summary[count]


def training(number: int) -> Callable[[Any], bool]:
    return lambda about: bool(about["round"] >= number)


def test_a_party_and_the_server_that_are_killed_change_no_bit(tmp_path: Path) -> None:
    strategy = dure.VerticalSplit(batch_size=8)
    plan = Steps(strategy, 60, task, evaluate_every=10, checkpoint_every=4)
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(3)
        deployment.clients[1].wait_for("training", training(2))
        deployment.clients[1].kill()
        deployment.join(1)
        deployment.clients[1].wait_for("training", training(3))
        deployment.restart()
        ended = deployment.ended()
        for client in deployment.clients.values():
            assert client.wait_for("over") == "the run is over"
            assert client.said("compiler") == [False]
    right = plan.simulated()
    check_same(ended, right)
    for number in range(3):
        for name, one in newest_heads(tmp_path, number).items():
            assert torch.equal(one, right.tensors[f"heads.{number}.{name}"])
        # And for use alone.
        (alone,) = (tmp_path / f"site-{number}").glob("head-*.safetensors")
        head = model().heads[number]
        head.load_state_dict(load_file(alone))
        assert torch.equal(head[0].weight, right.tensors[f"heads.{number}.0.weight"])


# What goes over the wire


def dumps(path: Path) -> None:
    """All frames that reach this process, or leave it, are written down."""
    from dure.deploy.server import channels

    def note(frame: bytes) -> None:
        with path.open("ab") as file:
            pickle.dump(frame, file)

    class Noted(channels.ClientFrame):  # type: ignore[misc]
        def __new__(cls, client: int, frame: bytes) -> Any:
            note(bytes(frame))
            return super().__new__(cls, client, frame)

    says = channels.NetworkChannels.say

    def say(self: Any, client: int, frame: Any) -> None:
        note(b"".join(frame))
        says(self, client, frame)

    channels.ClientFrame = Noted  # type: ignore[misc]
    channels.NetworkChannels.say = say  # type: ignore[method-assign]


def frames_in(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while file.peek(1):  # type: ignore[attr-defined]
            yield pickle.load(file)


def test_aligned_parties_and_one_with_the_labels_show_neither_columns_nor_labels(
    tmp_path: Path,
) -> None:
    strategy = dure.VerticalSplit(
        features=("0,1", "2,5", "3,4"), batch_size=8, label_party=1, align=True, missing=0.2
    )
    plan = Steps(strategy, 12, by_columns, evaluate_every=6)
    seen = tmp_path / "frames"
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve(before=partial(dumps, seen))
        deployment.join_all(2)
        ended = deployment.ended()
    check_same(ended, plan.simulated())
    frames = list(frames_in(seen))
    traffic = b"".join(frames)
    for name in (b"Blinded", b"Twice", b"Common", b"Activations", b"ActivationGradients"):
        assert name in traffic
    train = plan.task().train
    for columns in COLUMNS:
        for row in train.inputs[:, columns]:
            assert row.numpy().tobytes() not in traffic
    assert b"person" not in traffic
    # Labels in the order of every batch, as any number that labels are kept as.
    rows = read_tree(tmp_path / "run" / "people.tree")["rows"]
    batches = Batches(len(rows), 8, 0)
    for step in range(12):
        labels = train.targets[rows[batches.at(step)]]
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.float64, torch.float32):
            assert labels.to(dtype).numpy().tobytes() not in traffic
    for weight in ended.tensors.values():
        assert weight.numpy().tobytes() not in traffic
    # What does travel is found: the order in which the people are kept by party 0.
    places = [
        one.places
        for one in map(decode, map(bytearray, frames))
        if isinstance(one, alignment.Common)
    ]
    assert len(places) == 2
    assert all(one.numpy().tobytes() in traffic for one in places)
    assert len(rows) == ended.facts["vertical"]["people"] < PEOPLE


def test_a_party_that_stays_away_ends_the_run_by_its_name(tmp_path: Path) -> None:
    strategy = dure.VerticalSplit(batch_size=8)
    plan = Steps(strategy, 5000, task, options={"deadline": 1.5})
    with Deployment(tmp_path, plan) as deployment:
        deployment.serve()
        deployment.join_all(3)
        deployment.clients[2].wait_for("training", training(1))
        deployment.clients[2].kill()
        kind, reason, _ = deployment.server.wait_for("error")
        assert kind == "PartyLostError"
        assert reason.startswith("party 2 has not reconnected within 1.5 s")
        told = [about.get("waiting", "") for about in deployment.server.said("progress")]
        assert any(
            text.startswith("party 2 is disconnected, and the server waits for it") for text in told
        ), told


def without_data() -> dure.Task:
    return dure.Task(model, F.cross_entropy, None)


@pytest.mark.parametrize(
    ("make", "settings", "said"),
    [
        (task, {"measure_leaks": True}, "measure_leaks is for simulations"),
        (without_data, {}, "the label holder needs training data"),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_work(
    make: Callable[[], dure.Task], settings: Any, said: str, tmp_path: Path
) -> None:
    network = dure.Network(port=0, access="open")
    strategy = dure.VerticalSplit(batch_size=8, **settings)
    with pytest.raises(ValueError, match=said):
        dure.train(make(), strategy, network, dure.Stop(steps=1), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
