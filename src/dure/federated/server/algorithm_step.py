"""Call and validation of an overridden `Algorithm.step`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dure.federated.algorithm import Algorithm
from dure.federated.server.update_validation import same_shapes
from dure.protocol.messages import Update
from dure.tensors.elements import all_finite


@torch.no_grad()
def checked_step(
    algorithm: Algorithm,
    updates: Sequence[Update],
    weights: Sequence[Tensor],
    mean: Sequence[Tensor],
) -> list[Tensor]:
    """Return the new weights of the algorithm's step, without memory shared with any other tensor.

    Cost: three copies of the model. Raises ValueError for tensors that do not fit the model, and
    for weights that are not finite.
    """
    # Copies: working clients, for example, may still use the model before, and the mean may be one
    # of the updates.
    given, combined = ([one.clone() for one in tensors] for tensors in (weights, mean))
    made = algorithm.step(given, combined, list(updates))
    name = f"{type(algorithm).__name__}.step"
    if not isinstance(made, Sequence) or not all(isinstance(one, Tensor) for one in made):
        raise ValueError(
            f"{name} returns a {type(made).__name__}, but has to return a list of tensors"
        )
    if not same_shapes(made, weights):
        wanted, got = (
            ", ".join(f"{one.dtype} {list(one.shape)}" for one in tensors)
            for tensors in (weights, made)
        )
        raise ValueError(f"{name} returns weights of {got}, but the model has {wanted}")
    if not all(map(all_finite, made)):
        raise ValueError(f"{name} returns weights that are not finite")
    # The algorithm may keep references to these tensors and change them later.
    return [one.detach().clone() for one in made]
