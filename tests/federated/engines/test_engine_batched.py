"""Whole cohorts at once: what the loop computes, to rounding; and refusals with their reasons."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from clients_at_work import jobs_of, plain, results, same, vectors, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F

import dure
from dure.errors import WorkerFailedError
from dure.federated.engines import layers
from dure.federated.engines.batched import BatchedEngine, batched_engine
from dure.federated.engines.loop import LoopEngine
from dure.tasks import models
from small import network, small_task

CLIENTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=6)
SGD = torch.optim.SGD
FAMILY = st.sampled_from(
    [
        partial(SGD, lr=0.3),
        partial(SGD, lr=0.3, weight_decay=0.1),
        partial(SGD, lr=0.2, momentum=0.9),
        partial(SGD, lr=0.2, momentum=0.9, dampening=0.3, weight_decay=0.05),
        partial(SGD, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1),
    ]
)


def engine(batch_size: int | None = 4, seed: int = 3, **changes) -> BatchedEngine:
    task = small_task(n=60, **changes)
    torch.manual_seed(0)
    made = batched_engine(task, task.model(), task.train, batch_size, seed)
    assert isinstance(made, BatchedEngine), made
    return made


def close(
    task: dure.Task, made: BatchedEngine, jobs, batch_size: int | None = 4, seed: int = 3
) -> bool:
    """Whether the engine computes what the loop computes, in order, whether clients share their
    first step or not, and whether updates of one step are formed or not."""
    expected = results(LoopEngine(task, task.model(), task.train, batch_size, seed), jobs)
    largest = vectors(expected).abs().max()
    off = []
    for made.together, made.sums in ((False, False), (True, False), (True, True)):
        got = results(made, jobs)
        assert [each.samples for each in got] == [each.samples for each in expected]
        assert [each.loss for each in got] == pytest.approx(
            [each.loss for each in expected], rel=1e-12
        )
        off.append((vectors(got) - vectors(expected)).abs().max())
    return bool(max(off) <= 1e-12 * largest)


@settings(max_examples=25)
@given(CLIENTS, st.none() | st.integers(1, 6), FAMILY, st.integers(0, 5), st.integers(1, 6))
def test_it_is_the_loop_for_any_sizes_steps_and_optimizers(
    clients, batch_size, optimizer, first, cohort
):
    made = engine(batch_size, optimizer=optimizer)
    made.cohort = cohort
    jobs = jobs_of(*map(list, zip(*clients, strict=True)), weights_of(), first_step=first)
    assert close(small_task(n=60, optimizer=optimizer), made, jobs, batch_size)


@settings(max_examples=25)
@given(CLIENTS, FAMILY, st.sampled_from([0.0, 0.3]), st.booleans(), st.booleans(), st.booleans())
def test_it_is_the_loop_with_mu_anchors_and_corrections(
    clients, optimizer, mu, anchored, corrected, shared
):
    count = len(clients)
    several = [weights_of(seed=0 if shared else k) for k in range(count)]
    jobs = [
        jobs_of(
            *map(list, zip(*clients, strict=True)),
            several[k],
            mu=mu,
            anchor=weights_of(seed=50 + k) if anchored else None,
            correction=weights_of(seed=90 + k) if corrected else None,
        )[k]
        for k in range(count)
    ]
    assert close(small_task(n=60, optimizer=optimizer), engine(optimizer=optimizer), jobs)


def of_ones_own(outputs, targets):
    total = F.cross_entropy(outputs, targets, WEIGHT, ignore_index=0, reduction="sum")
    return total, WEIGHT[targets[targets != 0]].sum()


WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
UNEQUAL = [
    partial(F.cross_entropy, ignore_index=1),
    partial(F.cross_entropy, ignore_index=2, weight=WEIGHT),
    nn.CrossEntropyLoss(weight=WEIGHT),
    of_ones_own,
]


@settings(max_examples=25)
@given(CLIENTS, st.none() | st.integers(1, 4), FAMILY, st.sampled_from(UNEQUAL))
def test_it_is_the_loop_for_losses_that_count_unequally(clients, batch_size, optimizer, loss):
    settings = {"optimizer": optimizer, "loss": loss}
    made = engine(batch_size, **settings)
    jobs = jobs_of(*map(list, zip(*clients, strict=True)), weights_of())
    task = small_task(n=60, **settings)
    assert close(task, made, jobs, batch_size)
    expected = results(LoopEngine(task, task.model(), task.train, batch_size, 3), jobs)
    assert [each.counted for each in results(made, jobs)] == pytest.approx(
        [each.counted for each in expected]
    )


PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def convolutional(draw):
    """A small network for images of 7x6 pixels and 2 channels, of layers that fit."""
    h, w = 7, 6
    chain: list[nn.Module] = []
    channels = 2
    for _ in range(draw(st.integers(1, 2))):
        kernel, stride, padding, dilation = draw(PAIRS), draw(PAIRS), draw(PAIRS), draw(PAIRS)
        into = draw(st.integers(1, 4))
        layer = nn.Conv2d(
            channels, into, kernel, stride, padding, dilation, bias=draw(st.booleans())
        )
        pool = draw(st.sampled_from([nn.MaxPool2d, nn.AvgPool2d, None]))
        act = draw(st.sampled_from([nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.Identity]))
        added = [
            layer,
            act(),
            *([] if pool is None else [pool(2, draw(st.integers(1, 2)), draw(st.integers(0, 1)))]),
        ]
        try:
            shape = nn.Sequential(*added)(torch.zeros(1, channels, h, w)).shape
        except RuntimeError:
            continue
        chain += added
        channels, h, w = shape[1:]
    return nn.Sequential(*chain, nn.Flatten(), nn.Linear(channels * h * w, 3)).double()


@settings(max_examples=30)
@given(
    convolutional(),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.booleans(),
    FAMILY,
    st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_it_is_the_loop_for_convolutions_of_any_geometry(model, sizes, patches, optimizer, frozen):
    *before_last, _ = [module for module in model.modules() if list(module.parameters(False))]
    for module, stays in zip(before_last, frozen, strict=False):
        module.requires_grad_(not stays)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(30, 2, 7, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (30,), generator=generator)
    task = small_task(model=lambda: model, train=(inputs, targets), test=None, optimizer=optimizer)
    before, layers.FEW = layers.FEW, 10**6 if patches else 0
    try:
        made = batched_engine(task, model, task.train, 3, 3)
        assert isinstance(made, BatchedEngine), made
        weights = weights_of(lambda: model)
        assert close(task, made, jobs_of(sizes, [3] * len(sizes), weights), 3)
    finally:
        layers.FEW = before


class Functional(nn.Module):
    """Calls of functions and methods instead of modules."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(16, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x.view(-1, 1, 4, 4))), 2)
        x = torch.tanh(F.dropout(x, 0.0, self.training))
        return self.linear(x.reshape(x.size(0), -1).contiguous())


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (partial(models.LogisticRegression, 16, 3), (4, 4)),
        (partial(models.TwoNN, 16, 3, 5), (4, 4)),
        (partial(models.CNN, 1, 4, 3), (1, 4, 4)),
        (Functional, (16,)),
        (lambda: nn.Linear(16, 3, bias=False), (16,)),
    ],
)
def test_the_models_of_this_library_and_of_others_are_chains(model, shape):
    generator = torch.Generator().manual_seed(1)
    data = (
        torch.randn(30, *shape, generator=generator).double(),
        torch.randint(3, (30,), generator=generator),
    )
    task = small_task(model=lambda: model().double(), train=data, test=None)
    made = batched_engine(task, task.model(), task.train, 4, 3)
    assert isinstance(made, BatchedEngine), made
    assert close(task, made, jobs_of([9, 4, 7], [3, 1, 2], weights_of(task.model)))


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (F.mse_loss, (torch.randn(41, 3).double())),
        (nn.MSELoss(), (torch.randn(41, 3).double())),
        (F.binary_cross_entropy_with_logits, torch.rand(41, 3).double()),
        (nn.CrossEntropyLoss(), torch.randint(3, (41,))),
    ],
)
def test_it_is_the_loop_for_every_loss_that_is_known(loss, targets):
    task = small_task(loss=loss, train=(small_task().train.inputs, targets), test=None)
    made = batched_engine(task, network(), task.train, 4, 3)
    assert isinstance(made, BatchedEngine), made
    assert close(task, made, jobs_of([9, 3, 11], [3, 4, 1], weights_of()))


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(x + self.a(x))


class Depends(Skips):
    def forward(self, x):
        return self.b(x) if x.sum() > 0 else self.b(self.a(x))


class Twice(Skips):
    def forward(self, x):
        return self.b(self.a(self.a(x)))


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def half_frozen() -> nn.Module:
    model = network()
    model[0].weight.requires_grad_(False)
    return model


class Counts(nn.Sequential):
    """Computes otherwise from its third pass on."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 3))
        self.passes = 0

    def forward(self, inputs):
        self.passes += 1
        return super().forward(inputs) if self.passes < 3 else super().forward(2 * inputs)


class Remembers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 3))
        self.seen: list[int] = []

    def forward(self, inputs):
        self.seen.append(len(self.seen))
        return super().forward(inputs)


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3).double()))


def hooked() -> nn.Module:
    model = network()
    model[0].register_forward_hook(lambda module, given, returned: 2 * returned)
    return model


def watched(how: str):
    def made() -> nn.Module:
        model = network()
        getattr(model[0].weight, how)(lambda *given: None)
        return model

    return made


def clipped(parameters) -> torch.optim.Optimizer:
    optimizer = SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *given: None)
    return optimizer


def looked_back() -> nn.Module:
    model = network()
    model[0].register_full_backward_pre_hook(lambda module, gradient: (2 * gradient[0],))
    return model


def double(make):
    return lambda: make().double()


class WithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.backbone(inputs)
        result: torch.Tensor = self.head(features)
        return result


NAMED = ({"a": torch.randn(9, 4).double(), "b": torch.arange(9)}, torch.arange(9) % 3)
"""Examples whose inputs are a dict."""


class OfNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, given):
        code = F.one_hot(given["b"] // 5, 2).double()
        return self.layers(torch.cat([code, given["a"]], 1))


class OfPair(OfNamed):
    def forward(self, given):
        wide, narrow = given
        return self.layers(torch.cat([narrow.double().unsqueeze(1), wide, wide[:, :1]], dim=-1))


class MixesNamed(OfNamed):
    def forward(self, given):
        return self.layers(given["a"] - given["a"][:1])


class TakesNamedTwice(OfNamed):
    def forward(self, given):
        return self.layers(torch.cat([given["a"], given["a"][:, :2]], 1)) + given["a"][:, :3]


class TakesNothing(OfNamed):
    def forward(self, given):
        return self.layers(given["a"].mean() * torch.ones(9, 6).double())


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("made", [OfNamed, OfPair])
def test_dicts_and_tuples_of_tensors_learn_what_a_plain_loop_learns(made, momentum, batch_size):
    inputs, targets = NAMED
    given = inputs if made is OfNamed else (inputs["a"], inputs["b"])
    task = small_task(
        model=double(made),
        train=(given, targets),
        test=None,
        optimizer=partial(SGD, lr=0.3, momentum=momentum),
    )
    batched = batched_engine(task, task.model(), task.train, batch_size, 3, together=True)
    assert not isinstance(batched, str), batched
    jobs = jobs_of([4, 2, 3], [3, 2, 4], weights_of(task.model))
    for job, trained in zip(jobs, batched.train(jobs), strict=True):
        delta, loss = plain(task, job, batch_size, 3)
        assert (trained.delta[0] - delta).abs().max() < 1e-12
        assert abs(trained.loss - loss) < 1e-12


def fails_without_words(outputs, targets):
    raise AssertionError


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimizer": torch.optim.Adam}, "the optimizer is Adam, not SGD"),
        (
            {"optimizer": lambda p: SGD([{"params": [q]} for q in p], lr=0.1)},
            "several groups of parameters",
        ),
        ({"optimizer": lambda p: SGD(list(p)[1:], lr=0.1)}, "leaves parameters out"),
        ({"optimizer": partial(SGD, lr=0.1, maximize=True)}, "settings beyond lr"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "the loss is CrossEntropyLoss"),
        (
            {"loss": nn.CrossEntropyLoss(weight=torch.ones(3).float())},
            "the loss fails: RuntimeError: expected",
        ),
        ({"loss": fails_without_words}, "the loss fails: AssertionError"),
        ({"loss": nn.NLLLoss()}, "the loss is NLLLoss"),
        ({"loss": lambda outputs, targets: (outputs.sum(), 0)}, "the loss counts nothing"),
        ({"loss": lambda outputs, targets: (outputs, 1)}, "a sum that is not a scalar tensor"),
        (
            {"loss": lambda outputs, targets: F.cross_entropy(outputs, targets)},
            "the loss is <lambda>",
        ),
        (
            {"model": double(lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))},
            "the model has buffers",
        ),
        (
            {"model": double(lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.1)))},
            "draws random numbers",
        ),
        (
            {"model": double(lambda: nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3)))},
            "LayerNorm is not a layer",
        ),
        ({"model": double(Skips)}, "the model is not a chain: add"),
        ({"model": double(Depends)}, "forward depends on its inputs"),
        ({"model": double(Twice)}, "two layers share their weights"),
        ({"model": double(lambda: Scaled(6, 3))}, "outside of the layers"),
        ({"model": double(WithoutGradients)}, "the loss does not reach backbone.weight"),
        (
            {"loss": lambda o, t: (o.detach().sum(), len(t))},
            "the loss reaches no trained parameter",
        ),
        ({"model": half_frozen}, "of a layer's weight and bias one is trained"),
        ({"model": lambda: network().requires_grad_(False)}, "no parameter is trained"),
        ({"model": double(Counts)}, "changes what the model keeps"),
        ({"model": double(Remembers)}, "changes what the model keeps"),
        ({"model": parametrized}, "is not a layer that is known here"),
        ({"model": hooked}, "the model has hooks"),
        ({"model": looked_back}, "the model has hooks"),
        ({"model": watched("register_hook")}, "some parameters have hooks"),
        ({"model": watched("register_post_accumulate_grad_hook")}, "some parameters have hooks"),
        ({"optimizer": clipped}, "the optimizer has hooks"),
        ({"model": nn.Identity}, "the model has no parameters"),
        (
            {"train": (torch.randn(9, 6).double(), torch.tensor([0] * 8 + [3]))},
            "some targets are no class",
        ),
        ({"train": (torch.randn(9, 6), torch.zeros(9).long())}, "the inputs are torch.float32"),
        ({"train": [(torch.randn(6).double(), 0)] * 3}, "the inputs are not tensors in memory"),
        ({"train": NAMED, "model": double(MixesNamed)}, "mixes examples before its first layer"),
        ({"train": NAMED, "model": double(TakesNamedTwice)}, "the model is not a chain"),
        ({"train": NAMED, "model": double(TakesNothing)}, "mean is not a layer that is known here"),
    ],
)
def test_what_it_cannot_do_it_refuses_with_a_reason(changes, reason):
    task = small_task(**{"test": None, **changes})
    refusal = batched_engine(task, task.model(), task.train, 4, 3)
    assert isinstance(refusal, str)
    assert reason in refusal
    assert "\n" not in refusal


def test_nothing_of_a_cohort_leaks_into_the_next():
    made = engine(optimizer=partial(SGD, lr=0.1, momentum=0.9))
    jobs = jobs_of([9, 4, 11], [3, 2, 4], weights_of())
    proximal = jobs_of(
        [9, 4, 11], [3, 2, 4], weights_of(seed=1), mu=0.5, correction=weights_of(seed=2)
    )
    first = results(made, jobs)
    results(made, proximal)
    results(made, jobs_of([5] * 5, [1] * 5, weights_of(seed=3)))
    assert same(results(made, jobs), first)


def test_what_is_given_is_not_changed_and_what_is_returned_stays():
    made, weights, anchor, correction = (
        engine(),
        weights_of(),
        weights_of(seed=1),
        weights_of(seed=2),
    )
    before = [value[0].clone() for value in (weights, anchor, correction)]
    jobs = jobs_of([9, 4], [3, 2], weights, mu=0.1, anchor=anchor, correction=correction)
    first = results(made, jobs)
    kept = vectors(first)
    results(made, jobs_of([9, 4], [3, 2], weights_of(seed=4)))
    assert all(map(torch.equal, (weights[0], anchor[0], correction[0]), before))
    assert torch.equal(vectors(first), kept)


def test_never_more_than_a_cohort_is_taken():
    made = engine()
    made.cohort = 3
    taken: list[int] = []
    jobs = jobs_of([5] * 8, [1] * 8, weights_of())
    for done, _ in enumerate(made.train(taken.append(job.client) or job for job in jobs)):
        assert (
            len(taken) <= (done // 3 + 1) * 3 + 1
        )  # and the one that shows that the cohort is full


def test_mu_of_none_changes_no_bits():
    made, jobs = engine(), jobs_of([9, 4], [3, 2], weights_of())
    assert same(
        results(made, jobs),
        results(made, jobs_of([9, 4], [3, 2], weights_of(), mu=0.0, anchor=weights_of(seed=1))),
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("together", [True, False])
def test_clients_whose_loss_is_not_finite_fail_and_the_others_are_as_without_them(bad, together):
    data = small_task().train
    inputs = data.inputs.clone()
    inputs[[20, 35]] = bad
    task = small_task(train=(inputs, data.targets), test=None)
    made = batched_engine(task, network(), task.train, 100, 3, together=together)
    assert isinstance(made, BatchedEngine), made
    jobs = jobs_of([10, 5, 10, 5, 10], [2] * 5, weights_of())
    found = results(made, jobs)
    failure = "its first loss is not finite"
    assert [each.failure for each in found] == [None, None, failure, None, failure]
    alone = results(made, [jobs[at] for at in (0, 1, 3)])
    for one, other in zip([found[0], found[1], found[3]], alone, strict=True):
        assert torch.allclose(one.delta[0], other.delta[0], rtol=1e-12, atol=1e-15)
        assert one.loss == pytest.approx(other.loss, rel=1e-12)


def test_weights_that_are_not_finite_are_noticed_after_the_last_step():
    made = engine(optimizer=partial(SGD, lr=float("inf")))
    found = results(made, jobs_of([9, 4], [1, 1], weights_of()))
    assert [each.failure for each in found] == ["its weights became not finite"] * 2


def ditto_jobs(weights):
    """Two jobs a client, one after the other, as Ditto's: the second is held near what the first
    begins with."""
    pulled = jobs_of([9, 4, 7], [3, 2, 3], weights_of(seed=1), mu=0.1, anchor=weights)
    return [
        job
        for pair in zip(jobs_of([9, 4, 7], [3, 2, 3], weights), pulled, strict=True)
        for job in pair
    ]


def test_jobs_that_take_turns_in_kind_are_two_cohorts_and_not_six():
    made, cohorts = engine(), []
    cohort_of = made._cohort
    made._cohort = lambda jobs, kind: cohorts.append(len(jobs)) or cohort_of(jobs, kind)
    jobs = ditto_jobs(weights_of())
    assert close(small_task(n=60), made, jobs)
    assert cohorts == [3, 3] * 3, "for each of the ways in which `close` lets it compute"
    made.cohort = 2
    assert close(small_task(n=60), made, jobs)


@pytest.mark.parametrize("bad", range(6))
def test_a_job_that_fails_has_its_place_whatever_its_kind(bad):
    jobs = ditto_jobs(weights_of())
    jobs[bad] = replace(jobs[bad], weights=[torch.full_like(jobs[bad].weights[0], torch.nan)])
    given = results(engine(), jobs)
    task = small_task(n=60)
    expected = results(LoopEngine(task, network(), task.train, 4, 3), jobs)
    assert [each.failure for each in given] == [each.failure for each in expected]
    assert [at for at, each in enumerate(given) if each.failure is not None] == [bad]
    assert [each.samples for each in given] == [each.samples for each in expected]
    losses = [each.loss for each in expected]
    assert [each.loss for each in given] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("error", [KeyError("no such class"), SystemExit(7), AssertionError()])
def test_a_loss_of_ones_own_that_raises_names_the_client_whose_examples_it_had(error):
    def loss(outputs, targets):
        if (targets == 2).any():
            raise error
        return F.cross_entropy(outputs, targets, reduction="sum"), len(targets)

    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(30, 6, generator=generator).double(), torch.arange(30) // 10)
    task = small_task(loss=loss, train=data)
    # Fewer steps than the others: clients are computed in another order than the jobs have.
    jobs = jobs_of([10, 10, 10], [2, 3, 1], weights_of())
    made = batched_engine(task, network(), task.train, 4, 3)
    assert isinstance(made, BatchedEngine)
    with pytest.raises(WorkerFailedError) as caught:
        results(made, jobs)
    assert str(caught.value) == f"client 2 failed in round 3: {type(error).__name__}: {error}"
    assert caught.value.__cause__ is error
