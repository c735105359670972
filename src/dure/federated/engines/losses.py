"""Losses of many clients at once: each client's loss, and the output gradient, by hand.

Each loss is the mean over the client's own examples: row (a, b) weighs w(a, b) = 1 / b_a, or 0 for
padding. If the loss counts targets unequally (`dure.tasks.known_losses`), a row weighs its share of
the counted weight: c(a, b) / the sum of c(a, ·).

                          loss                                 gradient
    cross-entropy         -log p(target), p = softmax(y)       w (p - one-hot)
    mean squared error    mean of (y - t)^2 over k elements    2 w (y - t) / k
    binary, with logits   mean of log(1 + e^y) - y t over k    w (sigmoid(y) - t) / k

for outputs y and targets t. A user-defined loss that returns (sum, count) is computed by autograd,
for one client after another; model and updates are still batched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dure.data.examples import Examples
from dure.errors import text_of
from dure.federated.engines.sgd import CannotBatchError
from dure.tasks.known_losses import CrossEntropy, cross_entropy_of, name_of, torch_loss
from dure.tasks.loss_shares import CountedLoss

ByRows = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(outputs, targets, weights of rows) -> (loss per client, gradient of the outputs).

Shapes: outputs (A, B, ...), weights (A, B), losses (A,).
"""

REGISTER = 64
"""Bytes of a long vector register (AVX-512)."""

MANY = 2_000
"""Number of outputs above which a transposed softmax of short rows is faster."""


def cross_entropy(
    outputs: Tensor, targets: Tensor, weights: Tensor, in_company: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy with class indices, and its gradient.

    in_company: whether a client's rounding may depend on the rows of the others.
    """
    logs = _log_softmax(outputs) if in_company else torch.log_softmax(outputs, -1)
    columns = targets.unsqueeze(-1)
    rows = weights.unsqueeze(-1)
    loss = -(logs.gather(-1, columns) * rows).sum((1, 2))
    # In place: the loss was computed from `logs`, and p = exp(log p) is next.
    gradient = logs.exp_()
    gradient.scatter_(-1, columns, -1.0, reduce="add")
    return loss, gradient.mul_(rows)


def _log_softmax(outputs: Tensor) -> Tensor:
    """Return the log softmax along the last dimension.

    For rows shorter than a vector register, torch's kernel processes one number at a time; with
    adjacent rows it processes many rows at once: ten times faster for ten classes.
    """
    # Transposing costs two copies, which pay only for many outputs.
    wide = outputs.numel() < MANY or outputs.shape[-1] * outputs.element_size() >= REGISTER
    if wide or outputs.device.type != "cpu":
        return torch.log_softmax(outputs, -1)
    return torch.log_softmax(outputs.movedim(-1, 0).contiguous(), 0).movedim(0, -1).contiguous()


def mse(outputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    difference = outputs - targets
    rows = _rows(weights, outputs)
    # From left to right: the loss has its squares before the gradient takes the memory.
    return (difference.square() * rows).flatten(1).sum(1), difference.mul_(rows).mul_(2)


def binary_cross_entropy(
    outputs: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    rows = _rows(weights, outputs)
    loss = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return (loss * rows).flatten(1).sum(1), torch.sigmoid(outputs).sub_(targets).mul_(rows)


def _rows(weights: Tensor, outputs: Tensor) -> Tensor:
    """Return the weight of each element of the outputs."""
    # torch's "mean" is over elements too, and not over examples alone.
    elements = outputs.shape[2:].numel()
    return (weights / elements).view(*weights.shape, *[1] * (outputs.ndim - 2))


class StepLosses(NamedTuple):
    """Result of a step of A clients.

    losses: (A,). gradient: of the outputs. counted: (A,), the weight that each loss counted; None:
    every row counts 1.
    """

    losses: Tensor
    gradient: Tensor
    counted: Tensor | None = None


class BatchedLoss:
    """A loss of many clients whose rows count equally.

    rows: the function that computes the loss; None if a subclass computes the loss itself. known:
    of a cross-entropy.
    """

    def __init__(self, rows: ByRows | None, known: CrossEntropy | None = None) -> None:
        self.rows = rows
        self.known = known

    def __call__(self, outputs: Tensor, targets: Tensor, shares: Tensor) -> StepLosses:
        """Return the losses. shares: (A, B), of each row in its client's batch; 0 for padding."""
        assert self.rows is not None
        return StepLosses(*self.rows(outputs, targets, shares))


class UnequalCrossEntropy(BatchedLoss):
    """A cross-entropy that ignores targets, or weighs classes."""

    def __call__(self, outputs: Tensor, targets: Tensor, shares: Tensor) -> StepLosses:
        assert self.rows is not None
        assert self.known is not None
        counts = (targets != self.known.ignore_index) & (shares > 0)
        # Uncounted rows need a valid class and finite outputs: 0 · NaN is NaN.
        targets = targets.masked_fill(~counts, 0)
        outputs = outputs.masked_fill(~counts.unsqueeze(-1), 0)
        counted = counts.to(outputs.dtype)
        if self.known.weight is not None:
            counted *= self.known.weight.to(outputs)[targets]
        total = counted.sum(1)
        # A client whose batch counts nothing has a loss of 0.
        weights = counted / total.masked_fill(total == 0, 1).unsqueeze(1)
        return StepLosses(*self.rows(outputs, targets, weights), total)


class OwnLossError(Exception):
    """Raised if a user-defined loss raised its `__cause__` for the examples of a client.

    client: its row in the cohort.
    """

    def __init__(self, client: int, error: BaseException) -> None:
        super().__init__(text_of(error))
        self.client = client


class UserDefinedLoss(BatchedLoss):
    """A user-defined loss that returns (sum, count), by autograd.

    Raises OwnLossError if the loss raises.
    """

    def __init__(self, losses: CountedLoss) -> None:
        super().__init__(None)
        self.losses = losses

    def __call__(self, outputs: Tensor, targets: Tensor, shares: Tensor) -> StepLosses:
        gradient = torch.zeros_like(outputs)
        sizes = (shares > 0).sum(1).tolist()
        found = [
            self._named(client, outputs[client, :size], targets[client, :size])
            for client, size in enumerate(sizes)
        ]
        for client, size in enumerate(sizes):
            gradient[client, :size] = found[client][1]
        losses = torch.stack([loss.to(outputs.dtype).reshape(()) for loss, _, _ in found])
        counted = torch.tensor([count for _, _, count in found], dtype=torch.float64)
        return StepLosses(losses, gradient, counted)

    def _named(self, client: int, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, float]:
        try:
            return self._of(outputs, targets)
        except (Exception, SystemExit) as error:
            raise OwnLossError(client, error) from error

    def _of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return (loss, gradient, counted weight) of a client."""
        # Tensors of inference mode have no graph; copies made outside of inference mode do.
        with torch.inference_mode(False), torch.enable_grad():
            leaf = outputs.clone().requires_grad_()
            loss, counted = self.losses.mean(leaf, targets.clone(), len(leaf))
            (gradient,) = torch.autograd.grad(loss, leaf)
            return loss.detach(), gradient, counted


def loss_of(function: Any, examples: Examples) -> BatchedLoss:
    """Return the batched form of `function`; raise CannotBatchError for an unknown loss.

    Whether a user-defined loss returns (sum, count) shows in its first call: see `UserDefinedLoss`.
    """
    if isinstance(function, nn.Module) and hooked(function):
        raise _unknown(function)
    known = cross_entropy_of(function)
    if known is not None and known.of_scores and not known.label_smoothing:
        alike = known.counts_alike(examples.targets)
        return (BatchedLoss if alike else UnequalCrossEntropy)(cross_entropy, known)
    for rows, plain, module in (
        (mse, F.mse_loss, nn.MSELoss),
        (binary_cross_entropy, F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss),
    ):
        if function is plain or (type(function) is module and _plain(function)):
            return BatchedLoss(rows)
    if torch_loss(function) is None:
        return UserDefinedLoss(CountedLoss(function, examples))
    raise _unknown(function)


def _unknown(function: Any) -> CannotBatchError:
    return CannotBatchError(
        f"the loss is {name_of(function)}, not cross_entropy, mse_loss or "
        f"binary_cross_entropy_with_logits, and returns no (sum, count)"
    )


def check_pair(function: Any, value: Any) -> None:
    """Raise CannotBatchError unless a user-defined loss has returned a pair (sum, count)."""
    if not isinstance(value, tuple):
        raise _unknown(function)


def _plain(module: nn.Module) -> bool:
    """Return whether the module is unmodified: a mean, without weights."""
    buffers = list(module.buffers())
    return getattr(module, "reduction", None) == "mean" and not buffers


def hooked(module: nn.Module) -> bool:
    """Return whether hooks are registered on the module."""
    forward = (module._forward_hooks, module._forward_pre_hooks)
    backward = module._backward_hooks
    return bool(any(forward) or backward or module._backward_pre_hooks)
