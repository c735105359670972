"""Measuring a model on the test data."""

from __future__ import annotations

import copy
import math
import re
from functools import partial
from typing import NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import dure
from dure.collectives.group import Group
from dure.record.meter import Meter
from dure.record.trace import Trace
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import loss_and_count
from small import examples, network, small_task


def on_all(task, model, size):
    """The evaluation on so many ranks, what each of them found."""
    models = [copy.deepcopy(model) for _ in range(size)]
    return on_ranks(
        size, lambda group: evaluate(task, models[group.rank], task.test, group, step=0)
    )


def test_the_measures_are_those_of_the_plain_computation_uneven_last_batch_included():
    task, model = small_task(eval_batch_size=7), network()
    inputs, targets = task.test.inputs, task.test.targets
    with torch.no_grad():
        outputs = model(inputs)
    measured = evaluate(task, model, task.test, Group(), 0)
    assert measured == {
        "test_loss": pytest.approx(float(F.cross_entropy(outputs, targets)), rel=1e-12),
        "test_accuracy": float((outputs.argmax(1) == targets).double().mean()),
    }


def macro_f1(outputs, targets):
    """Of classes; no mean over examples."""
    guesses = outputs.argmax(1)
    hits = [2 * ((guesses == c) & (targets == c)).sum() for c in range(3)]
    all_ = [((guesses == c).sum() + (targets == c).sum()).clamp(min=1) for c in range(3)]
    return (torch.stack(hits).double() / torch.stack(all_)).mean()


def confusion(outputs, targets):
    return torch.bincount(3 * targets + outputs.argmax(1), minlength=9).view(3, 3)


def f1_of(confusion):
    true = confusion.diagonal()
    return (2 * true / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)).mean()


def recall(outputs, targets):
    ones = targets == 1
    return ((outputs.argmax(1) == 1) & ones).sum(), ones.sum()


def in_order(outputs, targets):
    """Another number for any other order, or number, of examples."""
    weights = torch.arange(len(outputs), dtype=torch.float64)
    return float((outputs[:, 0] * weights).sum() + (targets * weights).sum())


METRICS = {
    "f1": macro_f1,
    "added": dure.SumMetric(confusion, f1_of),
    "perplexity": dure.SumMetric(
        lambda outputs, targets: {
            "sum": F.cross_entropy(outputs, targets, reduction="sum"),
            "count": len(targets),
        },
        lambda sums: (sums["sum"] / sums["count"]).exp(),
    ),
    "recall": recall,
    "order": in_order,
    "number": lambda outputs, targets: len(targets),
    "all_right": lambda outputs, targets: bool((outputs.argmax(1) == targets).all()),
}


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 31))
def test_a_metric_is_that_of_all_examples_on_any_ranks_in_any_batches(n, size, batch):
    task = small_task(test=examples(n, seed=n), eval_batch_size=batch, metrics=METRICS)
    model = network()
    with torch.no_grad():
        outputs = model(task.test.inputs)
    targets = task.test.targets
    right, ones = recall(outputs, targets)
    expected = {
        "test_loss": float(F.cross_entropy(outputs, targets)),
        "test_f1": float(macro_f1(outputs, targets)),
        "test_added": float(macro_f1(outputs, targets)),
        "test_perplexity": float(F.cross_entropy(outputs, targets).exp()),
        "test_recall": int(right) / int(ones) if ones else float("nan"),
        "test_order": in_order(outputs, targets),
        "test_number": n,
        "test_all_right": float((outputs.argmax(1) == targets).all()),
    }
    first, *others = on_all(task, model, size)
    assert first == pytest.approx(expected, abs=1e-12, nan_ok=True)
    # To the last bit, whatever ranks decide by it.
    assert all(repr(other) == repr(first) for other in others)


def test_a_function_is_called_once_on_everything_and_pairs_on_batches():
    calls = {"once": [], "pairs": []}

    def once(outputs, targets):
        calls["once"].append(len(targets))
        return 0.5

    def pairs(outputs, targets):
        calls["pairs"].append(len(targets))
        return torch.tensor(1.0), torch.tensor(2.0)

    def calls_of(batch):
        for found in calls.values():
            found.clear()
        task = small_task(metrics={"once": once, "pairs": pairs}, eval_batch_size=batch)
        assert evaluate(task, network(), task.test, Group(), 0)["test_pairs"] == 0.5
        return calls

    # The first batch tells which of the two it is.
    assert calls_of(8) == {"once": [8, 20], "pairs": [8, 8, 4]}
    assert calls_of(20) == {"once": [20], "pairs": [20]}


class Statistic(NamedTuple):
    """As scipy's results are."""

    statistic: float
    pvalue: float


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "returns None"),
        ("high", "returns 'high'"),
        (torch.ones(3), r"returns a tensor of shape \[3\]"),
        (torch.ones(3).numpy(), r"returns an array of shape \[3\]"),
        ((torch.zeros(3), torch.tensor(3)), r"returns \(a tensor of shape \[3\], a tensor of sh"),
        ((1, 2, 3), r"returns \(a int, a int, a int\)"),
        ({"f1": 1.0}, "returns a dict"),
        (torch.ones(2, 3).max(dim=1), "returns a max"),
        (Statistic(0.9, 0.01), "returns a Statistic"),
        ([1.0], "returns a list"),
        (torch.tensor(1j), r"returns a tensor of shape \[\]"),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_metric_that_gives_no_number_is_told_by_its_name(given, said, size):
    task = small_task(metrics={"odd": lambda outputs, targets: given}, eval_batch_size=7)
    (rank, *_) = on_ranks(size, lambda group: _error(task, group))
    assert isinstance(rank, ValueError)
    assert re.search(f"the metric 'odd' {said}.*, but has to return one number", str(rank))


def _error(task, group):
    model = network()
    try:
        return evaluate(task, model, task.test, group, 0)
    except ValueError as error:
        return error


@pytest.mark.parametrize("number", [1, True, 1.0, torch.tensor(1), numpy.float64(1)])
def test_a_number_may_come_in_any_form(number):
    task = small_task(metrics={"one": lambda outputs, targets: number}, eval_batch_size=7)
    assert evaluate(task, network(), task.test, Group(), 0)["test_one"] == 1


def test_what_is_not_a_number_is_reported_as_it_is():
    metrics = {
        "nan": lambda outputs, targets: float("nan"),
        "nothing": lambda outputs, targets: (torch.tensor(0.0), torch.tensor(0)),
        "infinite": lambda outputs, targets: torch.tensor(float("inf")),
    }
    task = small_task(metrics=metrics, eval_batch_size=7)
    found = evaluate(task, network(), task.test, Group(), 0)
    assert math.isnan(found["test_nan"])
    assert math.isnan(found["test_nothing"])
    assert found["test_infinite"] == math.inf


def one_class_too_few(outputs, targets):
    """As AUC: undefined where not all classes are there."""
    if len(targets.unique()) < 3:
        raise KeyError("a class is missing")
    return 1.0


def test_what_fails_on_a_part_need_not_fail_on_the_whole():
    task = small_task(metrics={"auc": one_class_too_few}, eval_batch_size=1)
    assert [one["test_auc"] for one in on_all(task, network(), 3)] == [1.0] * 3
    few = small_task(metrics={"auc": one_class_too_few}, test=examples(1))
    with pytest.raises(ValueError, match="the metric 'auc' failed: KeyError: 'a class is missing'"):
        evaluate(few, network(), few.test, Group(), 0)


def test_sums_that_change_their_shape_are_refused_on_one_rank_and_on_several():
    def as_many_as(outputs, targets):
        return torch.ones(len(targets))

    task = small_task(
        metrics={"odd": dure.SumMetric(as_many_as, torch.sum)}, test=examples(15), eval_batch_size=8
    )
    with pytest.raises(ValueError, match=r"'odd' returns sums of shapes \[7\] for one batch and"):
        evaluate(task, network(), task.test, Group(), 0)
    for error in on_all(task, network(), 2):
        assert "'odd' returns different things on different ranks" in str(error)


class Padded(nn.Module):
    """Outputs as long as the longest text of the batch, which differs."""

    def forward(self, inputs):
        longest = int(inputs[:, 0].max())
        return {"scores": inputs[:, 1:], "text": inputs.new_zeros(len(inputs), longest)}


def padded_task(**changes):
    lengths = torch.tensor([3.0, 3, 3, 3, 5, 5])
    inputs = torch.cat([lengths[:, None], torch.randn(6, 4)], dim=1)
    return small_task(
        model=Padded,
        loss=lambda outputs, targets: outputs["scores"].mean(),
        test=(inputs, torch.arange(6)),
        metrics={"first": lambda outputs, targets: outputs["scores"][0, 0]},
        **changes,
    )


def test_what_can_be_put_together_is_and_the_rest_is_refused():
    whole = padded_task()
    expected = pytest.approx(float(whole.test.inputs[0, 1]))
    assert evaluate(whole, Padded(), whole.test, Group(), 0)["test_first"] == expected
    in_two = padded_task(eval_batch_size=4)
    with pytest.raises(ValueError, match=r"'first' needs all .* outputs \(tensor 2 of 2\) differ"):
        evaluate(in_two, Padded(), in_two.test, Group(), 0)
    for error in on_all(padded_task(eval_batch_size=2), Padded(), 2):
        if not isinstance(error, ValueError):
            pytest.fail(f"{error} is no error")


@pytest.mark.parametrize(
    ("outputs", "fits"),
    [
        (lambda inputs: (inputs, {"twice": inputs * 2, "none": None}), True),
        (lambda inputs: inputs.repeat_interleave(3, dim=0), True),
        (lambda inputs: inputs.bfloat16(), True),
        (lambda inputs: inputs > 0, True),
        (lambda inputs: (inputs, inputs.mean()), False),
        (lambda inputs: (inputs, inputs.new_zeros(3, len(inputs))), False),
        (lambda inputs: (inputs, range(3)), False),
    ],
)
def test_outputs_of_any_structure_come_in_order(outputs, fits):
    class Model(nn.Module):
        def forward(self, inputs):
            return outputs(inputs)

    seen = []

    def look(given, targets):
        seen.append((given, targets))
        return 0.0

    task = small_task(
        loss=lambda given, targets: torch.zeros(()), metrics={"look": look}, eval_batch_size=4
    )
    found = on_all(task, Model(), 2)
    if not fits:
        assert all("needs all outputs and targets at once" in str(error) for error in found)
        return
    given, targets = max(seen, key=lambda one: len(one[1]))
    pairs = zip(tree_leaves(given), tree_leaves(outputs(task.test.inputs)), strict=True)
    for mine, expected in pairs:
        assert mine is expected is None or torch.equal(mine, expected)
    assert torch.equal(targets, task.test.targets)


def test_more_memory_than_was_allowed_is_refused_at_the_first_batch():
    calls = []

    class Counting(nn.Module):
        def forward(self, inputs):
            calls.append(len(inputs))
            return inputs[:, :3]

    # of each example three outputs and a target, of eight bytes
    allowed = 20 * 4 * 8
    for memory, fits in ((allowed, True), (allowed - 1, False)):
        task = small_task(metrics={"f1": macro_f1}, eval_batch_size=5, metric_memory=memory)
        calls.clear()
        if fits:
            evaluate(task, Counting(), task.test, Group(), 0)
            assert len(calls) == 4
            continue
        with pytest.raises(ValueError, match=r"'f1' .* 640 bytes, more than the 639 of .*Sum"):
            evaluate(task, Counting(), task.test, Group(), 0)
        assert len(calls) == 1
    # Sums need none.
    task = small_task(
        metrics={"f1": METRICS["added"], "recall": recall}, eval_batch_size=5, metric_memory=1
    )
    assert len(evaluate(task, Counting(), task.test, Group(), 0)) == 3


def test_what_is_sent_for_metrics_is_not_counted():
    task = small_task(metrics=METRICS, eval_batch_size=3)

    def sent(group):
        evaluate(task, network(), task.test, group, 0)
        return group.meter.counters.bytes_sent

    assert on_ranks(3, sent) == [0, 0, 0]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_measured_as_it_predicts_and_goes_on_as_it_was(training):
    model = nn.Sequential(nn.Linear(6, 3, dtype=torch.float64), nn.Dropout(0.9)).train(training)
    task = small_task()
    first, second = (evaluate(task, model, task.test, Group(), 0) for _ in range(2))
    assert first == second
    assert [module.training for module in model.modules()] == [training] * 3


def test_each_module_goes_on_in_its_own_mode():
    model = nn.Sequential(nn.Linear(6, 3, dtype=torch.float64), nn.Dropout(0.9), nn.BatchNorm1d(3))
    model[2].double().eval()
    task = small_task()
    for measure in (
        lambda: evaluate(task, model, task.test, Group(), 0),
        lambda: flops_per_step(model, task.train, 4),
    ):
        measure()
        assert [module.training for module in model] == [True, True, False]


def test_no_gradients_are_kept():
    model, task = network(), small_task()
    evaluate(task, model, task.test, Group(), 0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_measured_without_test_data_and_the_timeline_shows_what_was():
    trace = Trace()
    group, task = Group(meter=Meter("rank 0", trace)), small_task()
    assert evaluate(task, network(), None, group, 3) == {}
    assert not trace.lanes
    evaluate(task, network(), task.test, group, 3)
    ((span,),) = [lane.spans for lane in trace.lanes.values()]
    assert (span.name, span.category, span.step) == ("evaluation", "evaluation", 3)
    assert group.meter.counters.compute_seconds == 0


def ignoring(targets: torch.Tensor) -> torch.Tensor:
    """Most are ignored in the first half, and all of the last few."""
    targets = targets.clone()
    targets[: len(targets) // 2][torch.arange(len(targets) // 2) % 5 > 0] = -100
    targets[-7:] = -100
    return targets


def test_targets_in_few_bits_are_counted_as_they_are():
    targets = torch.tensor([0, 1, 2, 156, 156], dtype=torch.uint8)
    weight = torch.rand(157, generator=torch.Generator().manual_seed(0))
    scores = torch.randn(5, 157, generator=torch.Generator().manual_seed(1))
    for loss in (nn.CrossEntropyLoss(weight=weight), F.cross_entropy):
        total, count = loss_and_count(loss, scores, targets, 5)
        assert total / count == pytest.approx(float(loss(scores, targets.long())))
        assert count == pytest.approx(
            float(weight[targets.long()].sum()) if loss is not F.cross_entropy else 5.0
        )
    assert loss_and_count(partial(F.cross_entropy, size_average=False), scores, targets, 5)[1] == 5


WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
LOSSES = [
    F.cross_entropy,
    nn.CrossEntropyLoss(weight=WEIGHT),
    partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1),
    partial(F.cross_entropy, ignore_index=2),
]


@pytest.mark.parametrize("loss", LOSSES, ids=["plain", "module", "weighted", "other"])
def test_a_loss_that_ignores_targets_is_their_mean_whatever_the_batches(loss):
    given = examples(40)
    targets = (
        ignoring(given.targets)
        if getattr(loss, "keywords", {}).get("ignore_index") is None
        else given.targets
    )
    task, model = small_task(loss=loss, test=(given.inputs, targets), eval_batch_size=7), network()
    expected = float(loss(model(given.inputs), targets).detach())
    for size in (1, 3):
        for found in on_all(task, model, size):
            assert found["test_loss"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.SingleWorker(), dure.Processes(1)),
        (dure.ZeRO(3), dure.Processes(2)),
        (dure.Pipeline(), dure.Processes(2)),
        (dure.ParallelSGD(combine="best"), dure.Processes(2)),
        (dure.FedPer(clients=3, held_out=0.4), dure.Simulated()),
    ],
    ids=lambda one: one.name,
)
def test_no_more_are_measured_at_once_than_was_asked_for(strategy, world, tmp_path):
    def saw(outputs, targets):
        with open(tmp_path / "seen", "a") as seen:
            seen.write(f"{len(targets)}\n")
        return dure.accuracy(outputs, targets)

    def run(size):
        task = small_task(metrics={"accuracy": saw}, eval_batch_size=size)
        return (
            dure.train(task, strategy, world, dure.Stop(epochs=1)).history.evaluations[-1].metrics
        )

    small = run(2)
    assert {int(line) for line in (tmp_path / "seen").read_text().split()} <= {1, 2}
    assert small == pytest.approx(run(1_000), abs=1e-12)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.SingleWorker(), dure.Processes(1)),
        (dure.DataParallel(), dure.Processes(3)),
        (dure.DataParallel(), dure.Threads(2)),
        (dure.ZeRO(3), dure.Processes(2)),
        (dure.Pipeline(), dure.Processes(2)),
        (dure.TensorParallel(), dure.Processes(2)),
        (dure.Parallel(dure.Mesh(data=2, pipeline=2)), dure.Processes(4)),
        (dure.LocalSGD(), dure.Processes(2)),
        (dure.ADMM(), dure.Processes(2)),
        (dure.LayersPerCore(), dure.Threads(2)),
        (dure.Hogwild(), dure.Threads(2)),
        (dure.FedAvg(clients=3), dure.Simulated()),
    ],
    ids=lambda one: one.name if hasattr(one, "name") else type(one).__name__,
)
def test_a_metric_is_that_of_the_model_in_every_system(strategy, world):
    # Uneven shares, and batches of which none has all examples.
    task = small_task(test=examples(19, seed=1), eval_batch_size=4, metrics=METRICS)
    run = dure.train(task, strategy, world, dure.Stop(epochs=1))
    with torch.no_grad():
        outputs = run.model(task.test.inputs)
    found = run.history.evaluations[-1].metrics
    assert found["test_f1"] == pytest.approx(float(macro_f1(outputs, task.test.targets)), abs=1e-12)
    assert found["test_added"] == pytest.approx(found["test_f1"], abs=1e-12)
    assert found["test_order"] == pytest.approx(in_order(outputs, task.test.targets), abs=1e-9)


def test_a_client_measures_all_that_it_has_held_out_at_once(tmp_path):
    def run(size):
        task = small_task(n=90, metrics={"f1": macro_f1}, eval_batch_size=size)
        strategy = dure.FedAvg(clients=3, held_out=0.4)
        return dure.train(task, strategy, stop=dure.Stop(rounds=1)).history.evaluations[-1].metrics

    assert run(2) == pytest.approx(run(1_000), abs=1e-12)


def test_a_target_may_be_one_of_everything():
    task = small_task(metrics={"f1": macro_f1}, eval_batch_size=4)
    run = dure.train(
        task,
        dure.DataParallel(),
        dure.Processes(2),
        dure.Stop(epochs=60, target={"test_f1": 0.5}),
    )
    assert run.summary["ended"] == "target"


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None, "9"])
def test_at_least_one_is_measured_at_once(size):
    with pytest.raises(ValueError, match="eval_batch_size="):
        small_task(eval_batch_size=size)
