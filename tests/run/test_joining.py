"""What a site brings to a federation: its own data and tests, its own loop, its own policy; and
what can be done with what was served."""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import dure
from dure.deploy.client.site import ConnectionOptions
from dure.deploy.journal import Event
from dure.deploy.server.carrier import NetworkCarrier
from dure.deploy.server.outbox import GRACE
from dure.deploy.server.register import FILE, Register
from dure.errors import DureError
from dure.run.join import check
from small import CLASSES, FEATURES, examples, network, same_bits, small_task

SECONDS = 60.0


class Site(threading.Thread):
    """A client in a thread of its own. what: is called with the server's address."""

    def __init__(self, url: str, what: Callable[[str], Any]) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.what = what
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.what(self.url)
        except BaseException as error:
            self.error = error
            traceback.print_exc()


@contextmanager
def sites(
    *what: Callable[[str], Any],
) -> Iterator[tuple[Callable[[dict[str, Any]], None], list[Site]]]:
    """(what hears of the server's progress, the sites once there is one)."""
    began: list[Site] = []

    def hears(event: dict[str, Any]) -> None:
        if "serving" in event:
            began.extend(Site(event["serving"], one) for one in what)

    yield hears, began
    for site in began:
        site.join(SECONDS)
        assert not site.is_alive()


def served(
    task: dure.Task,
    strategy: dure.Strategy,
    *what: Callable[[str], Any],
    out: Path,
    rounds: int = 3,
    **network: Any,
) -> tuple[dure.Run, list[Site]]:
    """A federation of these sites, to its end."""
    with sites(*what) as (hears, began):
        run = dure.serve(
            task,
            strategy,
            dure.Stop(rounds=rounds),
            out=out,
            on_progress=hears,
            port=0,
            access="open",
            **network,
        )
    return run, began


def joins(task: dure.Task, number: int, **options: Any) -> Callable[[str], Any]:
    return lambda url: dure.join(url, task, name=f"site {number}", **options)


def own(number: int, n: int = 12) -> dure.Task:
    """A site's task: its own examples, and its own tests."""
    return small_task(train=examples(n, seed=10 + number), test=examples(9, seed=20 + number))


def bare() -> dure.Task:
    """A server's: no data at all."""
    return small_task(train=None, test=None)


def test_a_server_without_data_trains_sites_with_theirs_and_measures_over_all_their_tests(
    tmp_path: Path,
) -> None:
    tasks = [own(number) for number in range(3)]
    run, began = served(
        bare(),
        dure.FedAvg(clients=3, batch_size=4),
        *(joins(task, number, part=None) for number, task in enumerate(tasks)),
        out=tmp_path / "run",
    )
    assert [site.result for site in began] == ["the run is over"] * 3
    # The sites' tests taken together, measured by hand.
    together = [task.test.batch(torch.arange(9)) for task in tasks]
    inputs = torch.cat([one for one, _ in together])
    targets = torch.cat([other for _, other in together])
    with torch.no_grad():
        right = (run.model(inputs).argmax(1) == targets).double().mean()
    assert run.summary["client_accuracy"] == pytest.approx(float(right), abs=1e-12)
    assert run.summary["epochs"] == pytest.approx(3.0)
    facts = run.summary["facts"][0]
    assert facts["bits"] == "same"


def test_a_task_without_training_data_is_refused_where_nobody_else_has_any() -> None:
    with pytest.raises(ValueError, match="no training data"):
        dure.train(bare(), dure.FedAvg(clients=2), stop=dure.Stop(rounds=1))


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES).double()


def by_hand(n: int, seed: int) -> Callable[[str], list[bool]]:
    """A site whose loop is its own: softmax regression in numpy."""
    inputs, targets = (one.numpy() for one in examples(n, seed=seed).batch(torch.arange(n)))
    sent: list[bool] = []

    def loop(url: str) -> list[bool]:
        with dure.Client(url, examples=n, name=f"numpy {seed}") as client:
            for work in client:
                arrays = work.arrays
                scores = inputs @ arrays["weight"].T + arrays["bias"]
                shares = numpy.exp(scores - scores.max(1, keepdims=True))
                shares /= shares.sum(1, keepdims=True)
                loss = -numpy.log(shares[numpy.arange(n), targets]).mean()
                shares[numpy.arange(n), targets] -= 1
                arrays["weight"] -= 0.3 * shares.T @ inputs / n
                arrays["bias"] -= 0.3 * shares.mean(0)
                sent.append(work.send(arrays, loss=float(loss), metrics={"own": 1.5}))
        return sent

    return loop


def test_a_loop_of_its_own_in_numpy_trains_as_one_of_torch(tmp_path: Path) -> None:
    strategy = dure.FedAvg(clients=2, batch_size=None)
    task = small_task(model=linear, train=None, test=None)
    run, began = served(task, strategy, by_hand(8, 1), by_hand(14, 2), out=tmp_path / "own")
    assert [site.result for site in began] == [[True] * 3] * 2
    data = torch.utils.data.TensorDataset(
        *(
            torch.cat(each)
            for each in zip(
                *(examples(n, seed=seed).batch(torch.arange(n)) for n, seed in ((8, 1), (14, 2))),
                strict=True,
            )
        )
    )
    keys = ["a"] * 8 + ["b"] * 14
    both = dure.Examples(*data.tensors, keys=keys)
    simulated = dure.train(
        small_task(model=linear, train=both, test=None),
        dure.FedAvg(clients=None, partition="natural-key", batch_size=None),  # type: ignore[arg-type]
        dure.Simulated(engine="loop"),
        dure.Stop(rounds=3),
    )
    mine, other = run.model.state_dict(), simulated.model.state_dict()
    assert all(torch.allclose(mine[name], other[name], atol=1e-12, rtol=0) for name in other)
    facts = run.summary["facts"][0]
    assert facts["bits"] == "close"
    assert [numbers for _, numbers in facts["reported"]] == [{"own": 1.5}] * 2


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda model: model.pop("weight"), "not have 'weight'"),
        (lambda model: model.update(bias=numpy.zeros(CLASSES + 1)), "bias has the shape"),
        (lambda model: model.update(bias=numpy.full(CLASSES, numpy.nan)), "not finite"),
    ],
)
def test_what_a_loop_of_its_own_cannot_send_is_refused_before_it_leaves(
    changed: Callable[[dict[str, Any]], Any], told: str, tmp_path: Path
) -> None:
    refused: list[str] = []

    def loop(url: str) -> None:
        with dure.Client(url, examples=4, name="x") as client:
            for work in client:
                arrays = work.arrays
                broken = dict(arrays)
                changed(broken)
                with pytest.raises(ValueError) as error:  # noqa: PT011
                    work.send(broken)
                refused.append(str(error.value))
                work.send(arrays)

    task = small_task(model=linear, train=None, test=None)
    served(task, dure.FedAvg(clients=1), loop, out=tmp_path / "run", rounds=1)
    assert told in refused[0]


def with_frozen(scale: float) -> nn.Module:
    model = network()
    with torch.no_grad():
        model[0].weight.mul_(scale)  # type: ignore[operator]
    model[0].requires_grad_(False)
    return model


def test_frozen_weights_that_differ_are_the_servers(tmp_path: Path) -> None:
    strategy = dure.FedAvg(clients=2, batch_size=4)
    task = partial(small_task, model=partial(with_frozen, 1.0))
    # As if the sites' processors had drawn other weights under the same seed.
    other = small_task(model=partial(with_frozen, 1.5))
    run, _ = served(
        task(), strategy, joins(other, 0, part=0), joins(task(), 1, part=1), out=tmp_path / "run"
    )
    simulated = dure.train(task(), strategy, dure.Simulated(engine="loop"), dure.Stop(rounds=3))
    assert same_bits(run, simulated)


def test_columns_of_another_meaning_are_refused_with_their_names(tmp_path: Path) -> None:
    def told(number: int, names: list[str]) -> Callable[[str], Any]:
        task = small_task(train=examples(8, seed=number), test=None, features=names)
        return joins(task, number)

    names = ["age", "sex", "pain", "pressure", "sugar", "rate"]
    wrong = told(2, [*names[:3], "sugar", "pressure", "rate"])
    refused = threading.Event()

    def first(url: str) -> Any:
        try:
            return wrong(url)
        finally:
            refused.set()

    def later(number: int, url: str) -> Any:
        # Else all places might be taken, and the one who is wrong be told that.
        assert refused.wait(SECONDS)
        return told(number, names)(url)

    server = small_task(train=None, test=None, features=names)
    right = [partial(later, number) for number in range(2)]
    _, began = served(server, dure.FedAvg(clients=2), *right, first, out=tmp_path / "run")
    assert "feature 3 is 'sugar', but 'pressure' at the server" in str(began[2].error)
    assert [site.error for site in began[:2]] == [None, None]


def test_a_client_that_has_used_up_its_transfers_is_not_asked_any_more(tmp_path: Path) -> None:
    strategy = dure.FedAvg(clients=2, batch_size=4)
    task = small_task()
    one = 2 * 8 * 215  # an assignment and an update, but for the header
    run, _ = served(
        task,
        strategy,
        *(joins(task, number, part=number) for number in range(2)),
        out=tmp_path / "run",
        rounds=20,
        transfer_budget=int(4.9 * one),
    )
    assert run.summary["ended"] == "transfers"
    assert 1 <= run.summary["steps"] <= 4
    assert [client for client, _ in run.summary["facts"][0]["out_of_transfers"]] == [0, 1]


def test_a_model_of_ones_own_is_trained_without_a_server(tmp_path: Path) -> None:
    tasks = [own(number, n=30) for number in range(2)]
    states = [tmp_path / f"state {number}" for number in range(2)]
    run, _ = served(
        bare(),
        dure.FedAvg(clients=2, batch_size=4),
        *(joins(tasks[number], number, state=states[number]) for number in range(2)),
        out=tmp_path / "run",
    )
    with pytest.raises(DureError, match="no model yet"):
        dure.personalise(tmp_path / "nobody", tasks[0])
    before = dure.personal_model(states[0], tasks[0])
    # What it keeps is the last model of the run.
    for name, value in run.model.state_dict().items():
        assert torch.equal(before.state_dict()[name], value)
    found = dure.personalise(states[0], tasks[0], epochs=3, batch_size=5)
    assert found.round == 3
    after = dure.personal_model(states[0], tasks[0])
    for name, value in found.model.state_dict().items():
        assert torch.equal(after.state_dict()[name], value)
        assert not torch.equal(before.state_dict()[name], value)
    with torch.no_grad():
        inputs, targets = tasks[0].train.batch(torch.arange(30))
        losses = [tasks[0].loss(model(inputs), targets) for model in (before, after)]
    assert losses[1] < losses[0]


def test_a_model_of_ones_own_has_the_frozen_weights_of_the_run(tmp_path: Path) -> None:
    def body_and_head() -> nn.Module:
        model = network()
        model[0].requires_grad_(False)  # type: ignore[index,operator]
        return model

    task = small_task(model=body_and_head)
    state = tmp_path / "state"
    # Under another seed than that under which models are made offline.
    run, (began,) = served(
        task,
        dure.FedAvg(clients=1, batch_size=4),
        joins(task, 0, state=state),
        out=tmp_path / "run",
        seed=5,
    )
    assert began.error is None
    newest = dure.personal_model(state, task).state_dict()
    for name, value in run.model.state_dict().items():
        assert torch.equal(newest[name], value)
    found = dure.personalise(state, task)
    assert found.before["test_loss"] == pytest.approx(run.summary["test_loss"], abs=1e-12)
    assert torch.equal(found.model[0].weight, run.model[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_of_ones_own_is_trained_with_the_options_of_its_task(
    precision: str, tmp_path: Path
) -> None:
    task = small_task(model=partial(network, torch.float32), dtype=torch.float32, n=8)
    state = tmp_path / "state"
    served(
        task,
        dure.FedAvg(clients=1, batch_size=4),
        joins(task, 0, state=state),
        out=tmp_path / "run",
        rounds=1,
    )
    before = dict(dure.personal_model(state, task).state_dict())

    def trained(**options: Any) -> torch.Tensor:
        asked = dataclasses.replace(task, **options)
        model = dure.personalise(state, asked, batch_size=8).model
        return torch.cat([(v - before[k]).reshape(-1) for k, v in model.state_dict().items()])

    full = trained()
    # A single step of SGD with the rate 0.3.
    assert float(trained(clip_norm=0.01).norm()) == pytest.approx(0.3 * 0.01, rel=1e-3)
    assert 0 < float((trained(precision=precision) - full).norm()) < 0.05 * float(full.norm())


def test_what_no_model_of_ones_own_can_be_trained_with_is_refused(tmp_path: Path) -> None:
    def normed() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)
        ).double()

    task = small_task(model=normed, train=examples(9))
    state = tmp_path / "state"
    served(
        task,
        dure.FedAvg(clients=1, batch_size=4),
        joins(task, 0, state=state),
        out=tmp_path / "run",
        rounds=1,
    )
    # Nine examples in batches of four: the ninth alone has no variance.
    dure.personalise(state, task, batch_size=4)
    with pytest.raises(ValueError, match="batch_size is 0"):
        dure.personalise(state, task, batch_size=0)
    with pytest.raises(ValueError, match="no training data"):
        dure.personalise(state, small_task(model=normed, train=None))
    kept = dure.personal_model(state, task).state_dict()
    steep = small_task(model=normed, train=examples(9), lr=torch.tensor(float("inf")))
    with pytest.raises(ValueError, match="diverged"):
        dure.personalise(state, steep, batch_size=4)
    for name, value in dure.personal_model(state, task).state_dict().items():
        assert torch.equal(value, kept[name])


def test_a_policy_that_asks_waits_for_its_user_and_says_what_of(tmp_path: Path) -> None:
    strict, asking = tmp_path / "strict", tmp_path / "asking"
    for folder, text in ((strict, "local_epochs = 1\n"), (asking, 'approve = "ask"\n')):
        folder.mkdir()
        (folder / "policy.toml").write_text(text)
    task = small_task()
    strategy = dure.FedAvg(clients=1, batch_size=4, local_epochs=3)
    told: list[str] = []

    def site(url: str) -> Any:
        for state in (strict, asking):
            with pytest.raises(DureError) as error:
                dure.join(url, task, name="a", part=0, state=state)
            told.append(str(error.value))
        return dure.join(url, task, name="a", part=0, state=asking, approve=True)

    # Folders have keys of their own: whoever declines takes nobody's place.
    run, (began,) = served(task, strategy, site, out=tmp_path / "run", rounds=1)
    assert began.error is None
    assert "at most 1 local epoch" in told[0]
    assert "--approve" in told[1]
    assert run.summary["ended"] == "rounds"


@pytest.mark.parametrize(
    ("strategy", "numbers"),
    [
        (dure.FedAvg(clients=1, batch_size=4), 215),
        # Control variates travel beside the weights, personal layers stay.
        (dure.Scaffold(clients=1, batch_size=4), 2 * 215),
        (dure.FedPer(clients=1, batch_size=4), 215 - 27),
    ],
    ids=lambda one: one.name if isinstance(one, dure.Strategy) else "",
)
def test_a_check_says_what_would_be_sent_and_sends_nothing(
    tmp_path: Path, strategy: dure.Strategy, numbers: int
) -> None:
    task = small_task()
    lines: list[str] = []

    def site(url: str) -> Any:
        with pytest.raises(ValueError, match="part is 7, but client numbers are 0 to 0"):
            list(check(url, task, ConnectionOptions(part=7)))
        lines.extend(check(url, task, ConnectionOptions("a", tmp_path / "state", part=0)))
        return dure.join(url, task, name="a", part=0, state=tmp_path / "state")

    run, (began,) = served(task, strategy, site, out=tmp_path / "run", rounds=1)
    assert began.error is None
    said = "\n".join(lines)
    assert f"{8 * numbers:,} bytes per update" in said
    assert [line.partition(":")[0] for line in lines] == [
        "network",
        "identity",
        "policy",
        "disk",
        "training",
        "this client would send",
    ]
    assert run.summary["facts"][0]["flights"]


def test_a_site_without_training_data_takes_no_place() -> None:
    # It does not even call with its token: nobody is there.
    with pytest.raises(ValueError, match="no training data, which a client needs"):
        dure.join("http://127.0.0.1:9", bare(), token="t" * 32)


def test_clients_of_one_machine_need_no_names(tmp_path: Path) -> None:
    task = small_task()

    def loop_of_its_own(url: str) -> None:
        with dure.Client(url, examples=8, part=1) as client:
            for work in client:
                model = network()
                work.load(model)
                work.send(model)

    _, began = served(
        task,
        dure.FedAvg(clients=2, batch_size=4),
        lambda url: dure.join(url, task, part=0),
        loop_of_its_own,
        out=tmp_path / "run",
        rounds=1,
    )
    assert [site.error for site in began] == [None, None]
    with Register(tmp_path / "run" / FILE) as register:
        assert [client.name for client in register.clients()] == ["client 0", "client 1"]


def test_a_recorded_run_is_made_again_and_a_copy_of_its_folder_goes_on(tmp_path: Path) -> None:
    task = small_task()
    strategy = dure.FedBuff(clients=3, fraction=1.0, buffer=2, batch_size=4)
    run, _ = served(
        task,
        strategy,
        *(joins(task, number, part=number) for number in range(3)),
        out=tmp_path / "run",
        rounds=6,
        record=True,
    )
    replayed = dure.replay(tmp_path / "run", task=task)
    assert (replayed.rounds, replayed.same) == (6, True)
    copy = dure.backup(tmp_path / "run", tmp_path / "copy")
    assert same_bits(dure.resume(copy, task=task, stop=dure.Stop(rounds=6)), run)
    with pytest.raises(DureError, match="not empty"):
        dure.backup(tmp_path / "run", tmp_path / "copy")


def test_what_was_not_recorded_cannot_be_replayed(tmp_path: Path) -> None:
    task = small_task()
    served(task, dure.FedAvg(clients=1), joins(task, 0, part=0), out=tmp_path / "run", rounds=1)
    with pytest.raises(DureError, match="--record"):
        dure.replay(tmp_path / "run", task=task)


def test_a_loop_of_its_own_that_takes_long_is_there_all_the_time(tmp_path: Path) -> None:
    def slow(url: str) -> list[bool]:
        sent = []
        with dure.Client(url, examples=4, name="slow") as client:
            for work in client:
                time.sleep(GRACE + 2.0)
                sent.append(work.send(work.arrays))
        return sent

    task = small_task(model=linear, train=None, test=None)
    run, (site,) = served(task, dure.FedAvg(clients=1), slow, out=tmp_path / "run", rounds=1)
    assert site.result == [True]
    spans = run.summary["facts"][0]["there"]
    # One stay without a gap: it was never taken for missing.
    assert len(spans) == 1, spans


def test_a_loop_of_its_own_that_sends_nothing_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = NetworkCarrier._apply

    def late(self: NetworkCarrier, coordinator: Any, event: Event) -> Any:
        # The client asks again first, and must not get the same assignment.
        if event.kind == "failed":
            time.sleep(0.5)
        return apply(self, coordinator, event)

    monkeypatch.setattr(NetworkCarrier, "_apply", late)

    def skips(url: str) -> int:
        rounds = 0
        with dure.Client(url, examples=4, name="skips") as client:
            for work in client:
                rounds += 1
                if rounds > 1:
                    work.send(work.arrays)
        return rounds

    task = small_task(model=linear, train=None, test=None)
    run, (site,) = served(task, dure.FedAvg(clients=1), skips, out=tmp_path / "run", rounds=1)
    assert site.result == 2
    assert run.summary["numbers"]["failed"] == 1
