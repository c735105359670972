"""Metrics that clients measure of a model: over all examples, and over clients.

    <metric>          over the examples of all clients: the clients' sums are added, and finished
                      once, as if a single client had measured all examples. A metric that is a
                      function returning a number has no sums: its mean over clients, weighted by
                      their examples
    <metric>_mean     the mean over clients, with equal weights
    <metric>_p10      the worst tenth: a tenth of the clients has this value or worse
    <metric>_p50      the median client
    <metric>_p90      the best tenth: a tenth of the clients has this value or better
    <metric>_worst    the worst client
    client_failures   clients that could not measure something

Quantiles are interpolated linearly between clients, and count from the worst: for a metric that
falls, the worst tenth is its 0.9 quantile. Newly arrived data (newest_, frozen_newest_) have only
the first of these metrics. A client without a finite number, or without anything to count, is left
out of all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from dure.contracts.metric import Metric
from dure.peer_text import one_line
from dure.protocol.messages import EvaluationResults
from dure.record.history import SPREAD, WHOSE, lower_is_better
from dure.tasks.sums import added

FAILURES = "client_failures"

LONGEST = 300
"""Longest stored reason of a client's failure, in characters."""


class ClientMeasurements:
    """Clients' measurements of the newest measured model, and all their failures.

    metrics: the metrics of the task.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = metrics
        self.measured = EvaluationResults([], {})
        self.failed: dict[int, Counter[str]] = {}
        """Client -> reason of a failed measurement -> count."""
        self._weighted: list[str] = []

    def take(self, measured: EvaluationResults) -> dict[str, float]:
        """Store the measurements and return their metrics by name.

        Names outside the task's metrics are ignored: such a name would become a column, a label, or
        a metric of the server itself.
        """
        # A server without data of its own does not know that its clients measure the accuracy.
        own = ("loss", "accuracy", *self.metrics)
        known = {whose + metric for whose in WHOSE for metric in own}
        names = [name for name in measured.values if name in known]
        measured = replace(measured, values={name: measured.values[name] for name in names})
        self.measured = measured
        for client, reason in measured.failures.items():
            self.failed.setdefault(client, Counter())[reason] += 1
        self._weighted = []
        found: dict[str, float] = {}
        for name in measured.values:
            found |= self._of(name)
        # From the first failure of a run on.
        if self.failed:
            found[FAILURES] = float(len(measured.failures))
        return found

    def _of(self, name: str) -> dict[str, float]:
        values = self.measured.values[name]
        found = {name: self._over_all(name)}
        if name.startswith(("newest_", "frozen_newest_")):
            return found
        return found | _spread(name, values)

    def _over_all(self, name: str) -> float:
        """Return the metric over the examples of all clients."""
        said = self.measured
        values = said.values[name]
        counts = said.examples.get(name, [1] * len(values))
        rows = [row for row in said.sums.get(name, []) if _finite(row)]
        if rows:
            try:
                return added(self.metrics.get(_bare(name)), rows, said.forms.get(name, ""))
            except ValueError:
                pass
        self._weighted.append(name)
        there = [place for place, value in enumerate(values) if math.isfinite(value)]
        examples = sum(counts[place] for place in there)
        if not examples:
            return math.nan
        return sum(values[place] * counts[place] for place in there) / examples

    def facts(self) -> dict[str, Any]:
        """Return each client's measurements, as JSON; empty if no client was asked to measure."""
        said = self.measured
        found: dict[str, Any] = {}
        if said.values:
            found |= {
                "measured_clients": list(said.clients),
                "by_client": said.values,
                "examples_by_client": said.examples,
                "means_by_examples": self._weighted,
            }
        if self.failed:
            found["not_measured"] = [
                [client, *reasons.most_common(1)[0]]
                for client, reasons in sorted(self.failed.items())
            ]
        return found

    def state(self) -> dict[str, Any]:
        """Return the state except the metrics, as a tree for checkpoints."""
        said = self.measured
        return {
            "clients": list(said.clients),
            "values": said.values,
            "examples": said.examples,
            "sums": said.sums,
            "forms": said.forms,
            "failures": said.failures,
            "failed": {client: dict(reasons) for client, reasons in self.failed.items()},
            "weighted": list(self._weighted),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`.

        Checkpoints of dure up to 0.1 have clients and values alone.
        """
        rest = dict(state)
        failed = rest.pop("failed", {})
        self._weighted = list(rest.pop("weighted", []))
        self.measured = EvaluationResults(**rest)
        self.failed = {client: Counter(reasons) for client, reasons in failed.items()}


def valid_measurements(measured: EvaluationResults, clients: int) -> EvaluationResults:
    """Return the measurements without invalid entries.

    Unknown or repeated clients, or an empty list of clients, invalidate all measurements. A metric
    without a number for each client is dropped, and so are sums of different lengths.
    """
    failures = {
        client: one_line(reason, LONGEST)
        for client, reason in measured.failures.items()
        if 0 <= client < clients
    }
    there = measured.clients
    known = all(0 <= client < clients for client in there)
    if not there or not known or len(set(there)) != len(there):
        return EvaluationResults([], {}, failures=failures)
    values = {name: each for name, each in measured.values.items() if len(each) == len(there)}
    examples = {name: measured.examples.get(name) for name in values}
    counts = {
        name: each
        for name, each in examples.items()
        if each is not None and len(each) == len(there) and all(one >= 0 for one in each)
    }
    sums = {
        name: rows
        for name, rows in measured.sums.items()
        if name in values
        and len(rows) == len(there)
        and len({len(row) for row in rows if row}) == 1
    }
    forms = {name: measured.forms.get(name, "") for name in sums}
    return EvaluationResults(there, values, counts, sums, forms, failures)


def _finite(row: Sequence[float]) -> bool:
    """Return whether there are sums, and all of them are finite."""
    return bool(row) and all(map(math.isfinite, row))


def _bare(name: str) -> str:
    """Return the metric's name without its prefix: client_accuracy -> accuracy."""
    whose = next((prefix for prefix in WHOSE if name.startswith(prefix)), "")
    return name.removeprefix(whose)


def client_metric_names(whose: Sequence[str], metrics: Sequence[str]) -> list[str]:
    """Return the names of all possible clients' metrics, such as client_accuracy_p10.

    whose: prefixes among "client", "personal", "newest", "frozen_newest". metrics: metric names,
    including "loss".
    """
    found = []
    for prefix in whose:
        for metric in metrics:
            name = f"{prefix}_{metric}"
            found.append(name)
            if prefix in ("client", "personal"):
                found += [name + suffix for suffix in SPREAD]
    return found


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the spread of the values over clients, a measure of fairness."""
    of = torch.tensor(values, dtype=torch.float64)
    of = of[of.isfinite()]
    if not len(of):
        return {name + suffix: math.nan for suffix in SPREAD}
    if lower_is_better(name):
        of = -of
    sign = -1.0 if lower_is_better(name) else 1.0
    tenth, half, best = (sign * float(of.quantile(share)) for share in (0.1, 0.5, 0.9))
    numbers = (sign * float(of.mean()), tenth, half, best, sign * float(of.min()))
    return dict(zip((name + suffix for suffix in SPREAD), numbers, strict=True))
