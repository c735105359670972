"""Attacks that guess labels from values at the cut, measured as AUC.

    norm          ‖g_i‖: rare labels have long gradients                       no prior knowledge
    direction     cos(g_i, g_+), g_+ the gradient of a known example           one known example
    clusters      of activations or gradients: k-means from a known example    one known example of
                  of each class; the margin by which that centre is nearer     each class

AUC is the probability that an example of the class has a higher score than an example of another
class: 1 is a perfect guess, 0.5 is chance. Values below 0.5 are not reflected, as in the paper.
With two classes the AUC is that of the label 1; with more, the mean over the classes of each
against the rest. The norm has the same score for all classes, so its mean says little. Known
examples are not counted.

Sources: O. Li et al., "Label Leakage and Protection in Two-party Split Learning", ICLR 2022; J. Liu
and X. Lyu, "Clustering Label Inference Attack against Practical Split Learning", 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_ITERATIONS = 20
"""Maximum iterations of k-means."""


def auc(scores: Tensor, positive: Tensor) -> float:
    """Return the area under the ROC curve; NaN if all examples are positive, or none.

    scores: of shape (n,). positive: of shape (n,), true or false.
    """
    positive = positive.bool()
    ones = int(positive.sum())
    zeros = len(positive) - ones
    if not ones or not zeros:
        return math.nan
    # Equal scores get the mean of their ranks.
    _, places, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts - 1) / 2)[places]
    return (float(ranks[positive].sum()) - ones * (ones + 1) / 2) / (ones * zeros)


def norm_auc(gradients: Tensor, labels: Tensor, classes: int) -> float:
    """Return the AUC of the norm attack.

    gradients: of shape (n, d). labels: class indices of shape (n,).
    """
    norms = gradients.norm(dim=1)
    return _mean(lambda one: auc(norms, labels == one), classes)


def direction_auc(gradients: Tensor, labels: Tensor, classes: int) -> float:
    """Return the AUC of the direction attack, with the first example of the class known.

    Arguments as for `norm_auc`.
    """
    unit = F.normalize(gradients.double(), dim=1)

    def of_class(one: int) -> float:
        positive = labels == one
        if not bool(positive.any()):
            return math.nan
        known = int(positive.int().argmax())
        others = torch.arange(len(labels), device=labels.device) != known
        return auc((unit @ unit[known])[others], positive[others])

    return _mean(of_class, classes)


def clusters_auc(values: Tensor, labels: Tensor, classes: int) -> float:
    """Return the AUC of the cluster attack, with the first example of each class known.

    Arguments as for `norm_auc`. Classes without examples have no cluster.
    """
    there = [one for one in range(classes) if bool((labels == one).any())]
    if len(there) < 2:
        return math.nan
    known = torch.stack([(labels == one).int().argmax() for one in there])
    others = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    others[known] = False
    distances = torch.cdist(values.double(), k_means(values.double(), known))

    def of_class(one: int) -> float:
        if one not in there:
            return math.nan
        place = there.index(one)
        rest = torch.cat([distances[:, :place], distances[:, place + 1 :]], dim=1)
        scores = rest.min(dim=1).values - distances[:, place]
        return auc(scores[others], (labels == one)[others])

    return _mean(of_class, classes)


def k_means(values: Tensor, known: Tensor) -> Tensor:
    """Return the centres of clusters, of shape (k, d).

    values: of shape (n, d). known: indices of the k values at which the centres start.
    """
    centres = values[known]
    nearest = torch.cdist(values, centres).argmin(dim=1)
    for _ in range(_ITERATIONS):
        weights = F.one_hot(nearest, len(known)).to(values.dtype)
        counts = weights.sum(dim=0).unsqueeze(1)
        centres = torch.where(counts > 0, weights.T @ values / counts.clamp(min=1), centres)
        moved = torch.cdist(values, centres).argmin(dim=1)
        if torch.equal(moved, nearest):
            break
        nearest = moved
    return centres


def _mean(of_class: Callable[[int], float], classes: int) -> float:
    """Return the AUC of the label 1 of two classes, or the mean over the classes with an AUC."""
    if classes <= 2:
        return of_class(1)
    return mean([of_class(one) for one in range(classes)])


def mean(found: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    numbers = [one for one in found if not math.isnan(one)]
    return sum(numbers) / len(numbers) if numbers else math.nan
