"""Split learning on an accelerator: the results of the CPU, simulated and over a network."""

from __future__ import annotations

import _thread
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.split import placement
from dure.tasks.parts import JoinedTask

pytest.importorskip("stand_in_device", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("accelerator")

ACC = torch.device("acc:0")
APART = 1e-12
ROUNDS = 2

seen: set[str] = set()
"""Types of the devices on which the layers `Seen` have computed."""


class Seen(nn.Linear):
    """Linear layer that notes the device on which it computes."""

    def forward(self, inputs: Tensor) -> Tensor:
        seen.add(inputs.device.type)
        return super().forward(inputs)


def model() -> nn.Module:
    """With buffers and statistics of batches on both sides of the cuts."""
    return nn.Sequential(
        Seen(6, 8), nn.BatchNorm1d(8), nn.Tanh(), Seen(8, 7), nn.BatchNorm1d(7), Seen(7, 2)
    ).double()


def columns() -> nn.Module:
    heads = [nn.Sequential(Seen(3, 5), nn.BatchNorm1d(5), nn.Tanh()) for _ in range(2)]
    tail = nn.Sequential(Seen(10, 4), nn.ReLU(), nn.Linear(4, 2))
    return dure.VerticalModel(heads, tail, "concat", [[0, 1, 2], [3, 4, 5]]).double()


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Seen(5, 2)).double()


def data(people: int, seed: int) -> dure.Examples:
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(people, 6, generator=draws, dtype=torch.float64)
    keys = [f"person {number}" for number in range(people)]
    return dure.Examples(inputs, (inputs[:, 0] > 0.3).long(), keys=keys)


WEIGHT = torch.tensor([1.0, 2.5], dtype=torch.float64)


def task(make: Callable[[], nn.Module] = model, **fields: Any) -> dure.Task:
    return dure.Task(
        make,
        nn.CrossEntropyLoss(weight=WEIGHT),
        data(48, 0),
        data(20, 1),
        **{"optimizer": partial(torch.optim.Adam, lr=0.01), "eval_batch_size": 8, **fields},
    )


def head() -> nn.Module:
    return nn.Sequential(Seen(6, 8), nn.BatchNorm1d(8)).double()


def tail() -> nn.Module:
    return nn.Sequential(nn.Tanh(), Seen(8, 2)).double()


def two_files() -> dure.Task:
    adam = partial(torch.optim.Adam, lr=0.01)
    mine = dure.HeadTask(head, train=data(48, 0), test=data(20, 1), optimizer=adam)
    theirs = dure.TailTask(tail, nn.CrossEntropyLoss(weight=WEIGHT), optimizer=adam)
    return dure.joined(mine, theirs)


Parallel = partial(dure.ParallelSplit, clients=3, batch_size=8)
InTurn = partial(dure.SplitLearning, clients=3, batch_size=8)
Fed = partial(dure.SplitFed, clients=3, batch_size=8)
Vertical = partial(dure.VerticalSplit, batch_size=16)

RUNS: dict[str, tuple[dure.Task, Any]] = {
    "in turn, top-k": (task(), InTurn(compression="top-k:0.5")),
    "U-shape, marvell, int8": (
        task(),
        InTurn(cut=("1", "2"), defence="marvell:1", compression="int8", measure_leaks=True),
    ),
    "parallel, no-peek": (task(), Parallel(defence="no-peek:1", measure_leaks=True)),
    "parallel U-shape, max-norm": (task(), Parallel(cut=("1", "2"), defence="max-norm:1")),
    "SplitFed v1, bfloat16": (task(), Fed(compression="bfloat16")),
    "SplitFed v2, personal": (task(), Fed(version=2, personal_heads=True, held_out=0.25)),
    "labels at random": (task(), Fed(defence="randomised-response:1")),
    "two files": (two_files(), Parallel()),
    "vertical": (task(columns), Vertical(align=True, missing=0.1, measure_leaks=True)),
    "vertical, label party": (task(columns), Vertical(label_party=1, defence="isotropic:1")),
    "vertical, columns": (task(linear), Vertical(defence="no-peek:1")),
}


@pytest.fixture
def on_acc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations compute on the stand-in device."""
    run = dure.Simulated.run

    def there(self: Any, program: Any, report: Any) -> Any:
        return run(self, lambda at: program(dataclasses.replace(at, devices=(ACC,))), report)

    monkeypatch.setattr(dure.Simulated, "run", there)


def trained(name: str, **how: Any) -> dure.Run:
    of, strategy = RUNS[name]
    stop = dure.Stop(**{f"{strategy.traits.unit}s": ROUNDS})
    return dure.train(of, strategy, dure.Simulated(), stop, **how)


def check_alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.device.type == "cpu"
        assert torch.allclose(value.double(), other[key].double(), rtol=0, atol=APART), key


@pytest.mark.parametrize("name", RUNS)
def test_a_simulation_on_a_device_has_the_weights_of_the_cpu(
    name: str, request: pytest.FixtureRequest
) -> None:
    right = trained(name)
    seen.clear()
    request.getfixturevalue("on_acc")
    found = trained(name, check=False)
    assert "acc" in seen
    check_alike(found.model.state_dict(), right.model.state_dict())
    for one, other in zip(right.history.evaluations, found.history.evaluations, strict=True):
        assert other.metrics == pytest.approx(one.metrics, abs=APART)
        assert other.loss == pytest.approx(one.loss, abs=APART)


@pytest.mark.parametrize("name", ["U-shape, marvell, int8", "SplitFed v2, personal", "vertical"])
def test_a_run_goes_on_on_another_device(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    of, strategy = RUNS[name]
    unit = f"{strategy.traits.unit}s"
    right = trained(name)
    begun = dure.Stop(**{unit: ROUNDS - 1})
    dure.train(of, strategy, dure.Simulated(), begun, out=tmp_path / "run", checkpoint_every=1)
    request.getfixturevalue("on_acc")
    seen.clear()
    whole = dure.Stop(**{unit: ROUNDS})
    found = dure.resume(tmp_path / "run", task=of, stop=whole, check=False)
    assert "acc" in seen
    check_alike(found.model.state_dict(), right.model.state_dict())


DEPLOYED = {
    # Threads cannot trace at the same time, so that a model that is cut has a single client.
    "client": ("cpu", "acc:1", task(), InTurn(clients=1, cut=("1", "2"), compression="int8")),
    "server": ("acc:0", "", task(), Parallel(clients=1, compression="top-k:0.5")),
    "two files": ("acc:0", "acc:1", two_files(), Fed(clients=2)),
    "peers": ("cpu", "acc:1", two_files(), InTurn(clients=2)),
    "parties": ("cpu", "acc:1", task(columns), Vertical()),
    "label party": ("acc:0", "acc:1", task(columns), Vertical(label_party=0)),
}


@pytest.mark.parametrize("name", DEPLOYED)
def test_sites_and_their_server_compute_on_devices_of_their_own(name: str, tmp_path: Path) -> None:
    at_server, at_clients, of, strategy = DEPLOYED[name]
    stop = dure.Stop(**{f"{strategy.traits.unit}s": ROUNDS})
    right = dure.train(of, strategy, dure.Simulated(), stop, check=False)
    mine, theirs = (of.head, of.tail) if isinstance(of, JoinedTask) else (of, of)
    clients: list[Thread] = []
    failed: list[BaseException] = []

    def joined(url: str, **how: Any) -> None:
        try:
            dure.join(url, mine, **how)
        except BaseException as error:
            failed.append(error)
            # Otherwise the server waits for its client.
            _thread.interrupt_main()

    def started(event: Mapping[str, Any]) -> None:
        if "serving" not in event:
            return
        # The model has been checked on the CPU before.
        seen.clear()
        for number in range(event["clients"]):
            how = {"state": tmp_path / str(number), "device": at_clients}
            # Parties have all people; of other clients each has its part.
            how["part"] = None if strategy.traits.unit == "step" else number
            clients.append(Thread(target=joined, args=[event["serving"]], kwargs=how, daemon=True))
            clients[-1].start()

    served = dure.serve(
        theirs,
        strategy,
        stop,
        out=tmp_path / "run",
        port=0,
        access="open",
        device=at_server,
        on_progress=started,
    )
    for one in clients:
        one.join(10)
    assert not failed
    assert "acc" in seen
    elsewhere = served.summary.get("weights_elsewhere", [])
    expected = right.model.state_dict()
    own = {key: one for key, one in served.model.state_dict().items() if key not in elsewhere}
    check_alike(own, {key: expected[key] for key in own})
    assert "test_loss" in right.summary
    assert served.summary["test_loss"] == pytest.approx(right.summary["test_loss"], abs=APART)


def test_a_device_that_is_not_here_is_refused(tmp_path: Path) -> None:
    refused = "acc:7"
    with pytest.raises(ValueError, match="this machine has no acc:7"):
        dure.serve(task(), InTurn(), out=tmp_path / "run", port=0, device=refused)
    with pytest.raises(ValueError, match="this machine has no acc:7"):
        dure.join("http://127.0.0.1:1", task(), state=tmp_path / "site", device=refused)


def test_a_device_is_asked_for_the_dtypes_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []
    monkeypatch.setattr(
        placement,
        "check_device_dtypes",
        lambda kinds, dtypes: asked.extend(sorted(dtypes, key=str)),
    )
    for doubles in (False, True):
        placed = placement.model_on(nn.Linear(2, 2), ACC, doubles)
        assert next(placed.parameters()).device == ACC
    assert asked == [torch.float32, torch.float32, torch.float64]
    marvell, none = (dure.split.leakage.parse_defence(text) for text in ("marvell:1", "none"))
    assert placement.needs_doubles(marvell, averages=False)
    assert placement.needs_doubles(none, averages=True)
    assert not placement.needs_doubles(none, averages=False)
