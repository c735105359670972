"""Data as people have them: arrays, frames, dicts, loaders and streams, trained on."""

from __future__ import annotations

import re

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dure
from dure.contracts.fresh_model import seeded_model
from dure.data.batches import Batches
from dure.data.conversion import as_examples
from dure.data.sampling import Sampling, class_weights
from dure.data.streams import StreamExamples

N = 12


class Column:
    """A column of a frame, as far as dure asks."""

    def __init__(self, array):
        self.array = array

    def to_numpy(self):
        return self.array


class Frame(Column):
    """A frame: a table whose columns have names."""

    def __init__(self, **columns):
        self.columns = columns
        self.dtypes = {name: column.dtype for name, column in columns.items()}

    def __getitem__(self, name):
        return Column(self.columns[name])

    def to_numpy(self):
        # As pandas: truths beside numbers have objects in common.
        mixed = len({column.dtype.kind == "b" for column in self.columns.values()}) > 1
        columns = [c.astype(object) if mixed else c for c in self.columns.values()]
        return numpy.stack(columns, axis=1)


class Sentences(Dataset):
    """Sentence i has 1 + i % 3 words, as lists of numbers."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        words = [1 + (index + place) % 5 for place in range(1 + index % 3)]
        return {"input_ids": words, "labels": index % 2}


def padded(items):
    longest = max(len(item["input_ids"]) for item in items)
    rows = [item["input_ids"] + [0] * (longest - len(item["input_ids"])) for item in items]
    return {
        "input_ids": torch.tensor(rows),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


class Bag(torch.nn.Module):
    """Scores of a bag of words; its own loss, if it is given labels."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(6, 2, padding_idx=0, dtype=torch.float64)

    def forward(self, input_ids, labels=None):
        logits = self.words(input_ids).sum(dim=1)
        found = {"logits": logits}
        return found if labels is None else {"loss": F.cross_entropy(logits, labels), **found}


class OfDict(Bag):
    def forward(self, inputs):
        return super().forward(inputs["input_ids"])["logits"]


class Stream(IterableDataset):
    def __init__(self, n=N):
        self.n = n

    def __iter__(self):
        rows = torch.arange(float(self.n), dtype=torch.float64)[:, None].expand(-1, 2)
        return ((rows[i], i % 3) for i in range(self.n))


def linear():
    return torch.nn.Linear(2, 3, dtype=torch.float64)


def points(n=N):
    return torch.arange(2.0 * n, dtype=torch.float64).view(n, 2) / n, torch.arange(n) % 3


def trained(task, strategy=None, world=None):
    strategy = strategy or dure.SingleWorker(batch_size=4)
    world = world or dure.Processes(1)
    run = dure.train(task, strategy, world, dure.Stop(epochs=2))
    return torch.cat([one.flatten() for one in run.model.state_dict().values()]), run


def task_of(data, **more):
    return dure.Task(model=linear, loss=F.cross_entropy, train=data, **more)


def test_arrays_and_frames_train_as_their_tensors_do():
    inputs, targets = points()
    array = inputs.numpy()
    array.flags.writeable = False
    frame = Frame(a=array[:, 0], b=array[:, 1])
    expected, _ = trained(task_of((inputs, targets)))
    for data in ((array, targets.numpy()), (frame, Column(targets.numpy()))):
        assert torch.equal(trained(task_of(data))[0], expected)


def test_a_frame_may_hold_truths_beside_numbers():
    frame = Frame(old=numpy.array([True, False]), size=numpy.array([0.5, 2.0]))
    inputs, _ = as_examples((frame, torch.zeros(2))).batch(torch.arange(2))
    assert inputs.tolist() == [[1.0, 0.5], [0.0, 2.0]]


def test_items_that_make_no_batch_are_told_what_they_need():
    items = [{"words": [1], "labels": 0}, {"words": [1, 2], "labels": 1}] * 2
    with pytest.raises(
        dure.errors.DataError,
        match="2 items cannot be combined into a batch; if they differ in length, give a coll",
    ):
        as_examples(items).batch(torch.arange(2))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: (Frame(a=numpy.zeros(2), b=numpy.array(["x", "y"])), torch.zeros(2)), "columns b"),
        (lambda: (numpy.zeros(2), numpy.array(["x", "y"])), "cannot be a tensor"),
        (lambda: [{"text": "a", "labels": 1}], "has texts in text"),
        (lambda: [{"words": 1}], "needs a column labels for the targets; it has words"),
        (lambda: DataLoader(Sentences(), collate_fn=lambda items: 3), "returned a int"),
        (lambda: DataLoader(Sentences(), sampler=range(3)), "with a range"),
        (lambda: DataLoader(Sentences(), batch_sampler=[[0, 1]]), "batch_sampler"),
        (lambda: DataLoader(Sentences(), worker_init_fn=print), "worker_init_fn"),
        (lambda: DataLoader(Sentences(), sampler=WeightedRandomSampler([1.0] * N, 3)), "of 3 for"),
        (lambda: DataLoader(Stream()), "has no length"),
        (lambda: StreamExamples(Stream(), length=0), "length is 0"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(make, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        as_examples(make()).batch(torch.tensor([0]))


def test_a_loader_s_tensors_train_as_themselves():
    data = TensorDataset(*points())
    expected, _ = trained(task_of(data))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    assert torch.equal(trained(task_of(loader))[0], expected)


def test_a_loader_that_does_not_shuffle_and_drops_the_last_batch_is_followed():
    loader = DataLoader(TensorDataset(*points()), batch_size=5, drop_last=True)
    found, run = trained(task_of(loader), dure.SingleWorker(batch_size=5))
    start = trained(task_of(points()), dure.SingleWorker(batch_size=5))[1]
    assert run.summary["steps"] == 4
    assert start.summary["steps"] == 6
    model = seeded_model(task_of(points()), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in [*loader, *loader]:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    expected = torch.cat([one.detach().flatten() for one in model.parameters()])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_subset_sampler_trains_on_its_examples_alone():
    inputs, targets = points()
    loader = DataLoader(
        TensorDataset(inputs, targets), batch_size=4, sampler=SubsetRandomSampler([1, 3, 5, 7])
    )
    part = inputs[[1, 3, 5, 7]], targets[[1, 3, 5, 7]]
    assert torch.equal(trained(task_of(loader))[0], trained(task_of(part))[0])


def test_draws_by_weight_follow_the_weights_and_the_seed():
    weights = torch.zeros(1000, dtype=torch.float64)
    weights[3], weights[900] = 1.0, 3.0
    order = Sampling(weights=weights).order(1000)
    first = order(0, 0, 0)
    assert set(first.tolist()) == {3, 900}
    assert 650 < int((first == 900).sum()) < 850
    assert torch.equal(first, order(0, 0, 0))
    assert not torch.equal(first, order(0, 1, 0))
    part = Sampling(weights=weights).order(1000, torch.tensor([900, 5]))
    assert part(0, 0, 0).tolist() == [0, 0]


def test_class_weights_make_classes_count_alike():
    labels = torch.tensor([0, 0, 0, 2])
    weights = class_weights(labels)
    assert weights.tolist() == pytest.approx([4 / 6, 0, 2])
    assert float(weights[labels].sum()) == pytest.approx(4)


@given(n=st.integers(1, 40), size=st.integers(1, 40), drop_last=st.booleans())
def test_an_epoch_drops_only_what_fills_no_batch(n, size, drop_last):
    batches = Batches(n, size, seed=0, drop_last=drop_last)
    seen = [batches.at(step) for step in range(batches.steps_per_epoch)]
    size = min(size, n)
    assert len(set(torch.cat(seen).tolist())) == (n // size * size if drop_last else n)
    assert not drop_last or {len(one) for one in seen} == {size}


def test_two_ranks_train_on_padded_dicts_and_on_streams_as_one_does():
    bags = dure.Task(
        model=OfDict,
        loss=F.cross_entropy,
        train=DataLoader(Sentences(), batch_size=4, shuffle=True, collate_fn=padded),
    )
    stream = task_of(StreamExamples(Stream(100), length=N))
    for task, world in ((bags, dure.Processes(2)), (stream, dure.Threads(2))):
        two, _ = trained(task, dure.DataParallel(batch_size=4), world)
        torch.testing.assert_close(trained(task)[0], two, rtol=0, atol=1e-12)


def test_a_model_s_own_loss_trains_as_that_loss_does():
    loader = DataLoader(Sentences(), batch_size=4, shuffle=True, collate_fn=padded)
    own = dure.Task(model=Bag, loss=None, train=loader, test=loader)
    given_one = dure.Task(model=OfDict, loss=F.cross_entropy, train=loader, test=loader)
    with pytest.raises(ValueError, match="or give a loss"):
        trained(own, dure.DataParallel(batch_size=4), dure.Threads(2))
    found, run = trained(own)
    expected, other = trained(given_one)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert run.summary["test_loss"] == pytest.approx(other.summary["test_loss"], abs=1e-12)


def test_what_a_model_s_own_loss_counts_is_said():
    labels = torch.tensor([[-100, 3, -100], [1, 2, 3]])
    assert dure.OwnLoss("tokens").count(labels) == 4
    assert dure.OwnLoss("next-tokens").count(labels) == 3
    with pytest.raises(ValueError, match="set what the model's loss is averaged over"):
        dure.OwnLoss().count(labels)
    with pytest.raises(ValueError, match="it returned none"):
        dure.OwnLoss()({"logits": labels}, labels)
    with pytest.raises(ValueError, match="choose one of examples, tokens"):
        dure.OwnLoss("words")


def test_a_stream_gives_each_example_once_and_says_where_it_ended():
    examples = as_examples(StreamExamples(Stream(5), length=7))
    order = examples.order()(0, 0, 0)
    assert order.tolist() == list(range(7))
    assert examples.batch(torch.tensor([3, 1]))[1].tolist() == [0, 1]
    with pytest.raises(
        dure.errors.DataError,
        match="the stream ended after 5 examples, but its length was given as 7",
    ):
        examples.batch(torch.tensor([6]))


@pytest.mark.parametrize(
    ("data", "strategy", "complaint"),
    [
        ("weights", dure.SplitLearning(batch_size=4), "cannot use a sampler with weights"),
        ("drop", dure.FedAvg(clients=2, batch_size=32), "cannot use drop_last"),
        ("stream", dure.FedAvg(clients=2), "cannot use a stream"),
        ("weights", dure.SingleWorker(batch_size=8), "the DataLoader has batches of 4"),
        ("drop", dure.SingleWorker(batch_size=32), "drop_last drops all 12 examples"),
    ],
)
def test_what_a_system_cannot_do_as_the_data_ask_is_refused(data, strategy, complaint):
    tensors = TensorDataset(*points())
    train = {
        "weights": lambda: DataLoader(
            tensors, batch_size=4, sampler=WeightedRandomSampler([1.0] * N, N)
        ),
        "drop": lambda: DataLoader(tensors, batch_size=32, shuffle=True, drop_last=True),
        "stream": lambda: StreamExamples(Stream(), length=N),
    }[data]()
    with pytest.raises(ValueError, match=re.escape(complaint)):
        dure.train(task_of(train), strategy, stop=dure.Stop(epochs=1))


def weighted(**more):
    sampler = WeightedRandomSampler([0.0, 3.0, 1.0] * (N // 3), N)
    return DataLoader(TensorDataset(*points()), batch_size=4, sampler=sampler, **more)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.FedAvg(clients=1, batch_size=4), dure.Simulated(engine="loop")),
        (dure.FedAvg(clients=1, batch_size=4), dure.Simulated(engine="batched")),
        (dure.FedAvg(clients=1, batch_size=4), dure.Simulated(engine="loop-processes")),
        (dure.ParallelSGD(batch_size=4), dure.Processes(1)),
    ],
)
@pytest.mark.parametrize("data", [weighted, lambda: DataLoader(TensorDataset(*points()), 4)])
def test_who_goes_through_a_part_of_its_own_samples_it_as_a_single_worker_does(
    strategy, world, data
):
    alone, _ = trained(task_of(data()))
    torch.testing.assert_close(trained(task_of(data()), strategy, world)[0], alone)


def test_weights_of_one_class_alone_teach_a_federation_nothing_of_the_other():
    inputs, targets = points()
    sampler = WeightedRandomSampler((targets == 0).double(), N)
    data = DataLoader(TensorDataset(inputs, targets), batch_size=4, sampler=sampler)
    strategy = dure.FedAvg(clients=2, batch_size=4, local_epochs=20)
    run = dure.train(task_of(data), strategy, stop=dure.Stop(rounds=5))
    assert run.model(inputs).argmax(1).eq(0).all()
    by_label = dure.FedAvg(clients=2, batch_size=4, partition="label-shards:1")
    with pytest.raises(ValueError, match="has a weight above 0"):
        dure.train(task_of(data), by_label, stop=dure.Stop(rounds=1))


@pytest.mark.parametrize(
    ("data", "strategy"),
    [
        (lambda: weighted(drop_last=True), dure.SingleWorker(batch_size=4)),
        (weighted, dure.FedAvg(clients=2, batch_size=4)),
    ],
)
def test_a_resumed_run_draws_by_weight_as_one_that_went_through(data, strategy, tmp_path):
    task = task_of(data())
    units = f"{strategy.traits.unit}s"
    straight = dure.train(task, strategy, stop=dure.Stop(**{units: 5}))
    dure.train(task, strategy, stop=dure.Stop(**{units: 2}), out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(**{units: 5}))
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_subset_sampler_keeps_tensors_keys_and_labels():
    inputs, targets = points()
    sampler = SubsetRandomSampler([1, 3, 8])
    part = dure.Task(
        model=linear,
        loss=F.cross_entropy,
        train=DataLoader(TensorDataset(inputs, targets), batch_size=2, sampler=sampler),
    ).train
    assert torch.equal(part.inputs, inputs[[1, 3, 8]])
    assert torch.equal(part.labels(), targets[[1, 3, 8]])
