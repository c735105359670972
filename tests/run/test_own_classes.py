"""Strategies and worlds of a user's own that lie in no file, and those that are none."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import dure
from dure.contracts.strategy import Traits
from dure.errors import RunFolderError
from small import small_task

STOP = dure.Stop(rounds=2)
STOP_STEPS = dure.Stop(steps=2)


def local_strategy(**fields: Any) -> dure.FedAvg:
    """Of a class that no other process finds."""

    @dataclass(frozen=True)
    class Mine(dure.FedAvg):
        power: float = 0.5

        name: ClassVar[str] = "mine"

    return Mine(clients=3, batch_size=8, **fields)


def local_world() -> dure.Processes:
    @dataclass(frozen=True)
    class There(dure.Processes):
        name: ClassVar[str] = "there"

    return There(1)


def test_a_run_that_only_its_maker_can_resume_says_so_when_it_begins(tmp_path: Path) -> None:
    said: list[str] = []

    def note(event: dict[str, Any]) -> None:
        said.append("trained")

    with pytest.warns(
        UserWarning, match=r"strategy=\.\.\.\): the strategy 'mine' is defined where"
    ):
        dure.train(small_task(), local_strategy(), stop=STOP, out=tmp_path / "part")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="strategy="):
            dure.train(
                small_task(), local_strategy(), stop=STOP, out=tmp_path / "x", on_progress=note
            )
    assert not said
    more = dure.Stop(rounds=4)
    with pytest.raises(RunFolderError, match=r"the strategy of .* was created in Python: give it"):
        dure.resume(tmp_path / "part", task=small_task(), stop=more)
    resumed = dure.resume(
        tmp_path / "part", task=small_task(), strategy=local_strategy(), stop=more
    )
    whole = dure.train(small_task(), local_strategy(), stop=more)
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(RunFolderError, match="was trained by mine, not fed-avg"):
        dure.resume(tmp_path / "part", task=small_task(), strategy=dure.FedAvg())


def test_a_world_in_no_file_is_given_again(tmp_path: Path) -> None:
    strategy = dure.SingleWorker(8)
    with pytest.warns(UserWarning, match=r"world=\.\.\."):
        dure.train(small_task(), strategy, local_world(), dure.Stop(steps=2), out=tmp_path)
    with pytest.raises(RunFolderError, match=r"the world of .* was created in Python"):
        dure.resume(tmp_path, task=small_task())
    run = dure.resume(tmp_path, task=small_task(), world=local_world(), stop=dure.Stop(steps=4))
    assert run.summary["steps"] == 4


def test_a_field_that_cannot_be_written_is_told_too(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Weighted(dure.SingleWorker):
        weights: Any = None

        name: ClassVar[str] = "weighted"

    with pytest.warns(UserWarning, match="a field that cannot be written"):
        dure.train(small_task(), Weighted(8, weights=object()), stop=STOP_STEPS, out=tmp_path)


class Duck:
    """Looks like a strategy."""

    name = "duck"
    kind = "ranks"
    unit = "step"


def test_what_lacks_the_base_is_refused_in_one_line() -> None:
    @dataclass(frozen=True)
    class Nameless(dure.Strategy):
        traits: ClassVar[Traits] = Traits(kind="ranks", unit="step")

    class Plain(dure.Strategy):
        name, traits = "plain", Traits(kind="ranks", unit="step")

    for strategy, said in (
        (Duck(), r"Duck is not a dure\.Strategy: derive its class from dure\.Strategy"),
        (Plain(), r"Plain is not a dure\.Strategy"),
        (Nameless(), r"Nameless does not define name"),
    ):
        with pytest.raises(ValueError, match=said):
            dure.train(small_task(), strategy, stop=STOP_STEPS)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=said):
            dure.compare(small_task(), [strategy], stop=STOP_STEPS)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"Duck is not a dure\.World"):
        dure.train(small_task(), dure.SingleWorker(), Duck(), STOP_STEPS)  # type: ignore[arg-type]


def test_a_trait_beside_the_record_is_refused_since_it_would_have_no_effect() -> None:
    with pytest.raises(TypeError, match="Own defines trains_with: give it in traits"):

        class Own(dure.SingleWorker):
            trains_with = frozenset({"clip_norm"})

    with pytest.raises(TypeError, match="Measured defines deterministic: give it in run_traits"):

        class Measured(dure.SingleWorker):
            @property
            def deterministic(self) -> bool:
                return False


def test_a_setting_may_have_the_name_of_a_trait() -> None:
    @dataclass(frozen=True)
    class Sampled(dure.SingleWorker):
        samples: int = 3

    assert Sampled(samples=5).samples == 5
