"""Conversion of a side's state to a tree for checkpoints, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dure.split.messages import SideState


def state_to_tree(own: SideState | None) -> dict[str, Any] | None:
    """Return the state as a tree; None stays None."""
    if own is None:
        return None
    return {
        "weights": [one.clone() for one in own.weights],
        "buffers": [one.clone() for one in own.buffers],
        "optimizer": [dict(one) for one in own.optimizer],
        "groups": None if own.groups is None else [dict(one) for one in own.groups],
        "shared": dict(own.shared),
    }


def state_from_tree(tree: Mapping[str, Any]) -> SideState:
    """Return the state of a tree, also of a tree from an earlier version of dure."""
    groups = tree.get("groups")
    return SideState(
        weights=tuple(one.clone() for one in tree["weights"]),
        buffers=tuple(one.clone() for one in tree["buffers"]),
        optimizer=tuple(dict(one) for one in tree["optimizer"]),
        groups=None if groups is None else tuple(dict(one) for one in groups),
        shared=dict(tree.get("shared", {})),
    )
