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
    """One parameter of all clients of a cohort. values: (C, *shape); the first `active` of them are at work.

    Clients that all begin at the same weights need no copy of them for their first step (`fresh`): they compute with
    the weights that they share, and `values` takes what the step adds to them.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.rule = shape, SGD(0.0)
        self.values = self.now = self._active = self._start = torch.empty(0)
        self._gradient = self._velocity = torch.empty(0)
        self._constant: Tensor | None = None
        self._pull = 0.0
        self.fresh = False

    def load(
        self,
        values: Tensor,
        start: Tensor,
        rule: SGD,
        pull: float = 0.0,
        constant: Tensor | None = None,
        fresh: bool = False,
    ) -> None:
        """Begins a cohort at the weights `start`, (C, n) or (1, n), which `values`, (C, n), has already if not fresh.

        To each gradient is added pull · w, and `constant`, (C, n) or (1, n): mu (w - anchor) + correction is
        pull = mu, constant = correction - mu anchor.
        """
        self.values, self._start, self.fresh = values.view(-1, *self.shape), start.view(-1, *self.shape), fresh
        if rule.momentum and self._gradient.shape != self.values.shape:
            self._gradient, self._velocity = (values.new_empty(self.values.shape) for _ in range(2))
        self.rule, self._pull = rule, pull + rule.weight_decay
        self._constant = None if constant is None else constant.view(-1, *self.shape)

    def begin(self, active: int) -> Tensor:
        """The weights of the clients that are at work in this step, (A, *shape); one in A places where it is fresh."""
        self._active = self.values[:active]
        self.now = self._start.expand(active, *self.shape) if self.fresh else self._active
        return self.now

    def product(self, left: Tensor, right: Tensor) -> None:
        """The gradient is left @ right, (A, m, k) and (A, k, n) with m n elements a client."""
        matrix = (len(left), left.shape[1], right.shape[2])
        if self.rule.momentum:
            torch.bmm(left, right, out=self._gradient[: len(left)].view(matrix))
        else:
            lr = self.rule.lr
            kept = 0.0 if self.fresh else 1 - lr * self._pull
            self._active.view(matrix).baddbmm_(left, right, beta=kept, alpha=-lr)

    def sum(self, gradient: Tensor) -> None:
        """The gradient is `gradient`."""
        if self.rule.momentum:
            self._gradient[: len(self.now)] = gradient
        elif self.fresh:
            torch.mul(gradient, -self.rule.lr, out=self._active)
        else:
            if self._pull:
                self.now.mul_(1 - self.rule.lr * self._pull)
            self.now.add_(gradient, alpha=-self.rule.lr)

    @property
    def unfinished(self) -> bool:
        """Whether a step has more to add than the products."""
        return self._constant is not None or self.rule.momentum != 0 or (self.fresh and self._pull != 0)

    def finish(self, first: bool) -> None:
        """Ends the step: what is not in the products. first: whether it is the clients' first step."""
        rule, active = self.rule, len(self.now)
        constant = None if self._constant is None else self._constant[:active]  # (1, n) holds for all
        if not rule.momentum:
            if constant is not None:
                self._active.add_(constant, alpha=-rule.lr)
            if self.fresh and self._pull:
                self._active.add_(self.now, alpha=-rule.lr * self._pull)
            return
        gradient, velocity = self._gradient[:active], self._velocity[:active]
        if self._pull:
            gradient.add_(self.now, alpha=self._pull)
        if constant is not None:
            gradient.add_(constant)
        if first:
            velocity.copy_(gradient)
        else:
            velocity.mul_(rule.momentum).add_(gradient, alpha=1 - rule.dampening)
        way = gradient.add_(velocity, alpha=rule.momentum) if rule.nesterov else velocity
        if self.fresh:
            torch.mul(way, -rule.lr, out=self._active)
        else:
            self.now.add_(way, alpha=-rule.lr)
