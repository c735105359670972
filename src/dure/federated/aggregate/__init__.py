"""Aggregation rules: combine the updates of a round into one update.

A rule *folds* a stream of updates in O(1) memory, or *collects* all updates first.

    mean                        weighted by n_k; folds                              McMahan
    median                      of each coordinate                                  Yin
    trimmed-mean:BETA           of each coordinate, BETA left out at each end       Yin
    krum:F:M                    mean of the M updates with the best Krum score      Blanchard
    bulyan:F                    repeated Krum, then around the median               El Mhamdi
    geometric-median            of whole updates                                    Chen, Su, Xu
    geometric-median-of-means:K of the means of K random groups                     Chen, Su, Xu
    rfa:NU                      the geometric median by n_k, smoothed               Pillutla
    centred-clipping:TAU:ITERATIONS  steps of at most TAU from the last result      Karimireddy
    clipped:NORM/…              wraps a rule: updates clipped to NORM               Sun
    bucketing:S/…               wraps a rule: means of S random updates             Karimireddy
    mixing:F/…                  wraps a rule: means of nearest neighbours           Allouah

`aggregator.py` has the interface of all rules, `rows.py` the matrix operations that they share.
`parse` reads the text form that `str` writes: `krum:4`, `clipped:10/mean`,
`mixing:2/bucketing:2/krum:2`.

A new rule is a file in this folder and a line below. A user-defined rule is a subclass of `Folds`
or `Collects` in any file; its text is `my_rules.py:Mine:4`, or `my_rules.py:Around:2/median`.
"""

from __future__ import annotations

from dure.federated.aggregate.aggregator import Aggregator as Aggregator
from dure.federated.aggregate.aggregator import Collects as Collects
from dure.federated.aggregate.aggregator import Folds as Folds
from dure.federated.aggregate.clipped import clip as clip
from dure.federated.aggregate.rows import UpdateRows as UpdateRows
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
from dure.federated.aggregate.clipped import ClippedUpdates as ClippedUpdates
from dure.federated.aggregate.clipped import ClippedRows as ClippedRows
from dure.federated.aggregate.bucketing import Bucketing as Bucketing
from dure.federated.aggregate.mixing import Mixing as Mixing
# isort: on

AGGREGATORS: dict[str, type[Aggregator]] = listed(globals(), Aggregator)
"""Built-in aggregators by the name with which their text form begins."""


def parse(text: str) -> Aggregator:
    """Return the aggregator that `text` names: "krum:4", "clipped:10/mean", "my_rules.py:Mine", ….

    Raises ValueError for an unknown name, too many values, invalid values, and a surplus or missing
    "/".
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
    """Return the text before and after the "/" between an aggregator and its inner aggregator.

    A "/" in the path of a user's file is not a separator.
    """
    outer, slash, inner = text.partition("/")
    # The path of a user's file may contain slashes: the separator is the first slash after the ":".
    if outer.partition(":")[0].strip() in AGGREGATORS or not is_reference(text):
        return outer, slash, inner
    file, _, rest = text.partition(":")
    own, slash, inner = rest.partition("/")
    return f"{file}:{own}", slash, inner
