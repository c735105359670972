"""An algorithm's own step of the global model (`Algorithm.step`), and whether it can be one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dure.federated.algorithm import Algorithm
from dure.federated.server.unfit import alike
from dure.protocol.messages import Update
from dure.tensors.finite import all_finite


@torch.no_grad()
def stepped(
    algorithm: Algorithm,
    updates: Sequence[Update],
    weights: Sequence[Tensor],
    mean: Sequence[Tensor],
) -> list[Tensor]:
    """The new weights, of which the algorithm has nothing in common with anybody's memory.

    Cost: three copies of the model. Raises ValueError for what are no weights of the model, and for
    weights that are not finite.
    """
    # Copies: the model before is still somebody's, such as clients' that are at work, and the mean
    # may be one of the updates.
    given, combined = ([one.clone() for one in tensors] for tensors in (weights, mean))
    made = algorithm.step(given, combined, list(updates))
    name = f"{type(algorithm).__name__}.step"
    if not isinstance(made, Sequence) or not all(isinstance(one, Tensor) for one in made):
        raise ValueError(f"{name} gives a {type(made).__name__}, and a list of tensors is wanted")
    if not alike(made, weights):
        wanted, got = (
            ", ".join(f"{one.dtype} {list(one.shape)}" for one in tensors)
            for tensors in (weights, made)
        )
        raise ValueError(f"{name} gives weights of {got}, and the model has {wanted}")
    if not all(map(all_finite, made)):
        raise ValueError(f"{name} gives weights that are not finite")
    # What it keeps of them, and changes later, is not to be the model.
    return [one.detach().clone() for one in made]
