"""A plan of one's own in a strategy: as Python, as text, in a run folder, on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dure
from dure.parallel.tensor import (
    Attributes,
    Column,
    Cut,
    Enter,
    Join,
    Leave,
    OnShards,
    Output,
    OwnDraws,
    Row,
    Tensors,
    Vocabulary,
)
from dure.parallel.tensor.written_plan import TensorPlan
from dure.run.registry import decode_strategy, encode, parse_strategy
from small import CLASSES, FEATURES, largest_difference, same_bits, small_task

TOLERANCE = 1e-12


class Own(nn.Module):
    """Two heads of a mixture, for which there is no ready plan."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.up = nn.Linear(FEATURES, 12, dtype=torch.float64)
        self.down = nn.Linear(12, 8, dtype=torch.float64)
        self.last = nn.Linear(8, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).unflatten(-1, (self.heads, -1)).tanh().flatten(-2)
        scores: Tensor = self.last(self.down(y).relu())
        return scores


PLAN = {"": Attributes("heads"), "up": Column(unit=3), "down": Row(unit=3)}
TEXT = "=Attributes('heads'); up=Column(unit=3); down=Row(unit=3)"


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        (lambda plan: dure.TensorParallel(8, plan=plan), 2),
        (lambda plan: dure.TensorParallel(8, plan=plan), 4),
        (lambda plan: dure.Parallel(dure.Mesh(data=2, tensor=2), 8, 2, plan=plan), 4),
        (
            lambda plan: dure.Parallel(
                dure.Mesh(pipeline=2, tensor=2), 8, 2, cut=("last",), plan=plan
            ),
            4,
        ),
    ],
    ids=["two", "four", "data and tensor", "pipeline and tensor"],
)
@pytest.mark.parametrize("plan", [PLAN, TEXT], ids=["python", "text"])
def test_a_model_divided_by_its_own_plan_walks_the_path_of_one_worker(
    strategy: Any, ranks: int, plan: Any
) -> None:
    task = small_task(model=Own)
    stop = dure.Stop(epochs=2)
    alone = dure.train(task, dure.SingleWorker(8), stop=stop, seed=3)
    many = dure.train(task, strategy(plan), dure.Processes(ranks), stop, seed=3)
    assert largest_difference(alone, many) < TOLERANCE
    assert many.summary["workers"] == ranks


def test_without_a_plan_the_model_is_refused_and_told_of_plans() -> None:
    with pytest.raises(
        ValueError, match=r"no built-in plan for a Own; write one.*strategies take it as plan="
    ):
        dure.train(small_task(model=Own), dure.TensorParallel(8), dure.Processes(2))


def test_a_run_with_a_plan_goes_on_from_its_folder(tmp_path: Path) -> None:
    task = small_task(model=Own)
    strategy = dure.TensorParallel(8, plan=PLAN)  # type: ignore[arg-type]
    world = dure.Processes(2)
    whole = dure.train(task, strategy, world, dure.Stop(steps=8), seed=3)
    dure.train(task, strategy, world, dure.Stop(steps=4), seed=3, out=tmp_path / "run")
    assert same_bits(whole, dure.resume(tmp_path / "run", task=task, stop=dure.Stop(steps=8)))


small = st.integers(1, 9)
dimension = st.none() | st.integers(0, 2)
kinds = st.one_of(
    st.builds(
        Column,
        st.one_of(small, st.tuples(small, small)),
        small,
        st.booleans(),
        st.booleans(),
        dimension,
        st.booleans(),
        st.booleans(),
    ),
    st.builds(Row, small, st.booleans(), dimension, st.booleans(), st.booleans()),
    st.builds(Vocabulary, dimension),
    st.builds(Output, st.booleans(), st.booleans(), dimension),
    st.builds(
        Attributes,
        st.sampled_from(["heads", "config.n_head"]),
        st.sampled_from(["width", "kv"]),
        units=st.none() | small,
    ),
    st.builds(Enter, dimension, st.sampled_from(["hidden_states", "x"])),
    st.builds(Leave, dimension),
    st.builds(Cut, st.integers(0, 2), st.sampled_from(["hidden_states", "x"]), st.none() | small),
    st.builds(Join, st.integers(0, 2)),
    st.builds(OnShards) | st.builds(OnShards, st.just("scale"), st.just("shift")),
    st.builds(Tensors, st.just("table"), dim=st.integers(-1, 2), blocks=small, unit=small),
    st.builds(OwnDraws),
)
patterns = st.from_regex(r"\A([a-z_0-9*]+(\.[a-z_0-9*]+){0,2})?\Z")


@given(st.dictionaries(patterns, st.lists(kinds, min_size=1, max_size=3), min_size=1, max_size=3))
def test_what_is_written_is_read(plan: dict[str, list[Any]]) -> None:
    own = TensorPlan(plan)
    assert own.plan == {pattern: tuple(several) for pattern, several in plan.items()}
    assert TensorPlan(str(own)) == own
    strategy = dure.Parallel(dure.Mesh(tensor=2), plan=own)
    assert decode_strategy(encode(strategy)) == strategy
    assert hash(strategy) == hash(decode_strategy(encode(strategy)))


def test_without_a_plan_the_text_says_so() -> None:
    assert str(TensorPlan()) == "ready"
    assert encode(dure.TensorParallel())["plan"] == "ready"
    plan = TensorPlan({"up": Column(blocks=[4, 8], unit=2), "down": Row()})  # type: ignore[arg-type]
    read = parse_strategy(
        "tensor-parallel,plan=up=Column(blocks=(4, 8),unit=2);down=Row,batch_size=7"
    )
    assert read == dure.TensorParallel(plan=plan, batch_size=7)
    assert dure.TensorParallel(plan=None).plan == TensorPlan()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("up", "is not PATTERN=KIND"),
        ("up=", "is not PATTERN=KIND"),
        ("up=Colum()", "no 'Colum', did you mean 'Column'"),
        ("up=Column(", "cannot be read"),
        ("up=Column(parts=3)", "parts"),
        ("up=Column(__import__('os'))", "is not valid"),
        ("up=Column(); up=Row()", "twice"),
        ({"up": "column"}, "not one of the available kinds"),
        ({"up": Column, "down": Row()}, "not one of the available kinds"),
        ({"up": ()}, "has no kind for 'up'"),
        ({"a=b": Column()}, "not a pattern"),
        ({" up": Column()}, "not a pattern"),
        ({1: Column()}, "not a pattern"),
        ({"up": Attributes("a;b")}, "remove ;"),
        ({}, "a dict from patterns of names"),
        (5, "a dict from patterns of names"),
        ([("up", Column())], "a dict from patterns of names"),
        ("", "is empty"),
        (" ; ", "is empty"),
        ("up=Column(unit='x')", r"unit='x'\): Expected `int`"),
        ("up=Column(unit=0)", r"unit=0\): Expected `int` >= 1"),
        ("up=Column(blocks='a')", "blocks='a'"),
        ("up=Column(sequence='x')", "sequence='x'"),
        ("=Attributes(3)", "names="),
        ("up=Enter(argument=3)", "argument=3"),
        ("up=Column(**{'unit': 2})", "one by one"),
        ("up=Column(*[1])", "one by one"),
    ],
)
def test_what_is_no_plan_is_refused(plan: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dure.TensorParallel(plan=plan)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (lambda: dure.TensorParallel(8, plan={"middle": Column()}), "'middle' matches no module"),  # type: ignore[arg-type]
        (lambda: dure.TensorParallel(8, plan={"last": Column()}), "last"),  # type: ignore[arg-type]
        (lambda: dure.TensorParallel(8, sequence=True, plan=PLAN), "leave sequence out"),  # type: ignore[arg-type]
        (lambda: dure.TensorParallel(8, plan="up=Column(); up*=Row()"), "has two entries for up"),  # type: ignore[arg-type]
        (
            lambda: dure.Parallel(dure.Mesh(data=2), 8, plan="middle=Row()"),
            "'middle' matches no module",
        ),  # type: ignore[arg-type]
    ],
    ids=["no such module", "no multiple", "sequence twice", "two things", "without use"],
)
def test_a_plan_that_does_not_fit_is_refused_before_any_work(strategy: Any, said: str) -> None:
    task = small_task(model=Own)
    chosen = strategy()
    world = dure.Processes(getattr(chosen, "mesh", dure.Mesh(tensor=2)).size)
    assert chosen.label.endswith("own plan")
    with pytest.raises(ValueError, match=said):
        dure.train(task, chosen, world)
