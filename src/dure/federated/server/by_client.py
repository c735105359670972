"""What clients say of a model, one number a client, as the report and the history have it.

A tenth of the clients is at the worst tenth or worse: the 0.1 quantile, or 0.9 where lower is
better. The loss has none. Every client counts alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dure.protocol.messages import Measured
from dure.record.history import lower_is_better


def over_clients(measured: Measured) -> dict[str, float]:
    """Means and worst tenths (`_p10`) of every metric."""
    found: dict[str, float] = {}
    for name, values in measured.values.items():
        found |= _of(name, values)
    return found


def fit(measured: Measured, clients: int) -> Measured:
    """What was measured, without what cannot be right.

    Without clients that there are not, twice or in no order, nothing is left; without a number for
    each client a metric is left out.
    """
    known = all(0 <= client < clients for client in measured.clients)
    if not known or len(set(measured.clients)) != len(measured.clients):
        return Measured([], {})
    count = len(measured.clients)
    values = {name: each for name, each in measured.values.items() if len(each) == count}
    return Measured(measured.clients, values if count else {})


def facts(measured: Measured) -> dict[str, Any]:
    """Each client's, as JSON; empty where nothing was measured."""
    if not measured.values:
        return {}
    return {"measured_clients": list(measured.clients), "by_client": measured.values}


def _of(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean over clients, and the worst tenth: how fair a model is to them.

    A client that has nothing to count is no part of either.
    """
    of = torch.tensor(values, dtype=torch.float64)
    mean = {name: float(of.nanmean())}
    if name in ("client_loss", "personal_loss"):
        return mean
    return {**mean, f"{name}_p10": float(of.nanquantile(0.9 if lower_is_better(name) else 0.1))}
