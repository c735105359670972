"""What of a run's config.json decides what is computed: it has to stay as it was to go on.

Limits, intervals, the label, how many ranks there are and how they reach one another may change
between one part of a run and the next; the rest is written into every checkpoint
(`dure.record.seal`) and compared.

config.json also has checksums of its own, `checksums`: one of these settings, and one of all that
it says. They are CRC-32, against accidents.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from dure.record.seal import checksum

SUMS = "checksums"
"""The entry of config.json that has its checksums."""

LINEAGE = "model.lineage.json"
"""The file beside the model in which the server of a run has signed what it was."""

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
                moves = (part, name) == ("world", "devices") and isinstance(value, list | tuple)
                if name not in left_out and not moves:
                    found[f"{part}.{name}"] = _without_place(part, value)
    return found


def with_sums(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json with its checksums."""
    plain = without_sums(config)
    return {**plain, SUMS: _sums(plain)}


def without_sums(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says, without its checksums."""
    return {name: value for name, value in config.items() if name != SUMS}


def changed(config: Mapping[str, Any]) -> str | None:
    """Return what of config.json is not as dure wrote it: "settings", "rest", or None.

    None also for one without checksums, as an older dure wrote it.
    """
    if SUMS not in config:
        return None
    written = config[SUMS]
    found = _sums(without_sums(config))
    if written == found:
        return None
    same = isinstance(written, Mapping) and written.get("settings") == found["settings"]
    return "rest" if same else "settings"


def altered(config: Mapping[str, Any], signed: Any = None) -> str | None:
    """Return why config.json is not to be believed as it stands, in words; None where it may be.

    signed: the SHA-256 of what it said, by the lineage beside the model; None without one.
    """
    if signed is not None and signed != config_digest(config):
        return "config.json is not what was signed: its settings may be false (see dure verify)"
    if changed(config) is not None:
        return "config.json has changed since dure wrote it: its settings may be false"
    return None


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what config.json says, however it is written; without its checksums."""
    return hashlib.sha256(spelled(without_sums(config))).hexdigest()


def spelled(value: object) -> bytes:
    """JSON in one spelling."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _sums(config: Mapping[str, Any]) -> dict[str, str]:
    # As it is read again: a tuple is a list then, and settings are told apart by such kinds.
    read: dict[str, Any] = json.loads(spelled(config))
    return {"settings": checksum(spelled(settings(read))), "all": checksum(spelled(read))}


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
