"""What a simulation keeps of its updates, and that it is what the server was sent."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dure
from dure.cli.main import main
from dure.contracts.fresh_model import seeded_model
from dure.errors import RunFolderError
from dure.federated.attacks import recording
from dure.federated.attacks.observation import AttackedModel, observed_sum, step_rate_of
from dure.federated.attacks.recording import read_updates
from dure.fleet.conditions import Conditions
from small import small_task

LR = 0.3


def recorded(
    out: Path, strategy: dure.Strategy, rounds: int = 2, keep: int = 1, **conditions: object
) -> dure.Run:
    world = dure.Simulated(keep_updates=keep, **conditions)  # type: ignore[arg-type]
    return dure.train(small_task(lr=LR), strategy, world, dure.Stop(rounds=rounds), out=out)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_an_update_is_the_step_along_the_gradient_of_the_examples_that_the_truth_names(
    tmp_path: Path, engine: str
) -> None:
    recorded(tmp_path, dure.FedSGD(clients=4), keep=2, engine=engine)
    task = small_task(lr=LR)
    made = seeded_model(task, 0)
    model = AttackedModel(made, task.loss)
    updates = read_updates(tmp_path)
    assert [(one.about.round, one.about.client) for one in updates] == [
        (round, client) for round in range(2) for client in range(4)
    ]
    for one in updates:
        what = observed_sum(
            model, [one], step_rate_of(task, made, one.about.round, one.about.steps)
        )
        inputs, targets = task.train.batch(torch.tensor(one.truth.examples))
        true = model.gradient(what.state, inputs, targets)
        for name, tensor in what.gradient.items():
            torch.testing.assert_close(tensor, true[name], rtol=1e-9, atol=1e-12)


def test_the_truth_names_the_batches_of_local_steps(tmp_path: Path) -> None:
    recorded(tmp_path, dure.FedAvg(clients=3, batch_size=4, local_steps=2))
    task = small_task(lr=LR)
    made = seeded_model(task, 0)
    model = AttackedModel(made, task.loss)
    one = read_updates(tmp_path)[0]
    assert [len(step) for step in one.truth.steps] == [4, 4]
    what = observed_sum(model, [one], step_rate_of(task, made, 0, 2))
    state = dict(what.state)
    for step in one.truth.steps:
        inputs, targets = task.train.batch(torch.tensor(step))
        moved = model.gradient(state, inputs, targets)
        state |= {name: state[name] - LR * g for name, g in moved.items()}
    for name, tensor in what.after.items():
        torch.testing.assert_close(tensor, state[name].detach(), rtol=1e-9, atol=1e-12)


def test_a_sum_weighs_clients_by_their_examples(tmp_path: Path) -> None:
    strategy = dure.FedSGD(clients=3, partition="quantity-skew:1")
    run = recorded(tmp_path, strategy, rounds=1)
    task = small_task(lr=LR)
    made = seeded_model(task, 0)
    model = AttackedModel(made, task.loss)
    updates = read_updates(tmp_path)
    assert len({one.about.examples for one in updates}) > 1
    # The server's new model is the old one and the sum.
    after = observed_sum(model, updates, step_rate_of(task, made, 0, 1)).after
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-9, atol=1e-12)


def test_the_decay_of_weights_is_taken_off_again(tmp_path: Path) -> None:
    optimizer = partial(torch.optim.SGD, lr=LR, weight_decay=0.1)
    task = small_task(optimizer=optimizer)
    world = dure.Simulated(keep_updates=1)
    dure.train(task, dure.FedSGD(clients=2), world, dure.Stop(rounds=1), out=tmp_path)
    made = seeded_model(task, 0)
    model = AttackedModel(made, task.loss)
    one = read_updates(tmp_path)[0]
    what = observed_sum(model, [one], step_rate_of(task, made, 0, 1))
    inputs, targets = task.train.batch(torch.tensor(one.truth.examples))
    true = model.gradient(what.state, inputs, targets)
    for name, tensor in what.gradient.items():
        torch.testing.assert_close(tensor, true[name], rtol=1e-8, atol=1e-11)


def test_the_buffers_that_came_back_are_those_of_the_model_with_the_update(tmp_path: Path) -> None:
    def network() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        ).double()

    task = small_task(lr=LR, model=network)
    world = dure.Simulated(keep_updates=1)
    run = dure.train(task, dure.FedSGD(clients=3), world, dure.Stop(rounds=1), out=tmp_path)
    made = seeded_model(task, 0)
    what = observed_sum(
        AttackedModel(made, task.loss), read_updates(tmp_path), step_rate_of(task, made, 0, 1)
    )
    for name, tensor in run.model.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(what.after[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    recorded(folder / "run", dure.FedSGD(clients=2))
    return folder / "run"


@given(data=st.data(), place=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
@settings(deadline=None)
def test_a_recording_with_a_byte_changed_is_named(
    kept: Path, data: st.DataObject, place: float, bits: int
) -> None:
    names = sorted(one.name for one in (kept / "updates").iterdir())
    name = data.draw(st.sampled_from(names))
    with tempfile.TemporaryDirectory() as where:
        run = Path(shutil.copytree(kept, Path(where) / "run"))
        file = run / "updates" / name
        content = bytearray(file.read_bytes())
        content[int(place * len(content))] ^= bits
        file.write_bytes(content)
        with pytest.raises(RunFolderError, match=name.replace(".", r"\.")):
            read_updates(run)


def test_a_name_with_a_byte_changed_is_no_older_recording(kept: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(kept, tmp_path / "run"))
    file = min((run / "updates").glob("update-*.json"))
    file.write_bytes(file.read_bytes().replace(b'"checksum"', b'"checksul"'))
    with pytest.raises(RunFolderError, match=file.name):
        read_updates(run)


def test_so_many_rounds_are_kept_and_none_unless_asked(tmp_path: Path) -> None:
    recorded(tmp_path / "two", dure.FedAvg(clients=2), rounds=3, keep=2)
    assert {one.about.round for one in read_updates(tmp_path / "two")} == {0, 1}
    recorded(tmp_path / "none", dure.FedAvg(clients=2), keep=0)
    assert not (tmp_path / "none" / "updates").exists()
    with pytest.raises(RunFolderError, match="--keep-updates"):
        read_updates(tmp_path / "none")


def test_what_liars_send_is_kept_as_it_is_sent(tmp_path: Path) -> None:
    honest = tmp_path / "honest"
    lying = tmp_path / "lying"
    recorded(honest, dure.FedSGD(clients=3))
    recorded(lying, dure.FedSGD(clients=3), attack="sign-flip:2", attackers=3)
    for one, other in zip(read_updates(honest), read_updates(lying), strict=True):
        torch.testing.assert_close(other.delta[0], -2 * one.delta[0])


def test_noise_of_a_clients_own_is_in_what_is_kept(tmp_path: Path) -> None:
    strategy = partial(dure.FedSGD, clients=8, selection="coins")
    recorded(tmp_path / "plain", strategy())
    recorded(tmp_path / "noisy", strategy(privacy="user-level:0.1:1:local"))
    for one, other in zip(
        read_updates(tmp_path / "plain"), read_updates(tmp_path / "noisy"), strict=True
    ):
        # 215 numbers with the deviation 0.1, and what is left of the update: at most 0.1 long.
        noise = other.delta[0] - one.delta[0] * min(1.0, 0.1 / float(one.delta[0].norm()))
        assert float(noise.std()) == pytest.approx(0.1, rel=0.2)


def test_single_updates_of_secure_sums_are_kept_before_they_are_masked(tmp_path: Path) -> None:
    recorded(tmp_path / "plain", dure.FedSGD(clients=4))
    recorded(tmp_path / "secure", dure.FedSGD(clients=4, privacy="secure-aggregation"))  # type: ignore[arg-type]
    for one, other in zip(
        read_updates(tmp_path / "plain"), read_updates(tmp_path / "secure"), strict=True
    ):
        assert torch.equal(one.delta[0], other.delta[0])


def test_the_truth_of_dp_sgd_is_what_the_coins_of_examples_say(tmp_path: Path) -> None:
    """Without clipping and noise, a step is the sum of its examples over the size asked for."""
    strategy = dure.FedAvg(clients=2, local_steps=1, batch_size=5, privacy="dp-sgd:1e9:0")  # type: ignore[arg-type]
    recorded(tmp_path, strategy)
    task = small_task(lr=LR)
    made = seeded_model(task, 0)
    model = AttackedModel(made, task.loss)
    for one in read_updates(tmp_path):
        what = observed_sum(model, [one], step_rate_of(task, made, 0, 1))
        drawn = torch.tensor(one.truth.examples)
        true = model.gradient(what.state, *task.train.batch(drawn))
        for name, tensor in what.gradient.items():
            expected = true[name] * len(drawn) / 5
            torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-9)


def test_a_run_that_goes_on_keeps_the_same(tmp_path: Path) -> None:
    recorded(tmp_path / "whole", dure.FedAvg(clients=3), rounds=3, keep=3)
    recorded(tmp_path / "parts", dure.FedAvg(clients=3), rounds=1, keep=3)
    task = small_task(lr=LR)
    dure.resume(tmp_path / "parts", task=task, stop=dure.Stop(rounds=3))
    pairs = zip(read_updates(tmp_path / "whole"), read_updates(tmp_path / "parts"), strict=True)
    for one, other in pairs:
        assert (one.about, one.truth) == (other.about, other.truth)
        assert torch.equal(one.delta[0], other.delta[0])


def test_no_more_is_kept_than_a_folder_may_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_BYTES", 5_000)
    with pytest.warns(UserWarning, match="are not stored"):
        recorded(tmp_path, dure.FedAvg(clients=4))
    # The model, and the first updates: 215 numbers of 8 bytes each.
    assert len(read_updates(tmp_path)) == 1


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    recorded(tmp_path, dure.FedSGD(clients=2))
    (tmp_path / "updates" / "update-000000.safetensors").write_bytes(b"half")
    with pytest.raises(RunFolderError, match=r"update-000000\.safetensors"):
        read_updates(tmp_path)


def test_what_cannot_be_kept_is_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        Conditions(keep_updates=-1)
    task = small_task()
    world = dure.Simulated(keep_updates=1)
    stop = dure.Stop(rounds=1)
    with pytest.raises(ValueError, match="the run has none"):
        dure.train(task, dure.FedAvg(clients=2), world, stop)
    with pytest.raises(ValueError, match="keep updates"):
        dure.train(task, dure.SplitLearning(cut=("1",), clients=2), world, stop)
    with pytest.raises(ValueError, match="keep updates applies to clients"):
        dure.train(task, dure.Downpour(replicas=2), world, stop)
    liars = dure.Simulated(keep_updates=1, attack="label-flip", attackers=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="label-flip replaces them by poisoned examples"):
        dure.train(task, dure.FedAvg(clients=2), liars, stop)
    with pytest.raises(ValueError, match="send only a part"):
        dure.train(task, dure.FedPer(clients=2), world, stop)


def test_no_server_keeps_updates_beside_their_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "digits", "fed-avg", "--keep-updates", "3"]) == 2
    assert "only simulations can (dure train), not a server" in capsys.readouterr().err


def test_clients_whose_update_is_no_gradient_are_named() -> None:
    model = nn.Linear(2, 2)
    adam = small_task(optimizer=torch.optim.Adam)
    with pytest.raises(ValueError, match="Adam"):
        step_rate_of(adam, model, 0, 1)
    momentum = small_task(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    assert step_rate_of(momentum, model, 0, 1).lr == 0.1
    with pytest.raises(ValueError, match="momentum"):
        step_rate_of(momentum, model, 0, 2)
