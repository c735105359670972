"""What a side has learned as a tree for checkpoints, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dure.split.messages import Own


def written(own: Own | None) -> dict[str, Any] | None:
    """As a tree; None stays None."""
    if own is None:
        return None
    return {
        "weights": [one.clone() for one in own.weights],
        "buffers": [one.clone() for one in own.buffers],
        "optimizer": [dict(one) for one in own.optimizer],
        "groups": None if own.groups is None else [dict(one) for one in own.groups],
        "shared": dict(own.shared),
    }


def read(tree: Mapping[str, Any]) -> Own:
    """The inverse of `written`, also of a tree that an earlier version of dure has written."""
    groups = tree.get("groups")
    return Own(
        weights=tuple(one.clone() for one in tree["weights"]),
        buffers=tuple(one.clone() for one in tree["buffers"]),
        optimizer=tuple(dict(one) for one in tree["optimizer"]),
        groups=None if groups is None else tuple(dict(one) for one in groups),
        shared=dict(tree.get("shared", {})),
    )
