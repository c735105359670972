"""Gradient inversion by Geiping et al.: inputs whose gradient has the observed direction.

    minimise over x in the range of inputs   1 - <g(x), g seen> / (‖g(x)‖ ‖g seen‖)  +  alpha TV(x)

The optimizer is Adam on the signs of the gradients, with a learning rate that is divided by 10
after 3/8, 5/8 and 7/8 of the iterations. The direction of a gradient describes the examples; the
length only shows how well the model knows them. TV (total variation) is the mean difference of
neighbouring pixels, for inputs of shape (channels, height, width): pictures are smooth. The attack
works for ReLU networks, trained networks and batches; the larger the batch, the less of each
picture returns.

Cost: `iterations` · three times a forward and backward pass.

Source: J. Geiping, H. Bauermeister, H. Dröge, M. Moeller, "Inverting Gradients: How easy is it to
break privacy in federated learning?", NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dure.federated.attacks.inversion import (
    InputSpace,
    InversionResult,
    IterationCallback,
    estimate_of,
    restarts,
)
from dure.federated.attacks.observation import AttackedModel, ObservedUpdate


@dataclass(frozen=True)
class Geiping:
    """Settings of the attack.

    Args:
        iterations: Adam steps in each attempt.
        lr: learning rate, as a fraction of the range of inputs.
        smooth: alpha, the weight of the total variation.
        attempts: random starting points; the result with the smallest distance counts.
        seed: seed of the starting points.
    """

    iterations: int = 400
    lr: float = 0.1
    smooth: float = 1e-2
    attempts: int = 1
    seed: int = 0

    def invert(
        self,
        model: AttackedModel,
        seen: ObservedUpdate,
        labels: Tensor,
        space: InputSpace,
        look: IterationCallback = lambda done, of: None,
    ) -> InversionResult:
        """Return rebuilt inputs of shape (len(labels), *space.shape).

        Args:
            model: the task's model.
            seen: the observed update or sum.
            labels: label of each input, of shape (n,).
            space: shape, range and dtype of the inputs.
            look: callback after each iteration.
        """
        estimate = estimate_of(model, seen, labels)
        wanted = seen.gradient

        def once(draws: torch.Generator) -> InversionResult:
            x = space.drawn(len(labels), draws).requires_grad_()
            optimizer = torch.optim.Adam([x], lr=self.lr * space.span)
            marks = [self.iterations * part // 8 for part in (3, 5, 7)]
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, marks, gamma=0.1)
            distance = torch.tensor(float("inf"))
            for iteration in range(self.iterations):
                distance = cosine_distance(estimate(x), wanted)
                cost = distance + self.smooth * total_variation(x) / space.span
                (gradient,) = torch.autograd.grad(cost, x)
                x.grad = gradient.sign()
                optimizer.step()
                schedule.step()
                with torch.no_grad():
                    x.clamp_(space.low, space.high)
                look(iteration + 1, self.iterations)
            return InversionResult(x.detach(), float(distance.detach()))

        return restarts(self.seed, self.attempts, once)


def cosine_distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Tensor:
    """Return 1 - cosine similarity of two gradients, over all layers together."""
    product = torch.stack([(found[name] * wanted[name]).sum() for name in wanted]).sum()
    mine = torch.stack([found[name].square().sum() for name in wanted]).sum()
    theirs = torch.stack([one.square().sum() for one in wanted.values()]).sum()
    return 1 - product / (mine * theirs).sqrt().clamp(min=1e-30)


def total_variation(x: Tensor) -> Tensor:
    """Return the mean difference of neighbouring pixels; 0 for inputs that are not pictures."""
    if x.ndim != 4:
        return x.new_zeros(())
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().mean() if x.shape[-2] > 1 else x.new_zeros(())
    across = (x[..., :, 1:] - x[..., :, :-1]).abs().mean() if x.shape[-1] > 1 else x.new_zeros(())
    return down + across
