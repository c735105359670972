"""Settings of config.json that determine the computation, and must not change when a run resumes.

Limits, intervals, the label, the number of ranks and their transport may change between parts of a
run; the other settings are written into every checkpoint (`dure.record.seal`) and compared.

config.json also has checksums of its own, `checksums`: of these settings, and of its whole content.
They are CRC-32, against accidents.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from dure.record.seal import checksum

SUMS = "checksums"
"""Entry of config.json with its checksums."""

LINEAGE = "model.lineage.json"
"""File beside the model with the signed lineage of a served run."""

_LEFT_OUT = {
    # The name in tables; the path of initial weights, which have a digest.
    "task": ("title", "weights_from"),
    # The reference of the class, which may differ on another machine.
    "strategy": ("from",),
    "world": ("from", "deadline", "backend", "elastic", "ranks", "threads"),
}
"""Entries of each part that may change."""

_PLACE = re.compile(r"/(?:[^:/]+/)+[^:/]+:")
"""Path of a file in the text of a user's own rule, which may differ on another machine."""


def _without_place(part: str, value: Any) -> Any:
    is_rule = part != "task" and isinstance(value, str)
    return _PLACE.sub("", value) if is_rule else value


_WEIGHTS = "task.weights"
"""Digest of the initial weights, if the user gave them."""

COUNTS = ("parameters", "train_examples", "test_examples", "validation_examples")
"""Sizes of the model and the data; they follow from the task, wherever it was loaded."""


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by name: "seed", "strategy.batch_size", "task.options"."""
    found = {name: config[name] for name in ("seed", *COUNTS) if name in config}
    for part, left_out in _LEFT_OUT.items():
        written = config.get(part)
        if isinstance(written, Mapping):
            for name, value in written.items():
                # A list of devices is a choice of hardware; a text describes simulated clients.
                moves = (part, name) == ("world", "devices") and isinstance(value, list | tuple)
                if name not in left_out and not moves:
                    found[f"{part}.{name}"] = _without_place(part, value)
    return found


def with_sums(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json with its checksums."""
    plain = without_sums(config)
    return {**plain, SUMS: _sums(plain)}


def without_sums(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json without its checksums."""
    return {name: value for name, value in config.items() if name != SUMS}


def changed(config: Mapping[str, Any]) -> str | None:
    """Return which part of config.json has changed since it was written.

    "settings", "rest", or None without changes. None also for a config.json without checksums, from
    an older dure.
    """
    if SUMS not in config:
        return None
    written = config[SUMS]
    found = _sums(without_sums(config))
    if written == found:
        return None
    same = isinstance(written, Mapping) and written.get("settings") == found["settings"]
    return "rest" if same else "settings"


def alteration_note(config: Mapping[str, Any], signed: Any = None) -> str | None:
    """Return why config.json cannot be trusted, in words; None if no change is known.

    signed: SHA-256 of its content in the lineage beside the model; None without a lineage.
    """
    if signed is not None and signed != config_digest(config):
        return (
            "config.json differs from the signed version: its settings may be wrong (see dure "
            "verify)"
        )
    if changed(config) is not None:
        return "config.json has changed since dure wrote it: its settings may be wrong"
    return None


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of config.json's content in canonical form, without its checksums."""
    return hashlib.sha256(canonical_json(without_sums(config))).hexdigest()


def canonical_json(value: object) -> bytes:
    """Return JSON in canonical form: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _sums(config: Mapping[str, Any]) -> dict[str, str]:
    # As it is read again: a tuple becomes a list, and `settings` distinguishes such types.
    read: dict[str, Any] = json.loads(canonical_json(config))
    return {
        "settings": checksum(canonical_json(settings(read))),
        "all": checksum(canonical_json(read)),
    }


def edited(
    before: Mapping[str, Any], now: Mapping[str, Any], named_again: Collection[str] = ()
) -> list[str]:
    """Return the differences, in words. named_again: names or parts given again by the user."""
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
    """Return the differences, in words, that would make a resumed run another run.

    now: settings of the task and the strategy as loaded, by a dure that may have more fields than
    the writer of `before`. moves: fields of the strategy that may change (`Strategy.moves`).
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
    return f"{name} is {now.get(name)!r} but was {before.get(name)!r}"
