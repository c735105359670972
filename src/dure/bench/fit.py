"""The cost model against the measurements: fitted to two algorithms, compared with all.

`calibrate` fits a link (`dure.collectives.cost`) for each number of ranks to the times of the
calibrators over gloo up to 64 MiB: an algorithm of few messages in sequence, and an algorithm of
many simultaneous messages, which separates the four numbers. The link predicts all algorithms. In
JSON:

    calibrators   algorithms used for the fit
    algorithms    all predicted algorithms
    links         for each number of ranks: alpha, beta, gamma, overhead, shared,
                  ranks, cores, backend, and
      first, crossovers     the best algorithm at the smallest size, and the bytes from which
                            another algorithm is the best
      series                for each algorithm: bytes, measured and predicted seconds
      median_error, within  of all predictions: median relative error, share within 20 %
      unseen_error, unseen_within   the same without the calibrators
      regret                median slowdown of the recommended algorithm relative to the fastest
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from dure.bench.plan import MIB
from dure.bench.result import BenchResult
from dure.collectives import cost

CALIBRATORS = ("tree", "one-shot")
LARGEST = 64 * MIB
"""Largest size in bytes of fitted and compared measurements."""

CLOSE = 0.2
"""Relative error up to which a prediction counts as close."""

FILE = "all-reduce.json"
"""Name of the file with the links of this machine, in its folder."""


def calibrate(result: BenchResult, folder: Path) -> cost.Calibration:
    """Fit and predict, put both into `result`, and add the links to those in `folder`."""
    # Links of other numbers of ranks, from earlier benchmarks, stay.
    kept = cost.Calibration.load(folder / FILE)
    links = []
    for ranks in sorted({cell["ranks"] for cell in result.cells}):
        measured = samples(result, ranks)
        seen = [sample for sample in measured if sample.algorithm.replace("_", "-") in CALIBRATORS]
        if not seen:
            continue
        # Links are stored by backend, ranks and cores: on another machine the numbers differ.
        cores = result.machine["cores"]
        link = cost.fit(seen, shared=True)
        kept.links["gloo", ranks, cores] = link
        links.append({"backend": "gloo", "cores": cores, **_compared(measured, ranks, link)})
    if links:
        kept.save(folder / FILE)
    predicted = set()
    for compared in links:
        predicted |= {series["algorithm"] for series in compared["series"]}
    algorithms = [name for name in cost.ALGORITHMS if name in predicted]
    result.calibration = {
        "calibrators": list(CALIBRATORS),
        "algorithms": algorithms,
        "links": links,
    }
    return kept


def samples(result: BenchResult, ranks: int) -> list[cost.MeasuredAllReduce]:
    """Return the times of the algorithms over gloo on so many ranks, up to 64 MiB."""
    found = []
    for cell in result.cells:
        algorithm = cell["contender"].replace("-", "_")
        known = algorithm in cost.ALGORITHMS and not cell.get("skipped")
        if known and cell["ranks"] == ranks and cell["bytes"] <= LARGEST:
            found.append(cost.MeasuredAllReduce(algorithm, cell["bytes"], ranks, cell["seconds"]))
    return found


def _compared(
    measured: list[cost.MeasuredAllReduce], ranks: int, link: cost.LinkCost
) -> dict[str, Any]:
    """Return the link, and its predictions next to the measurements."""
    series: dict[str, dict[str, list[float]]] = {}
    errors = []
    unseen = []
    for sample in measured:
        predicted = cost.predict(sample.algorithm, sample.nbytes, ranks, link)
        one = series.setdefault(sample.algorithm, {"bytes": [], "measured": [], "predicted": []})
        one["bytes"].append(sample.nbytes)
        one["measured"].append(sample.seconds)
        one["predicted"].append(predicted)
        error = abs(predicted / sample.seconds - 1)
        errors.append(error)
        # The error on algorithms outside the fit is the relevant error.
        if sample.algorithm.replace("_", "-") not in CALIBRATORS:
            unseen.append(error)
    low = min(sample.nbytes for sample in measured)
    high = max(sample.nbytes for sample in measured)
    rivals = [name for name in cost.CANDIDATES if name in series]
    return {
        "ranks": ranks,
        **asdict(link),
        "first": cost.best(low, ranks, link, rivals),
        "crossovers": [
            {"bytes": cross.nbytes, "from": cross.before, "to": cross.after}
            for cross in cost.crossovers(ranks, link, rivals, low=low, high=high)
        ],
        "series": [{"algorithm": name, **values} for name, values in series.items()],
        "median_error": median(errors),
        "within": _share(errors),
        "regret": _regret(measured, ranks, link, rivals),
        "unseen_error": median(unseen) if unseen else None,
        "unseen_within": _share(unseen) if unseen else None,
    }


def _regret(
    measured: list[cost.MeasuredAllReduce], ranks: int, link: cost.LinkCost, rivals: list[str]
) -> float:
    """Return the cost of the model's advice: the median of seconds / fewest seconds - 1."""
    found = []
    for nbytes in sorted({sample.nbytes for sample in measured}):
        times = {
            s.algorithm: s.seconds for s in measured if s.nbytes == nbytes and s.algorithm in rivals
        }
        if times:  # at the largest sizes all of them may have been left out
            advised = cost.best(nbytes, ranks, link, list(times))
            found.append(times[advised] / min(times.values()) - 1)
    return median(found)


def _share(errors: list[float]) -> float:
    return sum(error <= CLOSE for error in errors) / len(errors)
