"""Sparse embeddings as tables of the parameter server: what they equal, send and refuse."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.data.batches import Batches
from dure.errors import LossNotFiniteError, WorkerFailedError
from dure.parameter_server.first_rows import first_rows, key_of
from small import check_all, largest_difference, same_bits

SGD = partial(torch.optim.SGD, lr=0.3)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=0.02)
STOP = dure.Stop(rounds=2)
WORDS, DIM, LENGTH = 23, 4, 5


class Classifier(nn.Module):
    """The mean of some embeddings, and two layers: of 23 words, in float64."""

    def __init__(self, sparse: bool = True, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM, sparse=sparse, **options)
        self.body = nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, 3))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.body(self.words(ids).mean(dim=1))
        return result


class Bags(nn.Module):
    """Nothing but tables: two bags of the same words."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.left = nn.EmbeddingBag(WORDS, 3, mode="sum", sparse=sparse, padding_idx=0)
        self.right = nn.EmbeddingBag(WORDS, 3, mode="mean", sparse=sparse)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.left(ids) * self.right(input=ids)
        return result


def sentences(n: int, seed: int) -> dure.Examples:
    generator = torch.Generator().manual_seed(seed)
    # Squared, so that some words are frequent and some are never there.
    draws = torch.rand(n, LENGTH, generator=generator, dtype=torch.float64).square()
    ids = (draws * (WORDS - 2)).long()
    return dure.Examples(ids, ids.sum(dim=1) % 3)


def task(model: Any = Classifier, **changes: Any) -> dure.Task:
    fields: dict[str, Any] = {
        "model": model,
        "loss": F.cross_entropy,
        "train": sentences(41, 0),
        "test": sentences(20, 1),
        "optimizer": SGD,
        "name": "words",
    }
    return dure.Task(**{**fields, **changes})


def served(
    task: dure.Task,
    stop: dure.Stop = STOP,
    world: Any = None,
    out: Path | None = None,
    **fields: Any,
) -> dure.Run:
    strategy = dure.ParameterServer(**{"batch_size": 8, **fields})
    return dure.train(task, strategy, world or dure.Simulated(), stop, out=out)


def alone(task: dure.Task) -> dure.Run:
    return dure.train(task, dure.SingleWorker(8), stop=dure.Stop(epochs=2))


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD])
@pytest.mark.parametrize(
    "model",
    [Classifier, partial(Classifier, padding_idx=2), Bags],
    ids=["plain", "padding", "bags"],
)
@given(servers=st.integers(1, 4), workers=st.integers(1, 3))
@settings(max_examples=4, deadline=None)
def test_workers_walk_the_path_of_one_with_dense_embeddings(
    optimizer: Any, model: Any, servers: int, workers: int
) -> None:
    run = served(task(model, optimizer=optimizer), servers=servers, workers=workers)
    dense = alone(task(partial(model, sparse=False), optimizer=optimizer))
    assert largest_difference(run, dense) < 1e-12
    found = run.history.evaluations[-1].metrics
    assert found == pytest.approx(dense.history.evaluations[-1].metrics)


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_one_worker_does_the_same_at_any_staleness(staleness: int | None) -> None:
    dense = alone(task(partial(Classifier, sparse=False)))
    run = served(task(), servers=2, workers=1, staleness=staleness)
    assert largest_difference(run, dense) < 1e-12


class Adams(torch.optim.Optimizer):
    """Sparse Adam for what has sparse gradients, Adam for the rest: for one worker alone."""

    def __init__(self, parameters: Any, lr: float) -> None:
        table, *rest = list(parameters)
        super().__init__([table, *rest], {"lr": lr})
        self.both = (torch.optim.SparseAdam([table], lr=lr), torch.optim.Adam(rest, lr=lr))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.both:
            one.step()


def test_adam_is_sparse_adam_for_tables() -> None:
    model = Classifier()
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def factory() -> nn.Module:
        made = Classifier()
        made.load_state_dict(start)
        return made

    run = served(task(factory, optimizer=ADAM), servers=2, workers=2)
    optimizer = Adams(model.parameters(), 0.02)
    batches = Batches(41, 8, 0)
    examples = sentences(41, 0)
    for step in range(2 * batches.steps_per_epoch):
        for parameter in model.parameters():
            parameter.grad = None
        inputs, targets = examples.batch(batches.at(step))
        F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    theirs = run.model.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-12)


def test_real_processes_have_the_bits_of_the_simulation() -> None:
    own = task(partial(Classifier, padding_idx=1), optimizer=ADAGRAD)
    run = served(own, servers=2, workers=2, replicas=1, world=dure.Processes(5))
    twin = served(own, servers=2, workers=2, replicas=1)
    assert same_bits(run, twin)

    def workers(run: dure.Run) -> list[tuple[int, int]]:
        return [
            (line["bytes_sent"], line["bytes_received"])
            for line in run.summary["per_worker"]
            if line["name"].startswith("worker")
        ]

    assert workers(run) == workers(twin)


def test_lists_that_are_longer_than_the_table_reach_a_copy_and_a_checkpoint(
    tmp_path: Path,
) -> None:
    # Sixteen lists of 7,000 rows for each of four workers, of a table whose rows have 4 bytes.
    rows = 20_000
    ids = torch.randint(rows, (64, 5_000), generator=torch.Generator().manual_seed(0))
    own = task(
        partial(nn.EmbeddingBag, rows, 1, sparse=True, mode="sum"),
        loss=lambda outputs, targets: outputs.square().mean(),
        train=dure.Examples(ids, torch.zeros(64)),
        test=dure.Examples(ids[:1], torch.zeros(1)),
        optimizer=partial(torch.optim.SGD, lr=1e-6),
    )
    run = served(own, dure.Stop(epochs=1), dure.Processes(6), tmp_path, workers=4, batch_size=4)
    assert run.summary["ended"] == "epochs"


def test_bytes_are_those_of_the_rows_and_the_list_is_sent_once() -> None:
    own = task(train=sentences(24, 0), optimizer=SGD)
    run = served(own, servers=2, workers=1)
    inputs, _ = own.train.batch(torch.arange(24))
    weights = 8 * sum(p.numel() for p in Classifier().body.parameters())
    sent = received = 0
    known = set()
    for step in range(2 * 3):
        batch = Batches(24, 8, 0).at(step)
        rows = inputs[batch].unique()
        for start, stop in ((0, 12), (12, WORDS)):
            n = int(((start <= rows) & (rows < stop)).sum())
            # A pull names its rows; a push has the same, and says so in 8 bytes.
            own = (start, *rows[(start <= rows) & (rows < stop)].tolist())
            sent += (8 if own in known else 8 * n) + min(8, 8 * n) + 8 * DIM * n
            known.add(own)
            received += 8 * DIM * n
    (line,) = [one for one in run.summary["per_worker"] if one["name"] == "worker 0"]
    assert line["bytes_sent"] == sent + 6 * weights
    assert line["bytes_received"] == received + 6 * weights


def test_a_batch_that_comes_again_costs_eight_bytes_for_its_rows() -> None:
    own = task(train=sentences(8, 0))
    (line,) = [
        one
        for one in served(own, workers=1, stop=dure.Stop(rounds=5)).summary["per_worker"]
        if one["name"] == "worker 0"
    ]
    weights = 8 * sum(p.numel() for p in Classifier().body.parameters())
    n = len(sentences(8, 0).batch(torch.arange(8))[0].unique())
    assert line["bytes_sent"] == 5 * (weights + 8 * DIM * n) + 8 * n + 9 * 8


@pytest.mark.parametrize("staleness", [0, None])
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(
    staleness: int | None, tmp_path: Path
) -> None:
    own = task(optimizer=ADAM)
    strategy = dure.ParameterServer(servers=2, workers=3, batch_size=9, staleness=staleness)
    whole = dure.train(own, strategy, dure.Simulated(), dure.Stop(rounds=4))
    dure.train(own, strategy, dure.Simulated(), STOP, out=tmp_path / "run")
    again = dure.resume(tmp_path / "run", task=own, stop=dure.Stop(rounds=4))
    assert same_bits(whole, again)


class Drops(nn.Module):
    """Words are replaced by chance, and a norm has seen what the forward pass has."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM, sparse=sparse)
        self.norm = nn.BatchNorm1d(DIM)
        self.out = nn.Linear(DIM, 3)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            ids = torch.where(torch.rand(ids.shape) < 0.2, torch.randint_like(ids, WORDS), ids)
        # Twice, so that no first call says all.
        both = self.words(ids) + self.words(ids.flip(1).clamp(max=9))
        result: Tensor = self.out(self.norm(both.mean(dim=1)))
        return result


def test_draws_and_statistics_are_those_of_a_model_without_tables() -> None:
    dense = served(task(partial(Drops, sparse=False)), workers=2, batch_size=9)
    assert largest_difference(served(task(Drops), workers=2, batch_size=9), dense) < 1e-12


class Follows(nn.Module):
    """Which row is read next depends on what the first one is."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM, sparse=True)
        self.out = nn.Linear(DIM, 3)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        found = self.words(ids)
        following = found.argmax(dim=2) + 19
        result: Tensor = self.out((found + self.words(following)).mean(dim=1))
        return result


def test_ids_that_depend_on_weights_are_refused_by_name() -> None:
    with pytest.raises(WorkerFailedError, match=r"words\.weight was asked for row .* batch alone"):
        served(task(Follows), workers=1)


class Leaks(Classifier):
    """Reads its table as a whole as well."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.words.weight.mean()


def test_a_table_that_is_read_as_a_whole_gives_no_wrong_number() -> None:
    with pytest.raises(LossNotFiniteError):
        served(task(Leaks), workers=1)


class Tied(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, WORDS, bias=False).double()
        self.head.weight = self.words.weight


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * ids.unsqueeze(-1)


def scaled() -> nn.Module:
    model = Classifier()
    model.words = Scaled(WORDS, DIM, sparse=True, dtype=torch.float64)
    return model


def hooked() -> nn.Module:
    model = Classifier()
    model.words.register_forward_hook(lambda module, given, returned: returned)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (partial(Classifier, max_norm=1.0), r"words\.weight has max_norm=1\.0"),
        (partial(Classifier, scale_grad_by_freq=True), "scale_grad_by_freq=True"),
        (Tied, r"words\.weight is also head\.weight"),
        (scaled, "Scaled with its own forward"),
        (hooked, "an embedding with hooks"),
    ],
)
def test_embeddings_that_cannot_be_tables_are_refused_by_name(model: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_all(dure.ParameterServer(), task(model), None)


def test_optimizers_and_clipping_that_tables_cannot_have_are_refused_by_name() -> None:
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"momentum=0\.9, which the table words\.weight"):
        check_all(dure.ParameterServer(), task(optimizer=momentum), None)
    with pytest.raises(
        ValueError, match=r"words\.weight is sparse, and torch cannot compute norms"
    ):
        check_all(dure.ParameterServer(), task(clip_norm=1.0), None)
    with pytest.raises(ValueError, match=r"unfreeze names words\.weight, which is sparse"):
        check_all(dure.ParameterServer(), task(unfreeze={"words.*": 2}), None)


def test_ids_beyond_the_table_raise_as_torch_does() -> None:
    examples = dure.Examples(torch.full((8, LENGTH), WORDS), torch.zeros(8, dtype=torch.int64))
    with pytest.raises(WorkerFailedError, match=r"words\.weight has 23 rows"):
        served(task(train=examples), workers=1)


def vast(rows: int = 300_000) -> nn.Module:
    """A table without memory, whose ids are spread over all of it."""

    class Vast(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(
                rows, DIM, sparse=True, padding_idx=0, device="meta", dtype=torch.float64
            )

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids * (rows // WORDS))

    return Vast()


@pytest.mark.parametrize("world", [dure.Simulated(), None])
def test_a_table_without_memory_is_made_row_by_row(world: Any) -> None:
    own = task(vast, optimizer=ADAGRAD)
    strategy = dure.ParameterServer(servers=2, workers=2, batch_size=8)
    run = dure.train(own, strategy, world, STOP)
    weight = run.model.state_dict()["words.weight"]
    assert weight.device.type == "cpu"
    rows = torch.arange(1, WORDS) * (300_000 // WORDS)
    first = torch.from_numpy(first_rows(key_of(0, 0), numpy.arange(300_000), DIM)).double()
    changed = (weight != first).any(dim=1).nonzero().squeeze(1)
    # Of the padding zeros, and of the others those that were read.
    assert set(changed.tolist()) <= {0, *rows.tolist()}
    assert len(changed) > 15
    assert not weight[0].any()


def test_a_table_without_memory_that_nobody_could_write_is_refused() -> None:
    with pytest.raises(ValueError, match=r"words\.weight have .* GiB, and this machine has"):
        check_all(dure.ParameterServer(), task(partial(vast, 10**14)), None)
