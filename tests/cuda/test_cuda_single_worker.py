"""One worker on a GPU: the numbers of the CPU, and the same bits again."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from on_gpu import CLOSE, GPU, alike, apart, drawn_there, there, vector, with_dropout
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import dure
from dure.errors import LossNotFiniteError
from small import CLASSES, examples, network, small_task

pytestmark = pytest.mark.needs_cuda

STOP = dure.Stop(epochs=3)
ON_GPU = dure.SingleWorker(8, device="cuda")


class Pairs(Dataset[Any]):
    """Examples with a transform that draws."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        data = examples(40)
        return data.inputs[index] + 0.1 * torch.rand(1), data.targets[index]


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.3, momentum=0.9),
        partial(torch.optim.AdamW, lr=0.01),
        partial(torch.optim.RMSprop, lr=0.01),
    ],
)
def test_a_gpu_walks_the_path_of_the_cpu(optimizer: Any) -> None:
    task = small_task(optimizer=optimizer)
    there = dure.train(task, ON_GPU, stop=STOP, seed=3)
    here = dure.train(task, dure.SingleWorker(8), stop=STOP, seed=3)
    assert apart(there, here) < CLOSE
    for one, other in zip(there.history.evaluations, here.history.evaluations, strict=True):
        assert one.metrics == pytest.approx(other.metrics, abs=CLOSE)
    assert all(one.device.type == "cpu" for one in there.model.state_dict().values())


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)),
        partial(F.cross_entropy, weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        partial(F.cross_entropy, ignore_index=0),
    ],
)
def test_a_loss_brings_its_class_weights_along(loss: Any) -> None:
    task = small_task(loss=loss)
    there = dure.train(task, ON_GPU, stop=STOP)
    assert apart(there, dure.train(task, dure.SingleWorker(8), stop=STOP)) < CLOSE
    assert task.loss is loss


def test_metrics_that_want_everything_at_once_get_it() -> None:
    def share(outputs: Tensor, targets: Tensor) -> float:
        assert len(outputs) == 20
        return float((outputs.argmax(1).numpy() == targets.numpy()).mean())

    task = small_task(metrics={"share": share}, eval_batch_size=7)
    there = dure.train(task, ON_GPU, stop=STOP).history.evaluations[-1]
    here = dure.train(task, dure.SingleWorker(8), stop=STOP).history.evaluations[-1]
    assert there.metrics == pytest.approx(here.metrics)


@pytest.mark.parametrize("model", [with_dropout, drawn_there])
def test_the_same_seed_draws_the_same_on_a_gpu(model: Any) -> None:
    def run(seed: int) -> dure.Run:
        torch.cuda.manual_seed(seed + 100)  # the global generator must not matter
        return dure.train(small_task(n=40, model=model), ON_GPU, stop=STOP, seed=seed)

    first, again, other = run(1), run(1), run(2)
    assert alike(first, again)
    assert apart(first, other) > 0


def test_a_process_that_begins_with_a_model_on_a_gpu_has_the_seeds_weights() -> None:
    program = """
import torch
from on_gpu import drawn_there
from dure.contracts.fresh_model import seeded_model
from small import small_task
models = [seeded_model(small_task(model=drawn_there), 7) for _ in range(2)]
first, second = (list(model.parameters()) for model in models)
assert all(map(torch.equal, first, second))
"""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    path = f"import sys; sys.path[:0] = {folders}\n"
    subprocess.run([sys.executable, "-c", path + program], check=True, timeout=120)


def test_the_users_own_draws_on_a_gpu_go_on_as_if_there_had_been_no_run() -> None:
    torch.cuda.manual_seed(5)
    expected = torch.rand(4, device=GPU)
    torch.cuda.manual_seed(5)
    dure.train(small_task(n=40, model=with_dropout), ON_GPU, stop=STOP)
    assert torch.equal(torch.rand(4, device=GPU), expected)


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize("data", [examples(40), Pairs()])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    data: Any, loaders: int, tmp_path: Path
) -> None:
    task = small_task(model=with_dropout, train=data, optimizer=partial(torch.optim.AdamW, lr=0.01))
    strategy = dure.SingleWorker(8, device="cuda", loaders=loaders)
    whole = dure.train(task, strategy, stop=dure.Stop(steps=12), seed=4)
    dure.train(task, strategy, stop=dure.Stop(steps=5), seed=4, out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(steps=12))
    assert torch.equal(vector(whole), vector(resumed))


def test_a_model_that_is_made_on_the_gpu_is_trained_there() -> None:
    there_too = dure.train(small_task(model=there(network)), ON_GPU, stop=STOP)
    assert apart(there_too, dure.train(small_task(), dure.SingleWorker(8), stop=STOP)) < CLOSE


def test_a_loss_that_is_not_finite_is_told() -> None:
    task = small_task(lr=torch.tensor(1e308, dtype=torch.float64))  # type: ignore[arg-type]
    with pytest.raises(LossNotFiniteError):
        dure.train(task, ON_GPU, stop=STOP)


def test_convolutions_have_the_numbers_of_the_cpu() -> None:
    def pictures() -> nn.Module:
        layers = [
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * 3 * 3, CLASSES),
        ]
        return nn.Sequential(*layers).double()

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 1, 8, 8, generator=generator, dtype=torch.float64)
    data = dure.Examples(inputs, torch.arange(24) % CLASSES)
    task = small_task(model=pictures, train=data, test=data)
    there = dure.train(task, ON_GPU, stop=STOP)
    assert apart(there, dure.train(task, dure.SingleWorker(8), stop=STOP)) < CLOSE
