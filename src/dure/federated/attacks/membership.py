"""Membership inference: was an example in the training data? Guessed by its loss.

    guess "member" where   loss(model, example) <= threshold

Models fit their training data. The result is the whole curve; no threshold is chosen:

    AUC      the probability that a member's loss is below a non-member's, ties half; 0.5 is chance
    TPR      the fraction of members found while a fraction FPR of non-members are accused

Against the global model, members are all examples of its training. Against a client's model (the
global model plus the client's update), members are the client's examples. A mean hides a few
certain members, so the TPR at a low FPR is reported as well.

Cost: a forward pass over members and non-members.

Sources: S. Yeom et al., "Privacy Risk in Machine Learning: Analyzing the Connection to
Overfitting", CSF 2018; N. Carlini et al., "Membership Inference Attacks From First Principles", S&P
2022 (TPR at low FPR); J. A. Hanley, B. J. McNeil, 1982 (AUC).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from scipy.stats import rankdata
from torch import Tensor

from dure.data.examples import Examples
from dure.federated.attacks.likeness import BOOTSTRAPS, Interval
from dure.federated.attacks.observation import AttackedModel, mean_loss
from dure.randomness.seeds import generator
from dure.tasks.modes import in_mode

MOST = 2000
"""Largest number of members, and of non-members, in an attack."""

BATCH = 500


class Membership(NamedTuple):
    """Results of membership inference.

    Args:
        auc: area under the curve, with its interval.
        found: FPR -> TPR.
        members: number of members.
        others: number of non-members.
    """

    auc: Interval
    found: dict[float, float]
    members: int
    others: int


def losses(
    model: AttackedModel, state: Mapping[str, Tensor], examples: Examples, indices: Tensor
) -> Tensor:
    """Return the loss of each example, float64, by the model in evaluation mode.

    NaN counts as infinity. Raises ValueError for outputs or targets in several tensors.
    """
    values: list[float] = []
    with torch.no_grad(), in_mode(model.module, training=False):
        for part in torch.split(indices, BATCH):
            inputs, targets = examples.batch(part)
            outputs = model.outputs(state, inputs)
            if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
                raise ValueError(
                    "members are told by the losses of single examples, whose outputs and targets "
                    "are in one tensor each; here they are in several"
                )
            values += [
                float(mean_loss(model.loss, outputs[i : i + 1], targets[i : i + 1]))
                for i in range(len(part))
            ]
    return torch.tensor(values, dtype=torch.float64).nan_to_num(nan=torch.inf, posinf=torch.inf)


def membership(members: Tensor, others: Tensor, seed: int = 0) -> Membership:
    """Return the success of membership inference from losses of shapes (m,) and (n,).

    Raises ValueError if either has no losses.
    """
    if not len(members) or not len(others):
        raise ValueError(
            "membership inference needs the losses of members and of non-members: give both"
        )
    draws = generator(seed, "membership")
    value = auc(members, others)
    samples = sorted(
        auc(_again(members, draws), _again(others, draws)) for _ in range(BOOTSTRAPS // 5)
    )
    low = samples[int(0.025 * len(samples))]
    high = samples[int(0.975 * len(samples))]
    rates = {rate: tpr_at(members, others, rate) for rate in (0.001, 0.01, 0.1)}
    # A rate below 1 / len(others) cannot be measured.
    rates = {rate: found for rate, found in rates.items() if rate * len(others) >= 1}
    return Membership(Interval(value, low, high), rates, len(members), len(others))


def auc(members: Tensor, others: Tensor) -> float:
    """Return the probability that a member's loss is below a non-member's; ties count half."""
    m = len(members)
    n = len(others)
    # Tied losses share the mean of their ranks.
    ranks = rankdata(torch.cat([members, others]).numpy())
    below = m * n + m * (m + 1) / 2 - float(ranks[:m].sum())
    return below / (m * n)


def tpr_at(members: Tensor, others: Tensor, rate: float) -> float:
    """Return the fraction of members found at a threshold with an FPR of at most `rate`."""
    allowed = int(rate * len(others))
    threshold = others.sort().values[allowed]
    # Strictly below: at the threshold itself another non-member would be accused.
    return float((members < threshold).double().mean())


def _again(values: Tensor, draws: torch.Generator) -> Tensor:
    """Return a sample of the same size, with replacement."""
    return values[torch.randint(len(values), (len(values),), generator=draws)]
