"""A transformers.Trainer as a task, as a simulated client, and as a client on a network."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_cases import causal, classes, classifier, served, tokens, trainer, transformers

import dure
from dure.contracts.trainer import TrainerRound
from dure.errors import DureError
from dure.trainers.round_batches import RoundBatches, cannot_divide
from dure.wire.tensors import forms_of, size_of
from small import largest_difference, same_bits

ROUNDS = dure.Stop(rounds=3)
EPOCHS = dure.FedAvg(clients=1, batch_size=4, local_epochs=2)
STEPS = dure.FedAvg(clients=1, batch_size=4, local_steps=4)


def one(make: Any, strategy: Any = EPOCHS, **more: Any) -> dure.Run:
    return dure.simulate(lambda client: make(client=client), clients=1, strategy=strategy, **more)


@pytest.mark.parametrize("strategy", [EPOCHS, STEPS], ids=["epochs", "steps"])
@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_a_trainer_has_the_bits_of_fed_avg(strategy: Any, optim: str, tmp_path: Path) -> None:
    """Three rounds, momentum from the start in each, a last partial batch, clipped."""
    make = partial(trainer, tmp_path, optim=optim, max_grad_norm=1.0)
    by_trainer = one(make, strategy, stop=ROUNDS)
    by_loop = dure.train(dure.Task.from_trainer(make()), strategy, stop=ROUNDS)
    assert same_bits(by_trainer, by_loop)
    assert by_trainer.summary["test_loss"] == by_loop.summary["test_loss"]


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_accumulated_batches_are_a_step(optim: str, tmp_path: Path) -> None:
    make = partial(
        trainer,
        tmp_path,
        partial(causal, torch.float64),
        optim=optim,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    by_trainer = one(make, stop=ROUNDS)
    by_loop = dure.train(dure.Task.from_trainer(make()), EPOCHS, stop=ROUNDS)
    assert 0 < largest_difference(by_trainer, by_loop) <= 1e-12


def test_dropout_is_drawn_as_by_fed_avg(tmp_path: Path) -> None:
    make = partial(trainer, tmp_path, partial(classifier, 0.3), rows=classes, optim="sgd")
    by_trainer = one(make, stop=ROUNDS)
    by_loop = dure.train(dure.Task.from_trainer(make()), EPOCHS, stop=ROUNDS)
    assert same_bits(by_trainer, by_loop)


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedProx(clients=1, batch_size=4, mu=0.1),
        dure.Scaffold(clients=1, batch_size=4),
        dure.Ditto(clients=1, batch_size=4),
    ],
    ids=lambda one: one.name,
)
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_terms_of_an_algorithm_are_added_as_by_dures_loop(
    strategy: Any, clip: float, tmp_path: Path
) -> None:
    if clip and isinstance(strategy, dure.Scaffold):
        pytest.skip("SCAFFOLD's controls are means of unclipped gradients")
    make = partial(trainer, tmp_path, partial(causal, torch.float64), max_grad_norm=clip)
    make = partial(make, optim="sgd", learning_rate=0.05)
    by_trainer = one(make, strategy, stop=ROUNDS)
    by_loop = dure.train(dure.Task.from_trainer(make()), strategy, stop=ROUNDS)
    assert largest_difference(by_trainer, by_loop) <= 1e-12


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(clients=3, batch_size=4),
        dure.FedAvg(clients=3, batch_size=4, aggregate="median"),
        dure.FedAvg(clients=3, batch_size=4, privacy="secure-aggregation"),
        dure.FedAvg(clients=3, batch_size=4, privacy="user-level:1:0.1"),
        dure.FedAdam(clients=3, batch_size=4),
        dure.FedPer(clients=3, batch_size=4, personal_layers=1),
        dure.FedBuff(clients=3, batch_size=4, buffer=2),
    ],
    ids=["mean", "median", "secure", "user-level", "fed-adam", "fed-per", "fed-buff"],
)
def test_several_clients_are_those_of_the_simulation(strategy: Any, tmp_path: Path) -> None:
    """Clients of unlike sizes, each with its data: the same federation by dure's loop."""
    sizes = (22, 9, 14)

    def make(client: int) -> Any:
        return trainer(tmp_path, client=client, n=sizes[client], optim="adamw_torch")

    by_trainers = dure.simulate(make, clients=3, strategy=strategy, stop=ROUNDS)
    task = dure.Task.from_trainer(make(0))
    rows = [row for client, size in enumerate(sizes) for row in tokens(size, seed=client)]
    keys = [client for client, size in enumerate(sizes) for _ in range(size)]
    whole = dure.DatasetExamples(rows, keys, task.train.collate, keeps_labels=True)
    natural = dataclasses.replace(strategy, partition="natural-key")
    by_loop = dure.train(dataclasses.replace(task, train=whole), natural, stop=ROUNDS)
    assert same_bits(by_trainers, by_loop)


def test_a_patched_trainer_has_the_bits_of_the_simulation(tmp_path: Path) -> None:
    make = partial(trainer, tmp_path, optim="adamw_torch")
    task = dure.Task.from_trainer(make(), train=None, metrics={})

    def join(url: str) -> str:
        own = dure.client.patch(make(), url, name="site")
        return own.train()

    run, ended = served(task, EPOCHS, join, tmp_path / "run")
    assert ended == ["the run is over"]
    assert same_bits(run, one(make, stop=ROUNDS))


def test_another_batch_size_is_refused_before_training(tmp_path: Path) -> None:
    task = dure.Task.from_trainer(trainer(tmp_path), train=None, metrics={})

    def join(url: str) -> str:
        larger = trainer(tmp_path, per_device_train_batch_size=8)
        own = dure.client.patch(larger, url)
        with pytest.raises(
            ValueError, match=r"a step of Trainer has 8 .*give the run batch_size=8"
        ):
            own.train()
        return dure.client.patch(trainer(tmp_path), url).train()

    _, ended = served(task, EPOCHS, join, tmp_path / "run", rounds=1)
    assert ended == ["the run is over"]


class Watches(transformers.TrainerCallback):  # type: ignore[misc]
    """Counters of a trainer at the end of each of its calls of `train`, and of each step."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, float]] = []
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.rates.append(given["lr_scheduler"].get_last_lr()[0])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.ends.append((state.global_step, state.epoch))


def test_with_reset_counters_schedule_and_checkpoints_are_the_rounds(tmp_path: Path) -> None:
    watch = Watches()
    make = partial(
        trainer, tmp_path, callbacks=[watch], lr_scheduler_type="linear", save_strategy="epoch"
    )
    one(make, stop=ROUNDS)
    assert watch.ends == [(12, 2.0)] * 3
    # Each round is a schedule of its own, down to 0.
    assert watch.rates[:12] == pytest.approx([0.01 * (11 - t) / 12 for t in range(12)])
    assert watch.rates[12:24] == watch.rates[:12]
    folders = sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("checkpoint-*"))
    assert folders == [
        f"trainer 0/round-{n}/checkpoint-{step}" for n in (1, 2, 3) for step in (12, 6)
    ]


def test_with_keep_counters_and_schedule_go_on(tmp_path: Path) -> None:
    watch = Watches()
    make = partial(
        trainer,
        tmp_path,
        callbacks=[watch],
        lr_scheduler_type="linear",
        num_train_epochs=6,
        optim="adamw_torch",
    )
    run = one(make, stop=ROUNDS, between_rounds="keep")
    assert watch.ends == [(36, 6.0)]
    assert watch.rates == pytest.approx([0.01 * (35 - t) / 36 for t in range(36)])
    # An update's samples are those of its round, and not of the trainer's counter.
    samples = [one.samples for one in run.history.steps]
    assert samples == [44, 88, 132]


def test_one_client_that_keeps_its_state_is_the_trainer_alone(tmp_path: Path) -> None:
    """Weights travel and come back: three rounds are one training of the trainer."""
    make = partial(
        trainer,
        tmp_path,
        partial(causal, torch.float64),
        num_train_epochs=6,
        optim="adamw_torch",
    )
    alone = make()
    from dure.randomness.seeds import seed_generators

    seed_generators(0, "client", 0, 0, everything=True)
    alone.train()
    run = one(make, stop=ROUNDS, between_rounds="keep")
    for name, value in run.model.state_dict().items():
        assert float((value - alone.model.state_dict()[name]).abs().max()) <= 1e-12


def test_a_callback_that_stops_ends_the_round(tmp_path: Path) -> None:
    class Stops(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_training_stop = state.global_step == 2

    run = one(partial(trainer, tmp_path, callbacks=[Stops()]), stop=ROUNDS)
    assert [one.samples for one in run.history.steps] == [8, 16, 24]


def test_a_trainer_that_ends_before_the_federation_is_named(tmp_path: Path) -> None:
    make = partial(trainer, tmp_path, num_train_epochs=3)
    with pytest.raises(DureError, match=r"Trainer has ended its training, but the federation"):
        one(make, stop=ROUNDS, between_rounds="keep")


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "orders its data by length"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size changes the batch size"),
    ],
)
def test_what_a_client_cannot_have_is_refused(
    settings: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=refusal):
        dure.client.patch(trainer(tmp_path, **settings), "https://localhost:1")


def test_after_the_run_a_trainer_is_as_before(tmp_path: Path) -> None:
    """No momentum, no callback and no observer of the last round is left."""
    made = trainer(tmp_path, optim="adamw_torch")
    before = list(made.callback_handler.callbacks)
    dure.simulate(lambda client: made, clients=1, strategy=EPOCHS, stop=ROUNDS)
    assert made.optimizer is None
    assert made.lr_scheduler is None
    assert made.callback_handler.callbacks == before
    assert made.training_step.__func__ is transformers.Trainer.training_step


def test_other_objects_are_no_trainers() -> None:
    with pytest.raises(ValueError, match=r"a Linear is no trainer that dure knows"):
        dure.client.patch(torch.nn.Linear(1, 1), "https://localhost:1")


@pytest.mark.parametrize(
    ("strategy", "refusal"),
    [
        (dure.FedSGD(clients=1), "FedSGD|fed-sgd"),
        (dure.PerFedAvg(clients=1, batch_size=4), "does not train its clients by plain steps"),
    ],
    ids=["fed-sgd", "per-fed-avg"],
)
def test_systems_with_a_training_of_their_own_refuse_trainers(
    strategy: Any, refusal: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, DureError), match=refusal):
        one(partial(trainer, tmp_path), strategy, stop=ROUNDS)


def round_of(sizes: list[int], per_epoch: int, first: int = 0) -> TrainerRound:
    return TrainerRound(0, [torch.arange(size) for size in sizes], per_epoch, first)


def test_a_round_of_whole_passes_is_as_many_passes_of_the_loader() -> None:
    batches = RoundBatches(round_of([4, 4, 3, 4, 4, 3], 3), 2)
    assert len(batches) == 6
    assert [[len(one) for one in batches] for _ in range(2)] == [[2, 2, 2, 2, 2, 1]] * 2


def test_a_smaller_step_inside_a_pass_cannot_be_accumulated() -> None:
    assert cannot_divide(round_of([4, 3, 4], 2), 2, 2) is None
    assert "local_steps ends a pass" in str(cannot_divide(round_of([4, 2, 4], 2), 2, 2))
    assert cannot_divide(round_of([4, 2, 4], 2), 4, 1) is None


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_each_step_evenly_and_repeat_no_example(ranks: int) -> None:
    sizes = [8, 8, 4]
    steps = round_of(sizes, 3)
    parts = [list(RoundBatches(steps, 2, rank, ranks)) for rank in range(ranks)]
    each = [sum(map(len, part)) for part in parts]
    assert each == [sum(sizes) // ranks] * ranks
    seen = sorted(example for part in parts for batch in part for example in batch)
    assert seen == sorted(example for step in steps.batches for example in step.tolist())
    assert cannot_divide(steps, 2, 1, ranks) is None
    uneven = cannot_divide(round_of([8, 8, 5], 3), 2, 1, ranks)
    assert uneven is not None
    assert f"a step of 5 examples cannot be shared evenly by {ranks} ranks" in uneven


def adapted(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The causal model with PEFT's adapters."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(causal(dtype), config)


def test_of_a_model_with_adapters_the_adapters_travel(tmp_path: Path) -> None:
    """Two layers, two targets of 16 x 16, rank 2: 4 x 2 x (16 + 16) numbers of 4 bytes."""
    make = partial(trainer, tmp_path, adapted, optim="adamw_torch")
    task = dure.Task.from_trainer(make(), train=None, metrics={})

    def join(url: str) -> str:
        return dure.client.patch(make(), url, name="site").train()

    run, ended = served(task, EPOCHS, join, tmp_path / "run")
    assert ended == ["the run is over"]
    assert same_bits(run, one(make, stop=ROUNDS))
    trained = {name for name, p in run.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name and name.startswith("base_model.model.") for name in trained)
    sent = {name: p for name, p in run.model.named_parameters() if name in trained}
    assert sum(p.nbytes for p in sent.values()) == 4 * 2 * (16 + 16) * 4
    # An update is a stream of these and the buffers.
    stream = size_of(forms_of({**sent, **dict(run.model.named_buffers())}))
    assert run.summary["bytes_sent_per_worker"] == 3 * stream


def test_a_killed_client_goes_on_with_its_round(tmp_path: Path) -> None:
    """Its process ends in the middle of round 2; a new one trains the round from its beginning."""
    make = partial(trainer, tmp_path, optim="adamw_torch")
    task = dure.Task.from_trainer(make(), train=None, metrics={})

    class Dies(transformers.TrainerCallback):  # type: ignore[misc]
        trained = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            Dies.trained += 1
            if Dies.trained == 15:
                raise KeyboardInterrupt

    def join(url: str) -> str:
        known = {"name": "site", "state": tmp_path / "state"}
        with pytest.raises(KeyboardInterrupt):
            dure.client.patch(make(callbacks=[Dies()]), url, **known).train()
        return dure.client.patch(make(), url, **known).train()

    run, ended = served(task, EPOCHS, join, tmp_path / "run")
    assert ended == ["the run is over"]
    assert same_bits(run, one(make, stop=ROUNDS))


def test_a_client_whose_process_is_killed_goes_on_with_its_round(tmp_path: Path) -> None:
    task = dure.Task.from_trainer(trainer(tmp_path), train=None, metrics={})
    program = Path(__file__).with_name("killed_client.py")

    def join(url: str) -> list[int]:
        command = [sys.executable, str(program), url, str(tmp_path)]
        return [subprocess.run(command, timeout=120, check=False).returncode for _ in range(2)]

    run, ended = served(task, EPOCHS, join, tmp_path / "run")
    assert ended == [[-signal.SIGKILL, 0]]
    assert same_bits(run, one(partial(trainer, tmp_path, optim="adamw_torch"), stop=ROUNDS))


def test_a_schedule_of_steps_is_refused_by_systems_of_rounds(tmp_path: Path) -> None:
    task = dure.Task.from_trainer(trainer(tmp_path, lr_scheduler_type="linear"))
    with pytest.raises(ValueError, match="the trainer's schedule counts steps, and a federation"):
        dure.train(task, EPOCHS, stop=ROUNDS)
    alone = dure.train(task, dure.SingleWorker(4), stop=dure.Stop(epochs=1))
    assert alone.summary["steps"] == 6


def test_a_task_has_the_steps_of_the_trainer(tmp_path: Path) -> None:
    """Groups, decay, schedule and clipping: an epoch in the same order has the same weights."""
    make = partial(
        trainer,
        tmp_path,
        partial(causal, torch.float64),
        optim="adamw_torch",
        weight_decay=0.1,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        n=24,
    )
    task = dure.Task.from_trainer(make())
    run = dure.train(task, dure.SingleWorker(4), stop=dure.Stop(epochs=1))
    own = make()
    batches = RoundBatches(round_of_epoch(24, 4), 4)
    loader = own.get_train_dataloader()
    own.get_train_dataloader = lambda: torch.utils.data.DataLoader(
        loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn
    )
    own.train()
    for name, value in run.model.state_dict().items():
        assert float((value - own.model.state_dict()[name]).abs().max()) <= 1e-12


def round_of_epoch(n: int, size: int) -> TrainerRound:
    """The batches of the first epoch of a single worker."""
    from dure.data.batches import Batches

    found = Batches(n, size, 0)
    return TrainerRound(0, [found.at(step) for step in range(n // size)], n // size, 0)


def test_metrics_are_those_of_compute_metrics(tmp_path: Path) -> None:
    def compute(predicted: Any) -> dict[str, float]:
        right = predicted.predictions.argmax(-1) == predicted.label_ids
        return {"right": float(right.mean())}

    made = trainer(tmp_path, classifier, rows=classes, compute_metrics=compute)
    task = dure.Task.from_trainer(made)
    run = dure.train(task, dure.SingleWorker(4), stop=dure.Stop(epochs=2))
    made.model.load_state_dict(run.model.state_dict())
    found = made.evaluate()
    assert run.summary["test_right"] == pytest.approx(found["eval_right"])
    assert run.summary["test_loss"] == pytest.approx(found["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor, which changes the model's own"),
        ({"neftune_noise_alpha": 0.1}, "neftune_noise_alpha"),
    ],
)
def test_what_a_task_cannot_take_over_is_refused(
    settings: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=refusal):
        dure.Task.from_trainer(trainer(tmp_path, **settings))
