"""SGD of many clients at once, on gradients that are matrix products.

    g <- g + mu (w - anchor) + correction + weight_decay w
    v <- g in a client's first step, else momentum v + (1 - dampening) g
    w <- w - lr v              nesterov: w - lr (g + momentum v)

The gradient of a layer's weight is a product g = L R of the layer's output gradient and its inputs.
Without momentum it is never stored: BLAS adds the product to the weights themselves,

    w <- (1 - lr (mu + weight_decay)) w - lr L R + lr (mu anchor - correction),

a single pass over the weights instead of three. This is torch.optim.SGD in another order of
additions, equal except for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dure.federated.engines.factored import Factored
from dure.tensors.optimizer_state import has_step_hooks


class CannotBatchError(Exception):
    """Raised if clients cannot be batched; the message is the reason."""


@dataclass(frozen=True)
class SGD:
    """Settings of torch.optim.SGD."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


def sgd_of(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> SGD:
    """Return the settings of `optimizer`. parameters: the trained ones; it may have others too.

    Raises CannotBatchError if the optimizer does anything else, or treats parameters differently.
    """
    if type(optimizer) is not torch.optim.SGD:
        raise CannotBatchError(f"the optimizer is {type(optimizer).__name__}, not SGD")
    if len(optimizer.param_groups) != 1:
        raise CannotBatchError("the optimizer has several groups of parameters")
    if has_step_hooks(optimizer):
        raise CannotBatchError("the optimizer has hooks")
    group = optimizer.param_groups[0]
    moved = {id(each) for each in group["params"] if each.requires_grad}
    if moved != {id(each) for each in parameters}:
        raise CannotBatchError("the optimizer leaves parameters out")
    if group["maximize"] or group.get("differentiable") or isinstance(group["lr"], Tensor):
        raise CannotBatchError(
            "the optimizer has settings beyond lr, momentum, dampening, weight_decay, nesterov"
        )
    return SGD(
        lr=group["lr"],
        momentum=group["momentum"],
        dampening=group["dampening"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
    )


LINE = 64
"""Bytes of a cache line, on which each client's part of a parameter begins.

Adding a product to unaligned memory takes four times as long.
"""


class Weights:
    """A parameter of all clients of a cohort.

    values: (C, *shape). now: (A, *shape), of the clients that are at work in this step.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.rule = SGD(0.0)
        self.values = self.now = self._own = torch.empty(0)
        self._gradient = self._velocity = torch.empty(0)
        self._constant: Tensor | None = None
        self._pull = 0.0
        self.shared: Tensor | None = None
        """Weights that all clients share in this step; None for per-client weights.

        Shared weights last for the first step; factored weights last for the cohort.
        """
        self.is_factored = False
        """Whether the weights are factored, as a weight or as the bias of such a weight."""
        self.has_more = False
        """Whether a step has terms outside of the products, so that it needs `finish`."""
        self.factored: Factored | None = None
        """The weights in factored form; None otherwise."""
        self.beside: Weights | None = None
        """For a linear layer's bias: the layer's weight, with which the bias is factored.

        The weight comes right before the bias.
        """
        self._only: Tensor | None = None
        """Output of the change of a shared step, if it is the only step.

        The weights are then never written.
        """

    def load(
        self,
        start: Tensor,
        clients: int,
        rule: SGD,
        pull: float = 0.0,
        constant: Tensor | None = None,
        shares: bool = False,
        only: Tensor | None = None,
    ) -> None:
        """Load the start weights of a cohort, (C, n) or (1, n).

        Each gradient gets pull · w, and `constant`: mu (w - anchor) + correction is pull = mu,
        constant = correction - mu anchor.

        Args:
            start: (C, n), or (1, n) for all clients.
            clients: C.
            rule: settings of SGD.
            pull: factor of w in each gradient.
            constant: (C, n) or (1, n), added to each gradient; None adds nothing.
            shares: whether all clients start from `start` and compute their first step with it, in
                a large product.
            only: (C, n), which receives the change if there is a single step.
        """
        self.rule = rule
        self._pull = pull + rule.weight_decay
        start = start.view(-1, *self.shape)
        # Views in the shape of the parameter: only the start is copied, and only if weights are
        # written.
        self._constant = None if constant is None else constant.view(-1, *self.shape)
        self.shared = start[0] if shares else None
        self._only = None if only is None else only.view(clients, *self.shape)
        self.factored = None
        self.is_factored = False
        if only is not None:
            # The single step writes the change alone: all clients read a single copy of the
            # weights.
            self.values = self.now = start.expand(clients, *self.shape)
            self.has_more = bool(self._pull) or constant is not None
            return
        # Memory is reused from cohort to cohort, most of which have the same size.
        if len(self._own) != clients:
            self._own = _on_lines(start, clients, self.shape)
        self.values = self.now = self._own
        self.has_more = bool(rule.momentum) or constant is not None
        # With momentum the gradient is needed separately: it goes into the velocity.
        if rule.momentum and self._gradient.shape != self.values.shape:
            self._gradient = start.new_empty(self.values.shape)
            self._velocity = start.new_empty(self.values.shape)
        self.values.copy_(start)

    def forget(self) -> None:
        """Free the memory."""
        self.values = self.now = self._own = torch.empty(0)
        self._gradient = self._velocity = torch.empty(0)
        self._constant = self.shared = self._only = None

    def factor(self, start: Tensor, clients: int, rule: SGD, rows: int) -> None:
        """Load the start weights, (n,), of a cohort with factored weights.

        rows: of all steps together. Nothing is added to gradients.
        """
        self.rule = rule
        self.shared = start.view(self.shape)
        self.is_factored = True
        self.has_more = False
        if self.beside is None:
            self.factored = Factored(self.shared, clients, rows, rule.lr)

    def change(self, out: Tensor) -> None:
        """Write the clients' changes of the factored weights to out, (C, n)."""
        factored = (self if self.beside is None else self.beside).factored
        assert factored is not None
        left, right = factored.factors()
        if self.beside is None:
            matrices = (len(left), *self.shape)
            out.view(matrices).baddbmm_(left.transpose(1, 2), right, beta=0, alpha=-self.rule.lr)
        else:
            torch.sum(left, 1, out=out).mul_(-self.rule.lr)

    def narrow(self, active: int) -> None:
        """Restrict the next steps to the first `active` clients."""
        self.now = self.values[:active]

    def product(self, left: Tensor, right: Tensor) -> None:
        """Apply the gradient left @ right, (A, m, k) and (A, k, n), m n elements per client."""
        matrix = (len(self.now), left.shape[1], right.shape[2])
        lr = self.rule.lr
        # beta=0 ignores the previous content of the memory, even NaN.
        if self._only is not None:
            self._only.view(matrix).baddbmm_(left, right, beta=0, alpha=-lr)
        elif self.rule.momentum:
            torch.bmm(left, right, out=self._gradient[: len(self.now)].view(matrix))
        else:
            # Weight decay and the pull are a factor of the weights, which the same product applies.
            self.now.view(matrix).baddbmm_(left, right, beta=1 - lr * self._pull, alpha=-lr)

    def sum(self, gradient: Tensor) -> None:
        """Apply the gradient `gradient`."""
        if self._only is not None:
            torch.mul(gradient, -self.rule.lr, out=self._only)
        elif self.rule.momentum:
            self._gradient[: len(self.now)] = gradient
        else:
            if self._pull:
                self.now.mul_(1 - self.rule.lr * self._pull)
            self.now.add_(gradient, alpha=-self.rule.lr)

    def finish(self, first: bool) -> None:
        """Finish a step that has terms outside of the products.

        first: whether it is the clients' first step.
        """
        rule = self.rule
        active = len(self.now)
        # A constant of shape (1, n) applies to all clients.
        constant = None if self._constant is None else self._constant[:active]
        if not rule.momentum:
            moved = self.now if self._only is None else self._only
            # The product did not touch the weights here, so it could not apply the factor.
            if self._only is not None and self._pull:
                moved.add_(self.now, alpha=-rule.lr * self._pull)
            if constant is not None:
                moved.add_(constant, alpha=-rule.lr)
            return
        gradient = self._gradient[:active]
        velocity = self._velocity[:active]
        if self._pull:
            gradient.add_(self.now, alpha=self._pull)
        if constant is not None:
            gradient.add_(constant)
        # As torch.optim.SGD: the first velocity is the gradient itself, without dampening.
        if first:
            velocity.copy_(gradient)
        else:
            velocity.mul_(rule.momentum).add_(gradient, alpha=1 - rule.dampening)
        way = gradient.add_(velocity, alpha=rule.momentum) if rule.nesterov else velocity
        self.now.add_(way, alpha=-rule.lr)


def _on_lines(like: Tensor, clients: int, shape: tuple[int, ...]) -> Tensor:
    """Return memory (C, *shape), uninitialised, with each client's part on its own cache lines."""
    elements = math.prod(shape)
    line = LINE // like.element_size()
    whole_lines = -(-elements // line) * line
    # Each row is padded to whole lines; the padding is never read.
    return like.new_empty(clients, whole_lines)[:, :elements].view(clients, *shape)
