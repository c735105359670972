"""A lightning.Trainer as a task, as simulated clients, and as a client on a network."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_cases import served
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dure
from small import examples, largest_difference, network, same_bits

lightning = pytest.importorskip("lightning")
ROUNDS = dure.Stop(rounds=3)
EPOCHS = dure.FedAvg(clients=1, batch_size=4, local_epochs=2)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """The small network in a LightningModule."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = network()
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(self.dropout(inputs))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, number: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Data(lightning.LightningDataModule):  # type: ignore[misc]
    """Examples of the small task, as a data module."""

    def __init__(self, n: int = 22, seed: int = 0) -> None:
        super().__init__()
        found = examples(n, seed)
        self.examples = TensorDataset(found.inputs, found.targets)

    def train_dataloader(self) -> Any:
        return DataLoader(self.examples, batch_size=4, shuffle=True)


def in_float64(batch_size: int) -> tuple[Classifier, DataLoader[Any]]:
    """A module and its data in float64."""
    data = Data().examples
    exact = TensorDataset(data.tensors[0].double(), data.tensors[1])
    return Classifier().double(), DataLoader(exact, batch_size=batch_size)


def trainer(**settings: Any) -> Any:
    return lightning.Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        }
    )


def one(strategy: Any = EPOCHS, module: Any = Classifier, **more: Any) -> dure.Run:
    settings = more.pop("settings", {})
    return dure.simulate(
        lambda client: (trainer(**settings), module(), Data()),
        clients=1,
        strategy=strategy,
        stop=ROUNDS,
        **more,
    )


@pytest.mark.parametrize(
    "strategy",
    [
        EPOCHS,
        dure.FedAvg(clients=1, batch_size=4, local_steps=4),
        dure.FedProx(clients=1, batch_size=4, mu=0.1),
    ],
    ids=["epochs", "steps", "fed-prox"],
)
def test_a_trainer_has_the_bits_of_fed_avg(strategy: Any) -> None:
    task = dure.Task.from_lightning(Classifier(), Data())
    assert same_bits(one(strategy), dure.train(task, strategy, stop=ROUNDS))


def test_dropout_and_clipping_are_those_of_fed_avg() -> None:
    dropping = partial(Classifier, 0.3)
    task = dure.Task.from_lightning(dropping(), Data(), clip_norm=0.5)
    by_loop = dure.train(task, EPOCHS, stop=ROUNDS)
    assert same_bits(one(module=dropping, settings={"gradient_clip_val": 0.5}), by_loop)


def test_accumulated_batches_are_a_step() -> None:
    class Halves(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(self.examples, batch_size=2)

    run = dure.simulate(
        lambda client: (trainer(accumulate_grad_batches=2), Classifier(), Halves(24)),
        clients=1,
        strategy=EPOCHS,
        stop=ROUNDS,
    )
    task = dure.Task.from_lightning(Classifier(), Data(24))
    assert largest_difference(run, dure.train(task, EPOCHS, stop=ROUNDS)) <= 1e-12


def test_a_module_is_a_task_of_every_system() -> None:
    task = dure.Task.from_lightning(Classifier(), Data(24))
    stop = dure.Stop(epochs=2)
    alone = dure.train(task, dure.SingleWorker(8), stop=stop)
    assert list(alone.model.state_dict()) == list(Classifier().state_dict())
    shared = dure.train(task, dure.DataParallel(8), dure.Processes(2), stop)
    assert largest_difference(alone, shared) <= 1e-12


def test_a_patched_trainer_has_the_bits_of_the_simulation(tmp_path: Path) -> None:
    task = dure.Task.from_lightning(Classifier(), train=None)

    def join(url: str) -> str:
        return dure.client.patch(trainer(), url, name="site").fit(Classifier(), datamodule=Data())

    run, ended = served(task, EPOCHS, join, tmp_path / "run")
    assert ended == ["the run is over"]
    assert same_bits(run, one())


class Counts(lightning.Callback):  # type: ignore[misc]
    """Steps and epochs at the end of each `fit`."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, int]] = []

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.ends.append((trainer.global_step, trainer.current_epoch))


def test_counters_begin_anew_or_go_on() -> None:
    counts = Counts()
    reset = one(settings={"callbacks": [counts]})
    assert counts.ends == [(12, 2)] * 3
    counts = Counts()
    keep = one(settings={"callbacks": [counts], "max_epochs": 6}, between_rounds="keep")
    assert [number for number, _ in counts.ends] == [36]
    for run in (reset, keep):
        # An update's samples are those of its round, and not of the trainer's counter.
        assert [step.samples for step in run.history.steps] == [44, 88, 132]


def test_one_client_that_keeps_its_state_is_the_trainer_alone() -> None:
    from dure.randomness.seeds import seed_generators

    alone = Classifier()
    seed_generators(0, "client", 0, 0, everything=True)
    trainer(max_epochs=6).fit(alone, Data().train_dataloader())
    run = one(settings={"max_epochs": 6}, between_rounds="keep")
    for name, value in run.model.state_dict().items():
        assert float((value - alone.state_dict()[name]).abs().max()) <= 1e-12


def test_loaders_for_validation_are_used_and_their_errors_are_raised() -> None:
    class Validated(Classifier):
        seen = 0

        def validation_step(self, batch: Any, number: int) -> None:
            Validated.seen += 1

    class Broken(Data):
        def val_dataloader(self) -> Any:
            raise OSError("no such file")

    loader = Data().train_dataloader()
    dure.simulate(
        lambda client: (trainer(num_sanity_val_steps=0), Validated(), loader, loader),
        clients=1,
        strategy=EPOCHS,
        stop=dure.Stop(rounds=1),
    )
    assert Validated.seen == 2 * 6
    with pytest.raises(OSError, match="no such file"):
        dure.simulate(lambda client: (trainer(), Classifier(), Broken()), clients=1)


class Manual(Classifier):
    automatic_optimization = False


class TwoOptimizers(Classifier):
    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        return [made, made]


@pytest.mark.parametrize(
    ("module", "refusal"),
    [(Manual, "manual optimization"), (TwoOptimizers, "several optimizers, and a task has one")],
)
def test_what_a_task_cannot_take_over_is_refused(module: Any, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        dure.Task.from_lightning(module(), Data())


def test_several_devices_without_their_ranks_are_refused() -> None:
    made = trainer(devices=2, strategy="ddp", use_distributed_sampler=False)
    with pytest.raises(ValueError, match="it starts its ranks in fit: start them with torchrun"):
        dure.client.patch(made, "http://127.0.0.1:1")
    made = trainer(devices=2, strategy="ddp_spawn")
    with pytest.raises(ValueError, match="cannot train this client"):
        dure.client.patch(made, "http://127.0.0.1:1")
