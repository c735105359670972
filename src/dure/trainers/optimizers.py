"""Settings of an optimizer, with which a new one of its class is made."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer with one group, as arguments of its class."""
    group = optimizer.param_groups[0]
    # Classes add defaults that they do not take.
    takes = inspect.signature(type(optimizer)).parameters
    names = optimizer.defaults.keys() & group.keys() & takes.keys()
    found = {name: group[name] for name in sorted(names)}
    # A schedule has changed the rate already.
    if "initial_lr" in group:
        found["lr"] = group["initial_lr"]
    return found
