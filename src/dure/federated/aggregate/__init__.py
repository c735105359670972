"""How updates become one. An aggregator *folds* a stream in O(1) memory, or *collects* all updates
first.

    mean                        weighted by n_k; folds                              McMahan
    median                      of each coordinate                                  Yin
    trimmed-mean:BETA           of each coordinate, BETA left out at each end       Yin
    krum:F:M                    the M updates nearest to their neighbours           Blanchard
    bulyan:F                    Krum again and again, then around the median        El Mhamdi
    geometric-median            of whole updates                                    Chen, Su, Xu
    geometric-median-of-means:K of the means of K random groups                     Chen, Su, Xu
    rfa:NU                      the geometric median by n_k, smoothed               Pillutla
    centred-clipping:TAU:ITERATIONS  steps of at most TAU from the round before     Karimireddy
    clipped:NORM/…              around another: updates no longer than NORM         Sun
    bucketing:S/…               around another: means of S random updates           Karimireddy
    mixing:F/…                  around another: means of nearest neighbours         Allouah

What they have in common is in `aggregator.py`, what they compute with in `rows.py`. As text,
`krum:4`, `clipped:10/mean`, `mixing:2/bucketing:2/krum:2`: `parse` reads what `str` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, make_dataclass
from typing import Any

from dure.federated.aggregate.aggregator import Aggregator, Collects, Folds
from dure.federated.aggregate.bucketing import Bucketing
from dure.federated.aggregate.bulyan import Bulyan
from dure.federated.aggregate.centred_clipping import CentredClipping
from dure.federated.aggregate.clipped import Clipped, ClippedRows, clip
from dure.federated.aggregate.geometric_median import GeometricMedian
from dure.federated.aggregate.geometric_median_of_means import GeometricMedianOfMeans
from dure.federated.aggregate.krum import Krum
from dure.federated.aggregate.mean import Mean
from dure.federated.aggregate.median import Median
from dure.federated.aggregate.mixing import Mixing
from dure.federated.aggregate.rfa import RFA
from dure.federated.aggregate.rows import Rows
from dure.federated.aggregate.trimmed_mean import TrimmedMean
from dure.settings import read

AGGREGATORS: dict[str, type[Aggregator]] = {
    aggregator.name: aggregator
    for aggregator in (
        Mean,
        Median,
        TrimmedMean,
        Krum,
        Bulyan,
        GeometricMedian,
        GeometricMedianOfMeans,
        RFA,
        CentredClipping,
        Clipped,
        Bucketing,
        Mixing,
    )
}
"""Every aggregator by the name its text form begins with. That of `Clipped` is `ClippedRows`'
too."""


def parse(text: str) -> Aggregator:
    """The aggregator that `text` names: "mean", "krum:4", "clipped:10/mean", …

    Raises ValueError for an unknown name, for too many values, for values that are not what they
    should be, and for a "/" too many or too few.
    """
    outer, slash, inner = text.partition("/")
    settings = read(outer, _SETTINGS, "aggregator")
    if isinstance(settings, Aggregator):
        if slash:
            raise ValueError(
                f"the aggregator {text!r}: {settings.name} wraps no other; leave out "
                f"{'/' + inner!r}"
            )
        return settings
    if not slash:
        raise ValueError(
            f"the aggregator {text!r} wraps another: write {text.strip()}/median, for example"
        )
    make: Callable[..., Aggregator] = (
        clip if settings.name == Clipped.name else AGGREGATORS[settings.name]
    )
    return make(**vars(settings), inner=parse(inner))


def _settings(aggregator: type[Aggregator]) -> type[Any]:
    """The dataclass of what is written before a "/": all fields but `inner`."""
    own = [
        (field.name, field.type, field.default)
        for field in fields(aggregator)
        if field.name != "inner"
    ]
    if len(own) == len(fields(aggregator)):
        return aggregator
    return make_dataclass(
        aggregator.__name__, own, namespace={"name": aggregator.name}, frozen=True
    )


_SETTINGS: dict[str, type[Any]] = {
    name: _settings(aggregator) for name, aggregator in AGGREGATORS.items()
}

__all__ = [
    "AGGREGATORS",
    "RFA",
    "Aggregator",
    "Bucketing",
    "Bulyan",
    "CentredClipping",
    "Clipped",
    "ClippedRows",
    "Collects",
    "Folds",
    "GeometricMedian",
    "GeometricMedianOfMeans",
    "Krum",
    "Mean",
    "Median",
    "Mixing",
    "Rows",
    "TrimmedMean",
    "clip",
    "parse",
]
