"""What of a run's config.json decides what is computed: it has to stay as it was to go on.

Limits, intervals, the label, how many ranks there are and how they reach one another may change
between one part of a run and the next; the rest is written into every checkpoint
(`dure.record.seal`) and compared.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_LEFT_OUT = {
    # How tables call it; where its first weights lie, which have a digest.
    "task": ("title", "weights_from"),
    # Where the class is found, which may be elsewhere on another machine.
    "strategy": ("from",),
    "world": ("from", "deadline", "backend", "elastic", "ranks", "threads"),
}
"""What may change of each part."""

_PLACE = re.compile(r"/(?:[^:/]+/)+[^:/]+:")
"""The file, with its folders, in the text of a rule of one's own: it may lie elsewhere by now."""


def _without_place(part: str, value: Any) -> Any:
    is_rule = part != "task" and isinstance(value, str)
    return _PLACE.sub("", value) if is_rule else value


_WEIGHTS = "task.weights"
"""The digest of those that a run begins with, where they are given."""

COUNTS = ("parameters", "train_examples", "test_examples", "validation_examples")
"""What the model and the data come to; they follow from the task, wherever that was found."""


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Each of them by its name: "seed", "strategy.batch_size", "task.options"."""
    found = {name: config[name] for name in ("seed", *COUNTS) if name in config}
    for part, left_out in _LEFT_OUT.items():
        written = config.get(part)
        if isinstance(written, Mapping):
            for name, value in written.items():
                # A list of devices is where threads compute; a text is what clients are like.
                moves = (part, name) == ("world", "devices") and isinstance(value, list)
                if name not in left_out and not moves:
                    found[f"{part}.{name}"] = _without_place(part, value)
    return found


def edited(
    before: Mapping[str, Any], now: Mapping[str, Any], named_again: Collection[str] = ()
) -> list[str]:
    """What differs, in words. named_again: names, or whole parts, that the user has given anew."""
    names = [
        name
        for name in dict.fromkeys([*before, *now])
        if not {name, name.partition(".")[0]} & set(named_again)
        and before.get(name) != now.get(name)
    ]
    return [_told(name, before, now) for name in names]


def other_run(
    before: Mapping[str, Any], now: Mapping[str, Any], moves: Collection[str] = ()
) -> list[str]:
    """What differs of a run that is about to go on, in words: where that would be another run.

    now: of the task and the strategy as they were found, by a dure that may have more fields than
    the one that wrote `before`. moves: the strategy's fields that may be others (`Strategy.moves`).
    """
    before = {_WEIGHTS: None, **before}
    now = {_WEIGHTS: None, **now}
    free = {f"strategy.{name}" for name in moves}
    names = [
        name
        for name in before
        if (name in ("seed", _WEIGHTS, *COUNTS) or name.startswith("strategy."))
        and name in now
        and name not in free
    ]
    return [_told(name, before, now) for name in names if before[name] != now[name]]


def _told(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name} is {now.get(name)!r} and was {before.get(name)!r}"
