"""Adagrad for Downpour SGD: a single rate, divided by the root of the sum of squared gradients.

    G_i <- G_i + g_i^2;    eta_i = gamma / sqrt(G_i), 0 where G_i is 0;    w_i <- w_i - eta_i g_i

The sum begins at zero and no epsilon is added to the root. With the same settings torch's Adagrad
gives the same bits, except for elements that never had a gradient: here they stay unchanged, there
they become NaN.

Source: Dean et al. 2012, "Large Scale Distributed Deep Networks", section 4.1; Duchi et al. 2011.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class DownpourAdagrad(Optimizer):
    """Adagrad without epsilon.

    `lr` is gamma, about ten times the best fixed rate. Raises ValueError unless 0 < lr < inf.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[Mapping[str, Any]], lr: float = 0.1
    ) -> None:
        if not 0 < lr < math.inf:
            raise ValueError(f"gamma is {lr}, but it has to be greater than 0")
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make a step on the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "sum" not in state:
                    state["sum"] = torch.zeros_like(parameter)
                state["sum"].addcmul_(gradient, gradient)
                root = state["sum"].sqrt()
                # Division by infinity gives the step 0 of elements without a gradient.
                root.masked_fill_(root == 0, math.inf)
                parameter.addcdiv_(gradient, root, value=-group["lr"])
