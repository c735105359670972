"""The end of a run: what training needed goes before the weights are gathered, and the peak of
memory is that of the whole run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import dure
from dure.contracts.strategy import Strategy
from dure.parallel.mesh.strategy import ParallelLearner
from dure.parallel.single_worker import SingleLearner
from dure.parallel.zero.strategy import ZeROLearner
from small import small_task

STOP = dure.Stop(steps=2)
MUCH = 200_000_000


def test_memory_that_gathering_the_weights_takes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = SingleLearner.weights

    def much(learner: SingleLearner) -> dict[str, Tensor]:
        torch.ones(MUCH, dtype=torch.uint8)
        return weights(learner)

    before = dure.train(small_task(), dure.SingleWorker(8), stop=STOP).summary["peak_memory"]
    monkeypatch.setattr(SingleLearner, "weights", much)
    after = dure.train(small_task(), dure.SingleWorker(8), stop=STOP).summary["peak_memory"]
    assert after - before > MUCH * 0.9


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (dure.SingleWorker(8), SingleLearner),
        (dure.DataParallel(batch_size=8), SingleLearner),
        *((dure.ZeRO(stage=stage, batch_size=8), ZeROLearner) for stage in (1, 3)),
        (dure.Parallel(batch_size=8, mesh=dure.Mesh(data=1)), ParallelLearner),
    ],
    ids=str,
)
def test_the_optimizer_s_state_and_gradients_go_before_the_weights_are_gathered(
    strategy: Strategy, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Any] = []
    weights = kind.weights

    def noted(learner: Any) -> dict[str, Tensor]:
        optimizer = learner.rank_state.optimizer if kind is ParallelLearner else learner.optimizer
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        left.extend(optimizer.state.values())
        left.extend(one.grad for one in parameters if one.grad is not None)
        return weights(learner)

    task = small_task(optimizer=partial(torch.optim.AdamW, lr=0.01))
    expected = dure.train(task, dure.SingleWorker(8), stop=STOP).model.state_dict()
    monkeypatch.setattr(kind, "weights", noted)
    # One rank: it is in this process, where its learner can be looked at.
    run = dure.train(task, strategy, dure.Processes(1), STOP)
    assert not left
    for name, tensor in run.model.state_dict().items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-12)


def test_what_is_given_keeps_no_other_memory_alive() -> None:
    """Data parallel's parameters are views of flat memory."""
    outcome = []
    take = dure.run.run_model.RunModel.trained

    def noted(fresh: Any, weights: Any, *rest: Any) -> Any:
        outcome.append(weights)
        return take(fresh, weights, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dure.run.run_model.RunModel, "trained", noted)
        dure.train(small_task(), dure.DataParallel(batch_size=8), dure.Processes(1), STOP)
    (weights,) = outcome
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in weights.values())
