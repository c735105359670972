"""The table of docs/features.md: the training options that each system supports or refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dure import catalog
from dure.contracts.strategy import Strategy
from dure.contracts.training_options import PARTS, Part
from dure.contracts.world import Kind
from dure.run.registry import strategy_class

PAGE = Path(__file__).parents[1] / "docs" / "features.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"

_IN: dict[Kind, str] = {"ranks": "processes", "threads": "threads", "clients": "simulated"}


def strategies() -> dict[str, Strategy]:
    """Every system by its name, as it is by default."""
    return {name: strategy_class(name)() for name in catalog.SYSTEMS}


def refusals(strategy: Strategy, part: Part) -> dict[Kind, str]:
    """Where it cannot do a part, and why."""
    found = {kind: strategy.cannot(part, kind) for kind in strategy.traits.kinds}
    return {kind: why for kind, why in found.items() if why is not None}


HABITS = ("schedule", "frozen", "validation", "early stopping", "resume")
"""Features of every system; `tests/test_features_run.py` runs each feature with each system."""

NO_SET = "over a network the metrics come from the clients' own data, without a validation set"
OTHER_BITS = "the run resumes, but two runs never have the same bits, resumed or not"


class _Notes:
    """Reasons, each with a number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def _cell(strategy: Strategy, part: Part, notes: _Notes) -> str:
    refused = refusals(strategy, part)
    if not refused:
        return "yes"
    numbers = ", ".join(sorted({str(notes.number(why)) for why in refused.values()}))
    left = [_IN[kind] for kind in strategy.traits.kinds if kind not in refused]
    return f"in {' and '.join(left)} ({numbers})" if left else f"no ({numbers})"


def _habit(strategy: Strategy, habit: str, notes: _Notes) -> str:
    if habit in ("validation", "early stopping") and strategy.traits.trains_at_server:
        return f"in simulated ({notes.number(NO_SET)})"
    if habit == "resume" and not strategy.run_traits.deterministic:
        return f"other bits ({notes.number(OTHER_BITS)})"
    return "yes"


def _accumulates(strategy: Strategy) -> str:
    fields = {field.name for field in dataclasses.fields(strategy)}
    if "accumulate" in fields:
        return "yes"
    return "`microbatches`" if "microbatches" in fields else "no"


def table() -> str:
    """The table and its notes, as the page has them."""
    notes = _Notes()
    heads = ["system", *(f"`{part}`" for part in PARTS), "`accumulate`", *HABITS]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for name, strategy in strategies().items():
        cells = [_cell(strategy, part, notes) for part in PARTS]
        habits = [_habit(strategy, habit, notes) for habit in HABITS]
        row = [f"`{name}`", *cells, _accumulates(strategy), *habits]
        lines.append("| " + " | ".join(row) + " |")
    told = [f"{number}. {text}" for number, text in enumerate(notes.texts, start=1)]
    return "\n".join([*lines, "", *told]) + "\n"


def rewritten(text: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
