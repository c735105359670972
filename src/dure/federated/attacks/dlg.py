"""Deep leakage from gradients (DLG): inputs with the observed gradient, found by L-BFGS.

    minimise over x   sum over layers of ‖g(x, labels) - g seen‖²

DLG is the first published inversion. The attack recovers single examples of small models to the
last digits, and fails on many examples, on trained models, and under noise. The paper optimizes
labels together with inputs; here labels come from the last layer first (iDLG), which is exact for a
single example.

Cost: `iterations` · up to 20 evaluations, each three times a forward and backward pass.

Source: L. Zhu, Z. Liu, S. Han, "Deep Leakage from Gradients", NeurIPS 2019; B. Zhao et al., "iDLG",
2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dure.federated.attacks.inversion import (
    EXACT,
    InputSpace,
    InversionResult,
    IterationCallback,
    estimate_of,
    restarts,
)
from dure.federated.attacks.observation import AttackedModel, ObservedUpdate


@dataclass(frozen=True)
class DLG:
    """Settings of the DLG attack.

    Args:
        iterations: steps of L-BFGS in each attempt.
        attempts: random starting points; the result with the smallest distance counts.
        seed: seed of the starting points.
    """

    iterations: int = 50
    attempts: int = 3
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
        # Gradients of trained models are small, so the distance is divided by their squared norm.
        scale = sum(float(one.double().square().sum()) for one in wanted.values()) or 1.0

        def once(draws: torch.Generator) -> InversionResult:
            x = space.drawn(len(labels), draws).requires_grad_()
            optimizer = torch.optim.LBFGS(
                [x],
                lr=1.0,
                max_iter=20,
                history_size=50,
                tolerance_grad=0,
                tolerance_change=0,
                line_search_fn="strong_wolfe",
            )
            best = InversionResult(x.detach().clone(), float("inf"))

            def closure() -> float:
                nonlocal best
                optimizer.zero_grad()
                found = estimate(x)
                distance = (
                    torch.stack([(found[name] - wanted[name]).square().sum() for name in wanted])
                    .sum()
                    .div(scale)
                )
                (x.grad,) = torch.autograd.grad(distance, x)
                value = float(distance.detach())
                if value < best.distance:
                    best = InversionResult(x.detach().clone(), value)
                return value

            for iteration in range(self.iterations):
                optimizer.step(closure)  # type: ignore[no-untyped-call]
                look(iteration + 1, self.iterations)
                # NaN: the line search diverged. The closest earlier inputs remain the result.
                if best.distance < EXACT or not bool(x.isfinite().all()):
                    break
            return best

        return restarts(self.seed, self.attempts, once)
