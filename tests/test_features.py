"""The table of features is what the systems say, and what they refuse they refuse before a run."""

from __future__ import annotations

from typing import Any

import pytest

import dure
from dure.contracts.strategy import Strategy
from dure.contracts.training_options import PARTS, Part
from dure.contracts.world import Kind
from dure.run.task_checks import check_can
from features import PAGE, refusals, rewritten, strategies
from small import small_task

ASKED: dict[Part, Any] = {
    "clip_norm": 1.0,
    "precision": "bf16",
    "ema": 0.9,
    "compile": True,
    "unfreeze": {"0.*": 1},
    "adapter": "lora:2:.*:16",
}
WORLDS: dict[Kind, dure.World] = {
    "ranks": dure.Processes(1),
    "threads": dure.Threads(1),
    "clients": dure.Simulated(),
}


def test_the_page_has_the_table_as_it_is() -> None:
    """If not: `python tests/features.py` writes it."""
    text = PAGE.read_text()
    assert rewritten(text) == text


@pytest.mark.parametrize("strategy", strategies().values(), ids=strategies())
def test_each_part_is_done_or_refused_by_name(strategy: Strategy) -> None:
    for part in PARTS:
        task = small_task(**{part: ASKED[part]})
        refused = refusals(strategy, part)
        for kind in strategy.traits.kinds:
            if kind not in refused:
                check_can(task, strategy, WORLDS[kind])
                continue
            with pytest.raises(ValueError, match=f"cannot train with {part}=") as told:
                check_can(task, strategy, WORLDS[kind])
            assert "\n" not in str(told.value)
            assert type(strategy).__name__ in str(told.value)


def test_what_is_refused_is_refused_before_a_folder_is_made(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"ZeRO cannot train with compile=True: .*; leave it out"):
        dure.train(
            small_task(compile=True), dure.ZeRO(2, 8), dure.Processes(2), out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
