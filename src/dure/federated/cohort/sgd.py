"""SGD of many clients at once, on gradients that are matrix products.

    g <- g + mu (w - anchor) + correction + weight_decay w
    v <- g in a client's first step, else momentum v + (1 - dampening) g
    w <- w - lr v              nesterov: w - lr (g + momentum v)

The gradient of a layer's weight is a product g = L R of what came from behind and what came from before. Without
momentum it is never stored: BLAS adds the product to the weights themselves,

    w <- (1 - lr (mu + weight_decay)) w - lr L R + lr (mu anchor - correction),

one pass over the weights instead of three. That is torch.optim.SGD in another order of additions: equal to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class CannotBatchError(Exception):
    """Why clients cannot be computed together; a reason, in words."""


@dataclass(frozen=True)
class SGD:
    """The settings of torch.optim.SGD."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


def sgd_of(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> SGD:
    """The settings of `optimizer`. Raises CannotBatchError if it does anything else, or not to all parameters alike."""
    if type(optimizer) is not torch.optim.SGD:
        raise CannotBatchError(f"the optimizer is {type(optimizer).__name__}, not SGD")
    if len(optimizer.param_groups) != 1:
        raise CannotBatchError("the optimizer has several groups of parameters")
    group = optimizer.param_groups[0]
    if {id(each) for each in group["params"]} != {id(each) for each in parameters}:
        raise CannotBatchError("the optimizer leaves parameters out")
    if group["maximize"] or group.get("differentiable") or isinstance(group["lr"], Tensor):
        raise CannotBatchError("the optimizer has settings beyond lr, momentum, dampening, weight_decay, nesterov")
    return SGD(*(group[name] for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov")))


class Weights:
    """One parameter of all clients of a cohort. values: (C, *shape); the first `active` of them are at work."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.rule = shape, SGD(0.0)
        self.values = torch.empty(0)
        self.gradient = self.velocity = torch.empty(0)
        self.now = torch.empty(0)
        self.constant: Tensor | None = None
        self.pull = 0.0

    def load(self, start: Tensor, clients: int, rule: SGD, pull: float = 0.0, constant: Tensor | None = None) -> None:
        """Begins a cohort at the weights `start`, (C, n) or (1, n).

        To each gradient is added pull · w, and `constant`, (C, n) or (1, n): mu (w - anchor) + correction is
        pull = mu, constant = correction - mu anchor.
        """
        if len(self.values) != clients:
            self.values = start.new_empty(clients, *self.shape)
        if rule.momentum and self.gradient.shape != self.values.shape:
            self.gradient, self.velocity = torch.empty_like(self.values), torch.empty_like(self.values)
        self.values.view(clients, -1).copy_(start)
        self.rule, self.pull = rule, pull + rule.weight_decay
        self.constant = None if constant is None else constant.view(-1, *self.shape)

    def begin(self, active: int) -> Tensor:
        """The weights of the clients that are at work in this step."""
        self.now = self.values[:active]
        return self.now

    def product(self, left: Tensor, right: Tensor) -> None:
        """The gradient is left @ right, (A, m, k) and (A, k, n) with m n elements a client."""
        matrix = (len(self.now), left.shape[1], right.shape[2])
        if self.rule.momentum:
            torch.bmm(left, right, out=self.gradient[: len(self.now)].view(matrix))
        else:
            lr = self.rule.lr
            self.now.view(matrix).baddbmm_(left, right, beta=1 - lr * self.pull, alpha=-lr)

    def sum(self, gradient: Tensor) -> None:
        """The gradient is `gradient`."""
        if self.rule.momentum:
            self.gradient[: len(self.now)] = gradient
        else:
            if self.pull:
                self.now.mul_(1 - self.rule.lr * self.pull)
            self.now.add_(gradient, alpha=-self.rule.lr)

    @property
    def unfinished(self) -> bool:
        """Whether a step has more to add than the products."""
        return self.constant is not None or self.rule.momentum != 0

    def finish(self, first: bool) -> None:
        """Ends the step: what is not in the products. first: whether it is the clients' first step."""
        rule, active = self.rule, len(self.now)
        constant = None if self.constant is None else self.constant[:active]  # (1, n) holds for all
        if not rule.momentum:
            if constant is not None:
                self.now.add_(constant, alpha=-rule.lr)
            return
        gradient, velocity = self.gradient[:active], self.velocity[:active]
        if self.pull:
            gradient.add_(self.now, alpha=self.pull)
        if constant is not None:
            gradient.add_(constant)
        if first:
            velocity.copy_(gradient)
        else:
            velocity.mul_(rule.momentum).add_(gradient, alpha=1 - rule.dampening)
        way = gradient.add_(velocity, alpha=rule.momentum) if rule.nesterov else velocity
        self.now.add_(way, alpha=-rule.lr)
