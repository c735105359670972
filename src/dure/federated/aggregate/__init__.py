"""How updates become one.

An aggregator *folds* a stream in O(1) memory, or *collects* all updates first.

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

A new one is a file of its own here and a line below. One of a user's own is a subclass of `Folds`
or `Collects` in any file, and its text is `my_rules.py:Mine:4`, or `my_rules.py:Around:2/median`.
"""

from __future__ import annotations

from dure.federated.aggregate.aggregator import Aggregator as Aggregator
from dure.federated.aggregate.aggregator import Collects as Collects
from dure.federated.aggregate.aggregator import Folds as Folds
from dure.federated.aggregate.clipped import clip as clip
from dure.federated.aggregate.rows import Rows as Rows
from dure.references import is_reference
from dure.settings import filled, kind_of, listed, name_of

# In the order in which messages list them.
# isort: off
from dure.federated.aggregate.mean import Mean as Mean
from dure.federated.aggregate.median import Median as Median
from dure.federated.aggregate.trimmed_mean import TrimmedMean as TrimmedMean
from dure.federated.aggregate.krum import Krum as Krum
from dure.federated.aggregate.bulyan import Bulyan as Bulyan
from dure.federated.aggregate.geometric_median import GeometricMedian as GeometricMedian
from dure.federated.aggregate.geometric_median_of_means import (
    GeometricMedianOfMeans as GeometricMedianOfMeans,
)
from dure.federated.aggregate.rfa import RFA as RFA
from dure.federated.aggregate.centred_clipping import CentredClipping as CentredClipping
from dure.federated.aggregate.clipped import Clipped as Clipped
from dure.federated.aggregate.clipped import ClippedRows as ClippedRows
from dure.federated.aggregate.bucketing import Bucketing as Bucketing
from dure.federated.aggregate.mixing import Mixing as Mixing
# isort: on

AGGREGATORS: dict[str, type[Aggregator]] = listed(globals(), Aggregator)
"""Every aggregator by the name its text form begins with."""


def parse(text: str) -> Aggregator:
    """The aggregator that `text` names: "mean", "krum:4", "clipped:10/mean", "my_rules.py:Mine", …

    Raises ValueError for an unknown name, for too many values, for values that are not what they
    should be, and for a "/" too many or too few.
    """
    outer, slash, inner = _divided(text)
    kind, values = kind_of(outer, AGGREGATORS, "aggregator", Aggregator)
    if not kind.wraps:
        found = filled(kind, values, outer, "aggregator")
        if slash:
            raise ValueError(
                f"the aggregator {text!r}: {name_of(kind)} wraps no other; leave out "
                f"{'/' + inner!r}"
            )
        return found
    if not slash:
        raise ValueError(
            f"the aggregator {text!r} wraps another: write {text.strip()}/median, for example"
        )
    wrapped = parse(inner)
    return filled(
        kind.around(wrapped), values, text=outer, what="aggregator", given={"inner": wrapped}
    )


def _divided(text: str) -> tuple[str, str, str]:
    """The text before and after the "/" that divides an aggregator from the one that it wraps.

    A "/" in the path of a user's file divides nothing.
    """
    outer, slash, inner = text.partition("/")
    # A user's file may lie in a folder, so that its path has slashes: what divides is the first one
    # after the ":".
    if outer.partition(":")[0].strip() in AGGREGATORS or not is_reference(text):
        return outer, slash, inner
    file, _, rest = text.partition(":")
    own, slash, inner = rest.partition("/")
    return f"{file}:{own}", slash, inner
