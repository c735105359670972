"""One client after another: the bits of a plain loop, and nothing left over for the next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from clients_at_work import jobs_of, plain, results, same, vectors, weights_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F

import dure
from dure.errors import WorkerFailedError
from dure.federated.engines import loop
from dure.federated.engines.loop import LoopEngine
from small import network, small_task

OPTIMIZERS = [
    partial(torch.optim.SGD, lr=0.3),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    torch.optim.Adam,
    partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    torch.optim.Adamax,
    torch.optim.NAdam,
    partial(torch.optim.RMSprop, momentum=0.5),
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    lambda parameters: torch.optim.SGD(
        [{"params": [p], "lr": 0.1 / (1 + p.ndim)} for p in parameters], lr=0.1
    ),
    lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
]


def engine(batch_size: int | None = 4, seed: int = 3, **changes) -> LoopEngine:
    task = small_task(**changes)
    return LoopEngine(task, task.model(), task.train, batch_size, seed)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("small", [True, False])
def test_the_bits_are_those_of_a_plain_loop_whatever_came_before(optimizer, small, monkeypatch):
    monkeypatch.setattr(loop, "SMALL_MODEL", 1 << 18 if small else 0)
    jobs = jobs_of([6, 13, 1, 9], [4, 6, 2, 1], weights_of())
    made = engine(optimizer=optimizer)
    for job, trained in zip(jobs, made.train(jobs), strict=True):
        delta, loss = plain(made.task, job, 4, 3)
        assert torch.equal(trained.delta[0], delta)
        assert trained.loss == loss
    assert same(results(made, jobs[:1]), results(made, jobs[:1]))


def clips(kind):
    """Each parameter's gradient is clipped before a step, from the second step of a client on."""

    def made(parameters):
        parameters = list(parameters)
        optimizer = kind(parameters, lr=0.3)
        seen: list[int] = []

        def hook(*given):
            if seen:
                for parameter in parameters:
                    nn.utils.clip_grad_norm_([parameter], 0.01)
            seen.append(1)

        optimizer.register_step_pre_hook(hook)
        return optimizer

    return made


def doubled(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(2)


def clamped() -> nn.Module:
    model = network()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        parameter.register_post_accumulate_grad_hook(doubled)
    return model


MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    "changes",
    [
        *({"optimizer": clips(kind)} for kind in (torch.optim.SGD, MOMENTUM, torch.optim.Adam)),
        *(
            {"optimizer": partial(kind, lr=0.3), "model": clamped}
            for kind in (torch.optim.SGD, MOMENTUM)
        ),
    ],
)
def test_hooks_are_honoured_and_nothing_of_theirs_goes_from_client_to_client(changes):
    jobs = jobs_of([6, 13, 9], [4, 6, 3], weights_of())
    made = engine(**changes)
    for job, trained in zip(jobs, made.train(jobs), strict=True):
        assert torch.equal(trained.delta[0], plain(made.task, job, 4, 3)[0])


@given(st.integers(1, 20), st.none() | st.integers(1, 12), st.integers(0, 9), st.integers(1, 9))
def test_the_bits_are_those_of_a_plain_loop_for_any_sizes(n, batch_size, first, steps):
    (job,) = jobs_of([n], [steps], weights_of(), first_step=first)
    made = engine(batch_size)
    (trained,) = made.train([job])
    delta, loss = plain(made.task, job, batch_size, 3)
    assert torch.equal(trained.delta[0], delta)
    assert trained.loss == loss


@pytest.mark.parametrize("small", [True, False])
def test_mu_and_a_correction_are_added_to_every_gradient(small, monkeypatch):
    """For one step of SGD: delta = -lr (g + mu (w - anchor) + correction)."""
    monkeypatch.setattr(loop, "SMALL_MODEL", 1 << 18 if small else 0)
    weights, anchor, correction = weights_of(), weights_of(seed=1), weights_of(seed=2)
    job = partial(jobs_of, [9], [1], weights)
    plainly, drawn = (
        vectors(results(engine(), job())),
        vectors(results(engine(), job(mu=0.5, anchor=anchor))),
    )
    both = vectors(results(engine(), job(mu=0.5, anchor=anchor, correction=correction)))
    assert torch.allclose(drawn - plainly, -0.3 * 0.5 * (weights[0] - anchor[0]), atol=1e-14)
    assert torch.allclose(both - drawn, -0.3 * correction[0], atol=1e-14)
    # the anchor is the weights where it is not given: the first step feels nothing, the second does
    assert torch.equal(vectors(results(engine(), job(mu=0.5))), plainly)
    two = partial(jobs_of, [9], [2], weights)
    assert not torch.equal(
        vectors(results(engine(), two(mu=0.5))), vectors(results(engine(), two()))
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS[:3])
def test_the_same_examples_in_the_same_order_make_the_same_model(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """Three copies of the examples, in batches that are drawn for one client: the bits of one
    copy."""
    data = small_task().train
    copies = dure.Examples(data.inputs.repeat(3, 1), data.targets.repeat(3))
    jobs = jobs_of([41] * 3, [7] * 3, weights_of(), mu=0.1)
    alike = [replace(job, client=0) for job in jobs]
    first, *others = results(engine(train=copies, optimizer=optimizer), alike)
    assert all(same([first], [other]) for other in others)
    assert not same([first], results(engine(train=copies, optimizer=optimizer), jobs[1:2]))


def noisy() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
    ).double()


def test_dropout_and_buffers_depend_on_the_client_and_the_round_alone():
    def train(order):
        made, weights, buffers = engine(model=noisy), weights_of(noisy), list(noisy().buffers())
        jobs = [jobs_of([20, 20], [3, 3], weights, buffers=buffers, round=r)[c] for r, c in order]
        torch.rand(len(order))
        return dict(zip(order, made.train(jobs), strict=True))

    order = [(0, 0), (0, 1), (1, 0)]
    first, second = train(order), train(order[::-1])
    for who in order:
        assert same([first[who]], [second[who]])
        assert all(map(torch.equal, first[who].buffers, second[who].buffers))
    assert not same([first[0, 0]], [first[1, 0]])


def test_dropout_is_drawn_anew_where_the_same_weights_are_trained_again():
    made, weights, buffers = engine(model=noisy), weights_of(noisy), list(noisy().buffers())
    first, again, other = (
        results(made, jobs_of([20], [3], weights, buffers=buffers, round=round, turn=turn))
        for round, turn in ((2, 5), (3, 5), (2, 6))
    )
    assert same(first, again)
    assert not same(first, other)


def test_what_is_given_is_not_changed_and_what_is_returned_is_nobody_s_else():
    weights, buffers = weights_of(noisy), [buffer.clone() for buffer in noisy().buffers()]
    before = [value.clone() for value in [*weights, *buffers]]
    made = engine(model=noisy)
    jobs = jobs_of(
        [20, 20], [3, 3], weights, buffers=buffers, mu=0.1, correction=[torch.ones_like(weights[0])]
    )
    first = next(iter(made.train(jobs)))
    kept = [value.clone() for value in [*first.delta, *first.buffers]]
    results(made, jobs)
    assert all(map(torch.equal, [*weights, *buffers], before))
    assert all(map(torch.equal, [*first.delta, *first.buffers], kept))


def test_a_parameter_without_a_gradient_is_passed_over_by_the_optimizer():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.idle = network(), nn.Parameter(torch.ones(8, dtype=torch.float64))

        def forward(self, x):
            return self.net(x)

    made = engine(model=Idle, optimizer=partial(torch.optim.SGD, lr=0.3, weight_decay=0.1))
    weights = weights_of(Idle)
    jobs = jobs_of([9, 9], [3, 3], weights)
    for job, trained in zip(jobs, made.train(jobs), strict=True):
        assert torch.equal(trained.delta[0], plain(made.task, job, 4, 3)[0])
    idle = trained.delta[0][:8]  # 64 bytes, so that what follows is aligned as in a plain model
    assert not idle.any()


def test_jobs_are_taken_one_at_a_time():
    jobs = jobs_of([5] * 6, [1] * 6, weights_of())
    taken: list[int] = []
    given = (taken.append(job.client) or job for job in jobs)
    for done, _ in enumerate(engine().train(given), start=1):
        assert len(taken) == done


@pytest.mark.parametrize(
    ("step", "failure"),
    [(1, "its first loss is not finite"), (3, "its loss became not finite")],
)
def test_a_loss_that_is_not_finite_is_a_failure_and_the_next_client_is_as_if_alone(step, failure):
    def nan_at(outputs, targets):
        calls.append(1)
        return F.cross_entropy(outputs, targets) * (float("nan") if len(calls) == step else 1.0)

    calls: list[int] = []
    jobs = jobs_of([20, 9], [5, 3], weights_of())
    failed, other = results(engine(loss=nan_at), jobs)
    assert (failed.failure, failed.samples, list(failed.delta)) == (failure, 0, [])
    assert same([other], results(engine(), jobs[1:]))


def test_an_error_after_a_loss_that_is_not_finite_is_that_failure():
    def fails_then(outputs, targets):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("what comes of NaN")
        return outputs.sum() * float("nan")

    calls: list[int] = []
    (failed,) = results(engine(loss=fails_then), jobs_of([20], [5], weights_of()))
    assert failed.failure == "its first loss is not finite"


def test_weights_that_are_not_finite_are_noticed_after_the_last_step():
    task = {"optimizer": partial(torch.optim.SGD, lr=float("inf"))}
    (failed,) = results(engine(**task), jobs_of([20], [1], weights_of()))
    assert failed.failure == "its weights became not finite"


def test_an_error_of_the_user_s_code_names_client_and_round():
    def fails(outputs, targets):
        raise KeyError("no such class")

    with pytest.raises(
        WorkerFailedError, match="client 0 failed in round 3: KeyError: 'no such class'"
    ) as caught:
        results(engine(loss=fails), jobs_of([20], [1], weights_of()))
    assert isinstance(caught.value.__cause__, KeyError)
