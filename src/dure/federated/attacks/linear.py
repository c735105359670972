"""Reconstruction of examples from the gradient of a first linear layer, in closed form.

For y = W x + b of a single example

    dL/dW_ij = (dL/dy_i) x_j        dL/db_i = dL/dy_i        so        x_j = (dL/dW_ij) / (dL/db_i)

for every unit i whose gradient is not 0. The result is exact and needs no optimization. For several
examples each unit gives their mean, weighed by their gradients at that unit. A unit that a single
example activates (ReLU) gives that example. Units with equal results form groups: the largest
groups are returned, and among groups of equal size those with the largest gradient.

Cost: O(units · inputs).

Sources: L. T. Phong et al., "Privacy-Preserving Deep Learning via Additively Homomorphic
Encryption", 2018; J. Geiping et al., "Inverting Gradients", NeurIPS 2020, proposition 3.1; F.
Boenisch et al., "When the Curious Abandon Honesty", 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dure.federated.attacks.observation import AttackedModel, ObservedUpdate

ALIKE = 1e-2
"""Relative distance below which two units give the same example."""

UNITS = 1024
"""Largest number of units in use, by the size of their gradients."""


def from_first_layer(model: AttackedModel, seen: ObservedUpdate, like: Tensor) -> Tensor:
    """Return up to `seen.examples` inputs of the shape of `like[0]`, the likeliest first.

    `like` are inputs of the task, by which the layer is found. Fewer inputs return if fewer units
    have a gradient. Raises ValueError if the model does not begin with a linear layer that has a
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
    """Return the first row of each of the largest groups of similar rows; ties go by row order."""
    if not len(rows):
        return []
    distances = torch.cdist(rows, rows) / rows.norm(dim=1).clamp(min=1e-12)
    alike = distances < ALIKE
    left = torch.ones(len(rows), dtype=torch.bool)
    chosen: list[int] = []
    while bool(left.any()) and len(chosen) < most:
        # Among equal counts take the first row, which has the largest gradient.
        sizes = (alike & left).sum(dim=1) * left
        best = int((sizes == sizes.max()).nonzero()[0])
        chosen.append(best)
        left &= ~alike[best]
        left[best] = False
    return chosen


def _first_layer(model: AttackedModel, seen: ObservedUpdate, like: Tensor) -> str:
    """Return the prefix of the names of the first layer's parameters."""
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
