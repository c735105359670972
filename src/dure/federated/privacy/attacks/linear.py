"""An example from the gradient of a first linear layer, in closed form.

For y = W x + b of one example

    dL/dW_ij = (dL/dy_i) x_j        dL/db_i = dL/dy_i        so        x_j = (dL/dW_ij) / (dL/db_i)

for every unit i whose gradient is not 0: exact, without any optimisation. Of several examples each
unit gives their mean, weighed by their own gradients at that unit. A unit that one example alone
has set off (ReLU) gives that example. Units are grouped by what they give: the largest groups are
returned, and of equal ones those with the largest gradient.

Cost: O(units · inputs).

Sources: L. T. Phong et al., "Privacy-Preserving Deep Learning via Additively Homomorphic
Encryption", 2018; J. Geiping et al., "Inverting Gradients", NeurIPS 2020, proposition 3.1;
F. Boenisch et al., "When the Curious Abandon Honesty", 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dure.federated.privacy.attacks.seen import Model, Seen

ALIKE = 1e-2
"""Relative distance below which two units give the same example."""

UNITS = 1024
"""Units that are looked at, those with the largest gradients."""


def from_first_layer(model: Model, seen: Seen, like: Tensor) -> Tensor:
    """As many inputs as the update was made of, of the shape of `like[0]`, likeliest first.

    like: inputs of the same kind, of which the layer is found. Fewer are returned where fewer units
    have a gradient. Raises ValueError where the model does not begin with a linear layer that has a
    bias.
    """
    within = _first_layer(model, seen, like)
    gradient = seen.gradient
    weight = gradient[f"{within}weight"].double()
    bias = gradient[f"{within}bias"].double()
    top = bias.abs().argsort(descending=True)[:UNITS]
    top = top[bias[top].abs() > 1e-12 * bias.abs().max().clamp(min=1e-30)]
    rows = weight[top] / bias[top, None]
    chosen = _groups(rows, seen.examples)
    return rows[chosen].to(like.dtype).reshape(len(chosen), *like.shape[1:])


def _groups(rows: Tensor, most: int) -> list[int]:
    """The first rows of the largest groups of alike ones; groups of equal size by their order."""
    if not len(rows):
        return []
    distances = torch.cdist(rows, rows) / rows.norm(dim=1).clamp(min=1e-12)
    alike = distances < ALIKE
    left = torch.ones(len(rows), dtype=torch.bool)
    chosen: list[int] = []
    while bool(left.any()) and len(chosen) < most:
        # argmax of equal counts is the first one, which has the largest gradient.
        sizes = (alike & left).sum(dim=1) * left
        best = int((sizes == sizes.max()).nonzero()[0])
        chosen.append(best)
        left &= ~alike[best]
        left[best] = False
    return chosen


def _first_layer(model: Model, seen: Seen, like: Tensor) -> str:
    """What the names of its parameters begin with."""
    caught: list[tuple[str, Tensor]] = []
    hooks = []
    for name, module in model.module.named_modules():
        if type(module) is nn.Linear:
            hooks.append(
                module.register_forward_pre_hook(
                    lambda module, given, name=name: caught.append((name, given[0]))
                )
            )
    try:
        with torch.no_grad():
            model.outputs(seen.state, like[:1])
    finally:
        for hook in hooks:
            hook.remove()
    flat = like[:1].flatten(1)
    for name, given in caught:
        same = given.shape == flat.shape and torch.equal(given, flat)
        within = f"{name}." if name else ""
        if same and {f"{within}bias", f"{within}weight"} <= seen.delta.keys():
            return within
    raise ValueError("the model does not begin with a linear layer that has a bias")
