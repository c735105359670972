"""What cannot be a pipeline is refused before any work, in one line."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.pipeline import Pipeline
from dure.parallel.mesh.strategy import Parallel
from dure.parallel.mesh.tensor_parallel import TensorParallel
from dure.parallel.pipeline.builders import make
from small import CLASSES, FEATURES, check_all, network, small_task


class Undecided(nn.Module):
    """Its control flow depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layer(inputs)
        return scores if scores.sum() > 0 else -scores


class Counting(Undecided):
    """A number is read from the data."""

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layer(inputs)
        return scores * scores.sum().item()


def without_a_receive() -> str:
    text = make("1f1b", 2, 2).text()
    assert " RI1.1" in text
    return text.replace(" RI1.1", "")


def without_the_first_forward() -> str:
    return make("1f1b", 2, 2).text().replace("F0.0 SO0.0", "SO0.0")


WRONG: dict[str, tuple[Any, str]] = {
    "a schedule that is not there": (
        Pipeline(8, schedule="1f1"),
        "there is no schedule '1f1', did you mean '1f1b'?",
    ),
    "a list without a receive": (
        Pipeline(8, schedule=without_a_receive()),
        "needs RI1.1, which is missing",
    ),
    "a list without a forward": (
        Pipeline(8, schedule=without_the_first_forward()),
        "needs F0.0, which is missing",
    ),
    "a list for three": (
        Pipeline(8, schedule=make("1f1b", 3, 2).text()),
        "lists for 3 ranks, but the pipeline has 2",
    ),
    "no list": (Pipeline(8, schedule="schedule: mine\n"), "has no line 'home:'"),
    "no micro-batch": (Pipeline(8, 0), "microbatches is 0"),
    "no stages": (Pipeline(8, schedule="interleaved", stages_per_rank=0), "stages_per_rank is 0"),
    "stages that 1f1b has not": (Pipeline(8, stages_per_rank=2), "1f1b has one stage a rank"),
    "a balance that is not there": (Pipeline(8, balance="speed"), "there is no balance 'speed'"),  # type: ignore[arg-type]
    "no batch": (Pipeline(0), "batch_size is 0"),
    "a module that is not there": (
        Pipeline(8, cut=("layer",)),
        "no operation belongs to the module 'layer'",
    ),
    "too many modules": (
        Pipeline(8, cut=("2", "4")),
        "need 1 modules as cuts, not 2: 2, 4",
    ),
    "the first module": (Pipeline(8, cut=("0",)), "name modules in their order"),
    "modules in another order": (
        Pipeline(8, schedule="interleaved", cut=("4", "2", "3")),
        "the stage at '2' would start at or before 4",
    ),
    "more stages than operations": (
        Pipeline(8, schedule="interleaved", stages_per_rank=9),
        "a model of 5 operations cannot be cut into 18 stages",
    ),
    "another mesh": (
        Parallel(Mesh(2, 3), 8),
        "data 2 x pipeline 3 x tensor 1 are 6 ranks, but the world has 2: choose degrees whose "
        "product is 2",
    ),
    "zero of four": (Parallel(Mesh(2), 8, zero=4), "zero is 4, but ZeRO has the stages 1, 2 and 3"),  # type: ignore[arg-type]
    "a pipeline sums the gradients": (
        Parallel(Mesh(1, 2), 8, zero=2),
        "zero=1 there, or one stage",
    ),
    "parameters divided in stages": (
        Parallel(Mesh(2), 8, schedule="interleaved", stages_per_rank=2, zero=3),
        "zero=1 there, or one stage",
    ),
    "no schedule, and none used": (
        Parallel(Mesh(2), 8, schedule="bogus", zero=2),
        "there is no schedule 'bogus'",
    ),
    "a cut of one stage": (
        Parallel(Mesh(2), 8, cut=("2",), zero=3),
        "a model in one stage has no cut",
    ),
    "more data groups than examples": (
        Parallel(Mesh(2), 1),
        "a joint batch of 1 cannot be divided over 2",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_before_any_work(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dure.Processes, "run", lambda *_: pytest.fail("work has begun"))
    strategy, message = WRONG[what]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        dure.train(small_task(), strategy, dure.Processes(2), dure.Stop(steps=1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strategy", [TensorParallel(8), Parallel(Mesh(2), 8, zero=1)])
def test_an_optimizer_that_looks_at_whole_tensors_is_refused_where_they_are_divided(
    strategy: Any,
) -> None:
    task = small_task(optimizer=partial(torch.optim.Adafactor, lr=0.01))
    with pytest.raises(ValueError, match="Adafactor cannot be divided element by element"):
        dure.train(task, strategy, dure.Processes(2), dure.Stop(steps=1))
    check_all(Pipeline(8), task, 2)


def test_labels_say_what_runs() -> None:
    assert Pipeline(8, 3).label == "pipeline 1f1b, 3 micro-batches"
    assert Pipeline(8, 3, "naive").label == "pipeline naive, 1 micro-batch"
    assert Pipeline(8, 3, make("gpipe", 2, 5).text()).label == "pipeline gpipe, 5 micro-batches"


@pytest.mark.parametrize("model", [Undecided, Counting])
def test_a_model_that_the_data_steer_is_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dure.Processes, "run", lambda *_: pytest.fail("work has begun"))
    with pytest.raises(ValueError, match=r"cannot be cut, .* independent") as caught:
        dure.train(small_task(model=lambda: model().double()), Pipeline(8), dure.Processes(2))
    assert "\n" not in str(caught.value)


def test_a_batch_norm_of_micro_batches_is_not_refused() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(FEATURES), network()).double()

    check_all(Pipeline(9, 2), small_task(model=model), 2)
    with pytest.raises(ValueError, match="batch norm cannot compute statistics"):
        check_all(Pipeline(8, 8), small_task(model=model), 2)


def test_checking_draws_nothing() -> None:
    before = torch.get_rng_state()
    check_all(Pipeline(8), small_task(), 2)
    assert torch.equal(before, torch.get_rng_state())
