"""Inputs rebuilt from what leaves the head: a decoder, trained on public examples of the same kind.

    head known      it runs public inputs through the head, and trains a decoder Z -> X on the pairs
    head unknown    it first trains a head of its own, a shadow, so that the server's part, as it
                    is, gives the right labels of public examples behind it, and so that what leaves
                    it has the mean and the covariance of what was seen; then as above

The head is known to the server where weights are handed over through it, and to whoever enrols a
client of his own. The shadow needs a server's part that ends with the loss, so it is one of a
single cut; after two cuts an attacker who does not know the head needs pairs (Z, X).

How well it works is told on examples that it has not seen: the mean squared error, beside that of
the mean picture, which knows nothing of Z; and for pictures SSIM
(`dure.tasks.pictures`).

Sources: P. Vepakomma et al., "NoPeek", 2020 (the decoder); X. Gao and L. Zhang, "PCAT:
Functionality and Data Stealing from Split Learning by Pseudo-Client Attack", 2023 (the shadow).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dure.randomness.seeds import (
    generators_state,
    restore_generators,
    seed_generators,
    shuffled,
)
from dure.tasks.pictures import ssim

Head = Callable[[Tensor], Tensor]
"""head(inputs): what leaves it, whose first dimension is the example."""


class Rebuilt(NamedTuple):
    """What an attacker has rebuilt, and how far it is from the truth.

    inputs: of the shape of the true ones. squared_error: the mean over all numbers. of_mean: that
    of the mean of the public examples. ssim: the mean over the pictures; None where inputs are
    none.
    """

    inputs: Tensor
    squared_error: float
    of_mean: float
    ssim: float | None


@dataclass(frozen=True)
class Decoder:
    """How an attacker trains: a network of one hidden layer, by Adam.

    width: of the hidden layer. steps, batch_size, lr: of the training. seed: of the weights and of
    the order of examples.
    """

    width: int = 256
    steps: int = 600
    batch_size: int = 64
    lr: float = 2e-3
    seed: int = 0

    def train(self, values: Tensor, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        """decoder(values): inputs, learned from these pairs."""
        flat = values.flatten(1)
        wanted = inputs.flatten(1)
        # One scale for all: a number that public examples leave alone may be large in others.
        middle = flat.mean(dim=0)
        scale = flat.std().clamp(min=1e-12)
        with _seeded(self.seed, "decoder"):
            net = nn.Sequential(
                nn.Linear(flat.shape[1], self.width),
                nn.ReLU(),
                nn.Linear(self.width, wanted[0].numel()),
            ).to(inputs.device, inputs.dtype)
        normal = (flat - middle) / scale
        self.fit(net, lambda at: F.mse_loss(net(normal[at]), wanted[at]), len(flat))

        @torch.no_grad()
        def decode(seen: Tensor) -> Tensor:
            found: Tensor = net((seen.flatten(1) - middle) / scale)
            return found.reshape(len(seen), *inputs.shape[1:])

        return decode

    def fit(self, net: nn.Module, loss: Callable[[Tensor], Tensor], examples: int) -> None:
        """Trains a network. loss: of the examples at these indices, of so many."""
        weights = list(net.parameters())
        optimizer = torch.optim.Adam(weights, lr=self.lr)
        for batch in self._batches(examples):
            # Other modules that the loss goes through get no gradients.
            gradients = torch.autograd.grad(loss(batch), weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            optimizer.step()

    def _batches(self, examples: int) -> Iterator[Tensor]:
        done = epoch = 0
        while True:
            order = shuffled(examples, self.seed, epoch)
            for batch in torch.split(order, self.batch_size):
                if done == self.steps:
                    return
                yield batch
                done += 1
            epoch += 1


def rebuild(
    head: Head, public: Tensor, values: Tensor, inputs: Tensor, decoder: Decoder = Decoder()
) -> Rebuilt:
    """Attacks what has left a head, which is known or guessed.

    head: what the attacker takes it for. public: inputs of the same kind that it has. values: what
    it saw, of examples that are not public. inputs: those of them, by which it is measured.
    """
    with torch.no_grad():
        pairs = head(public)
    found = decoder.train(pairs, public)(values)
    middle = public.mean(dim=0, keepdim=True).expand_as(inputs)
    is_picture = inputs.ndim == 4
    return Rebuilt(
        inputs=found,
        squared_error=float(F.mse_loss(found, inputs)),
        of_mean=float(F.mse_loss(middle, inputs)),
        ssim=ssim(found, inputs, float(public.max() - public.min())) if is_picture else None,
    )


def shadow_head(
    make: Callable[[], nn.Module],
    tail: Callable[[Tensor], Any] | None,
    loss: Callable[[Any, Tensor], Tensor],
    public: tuple[Tensor, Tensor],
    values: Tensor,
    decoder: Decoder = Decoder(steps=300, batch_size=128),
) -> nn.Module:
    """A head of the attacker's own that fits the server's part.

    make: a fresh module, of a kind that the attacker supposes. tail: the server's part, which is
    left as it is; None where it does not end with the loss. public: inputs and their targets.
    values: what was seen to leave the true head. Costs O(d²) a step for d numbers an example.

    Raises ValueError without a tail: then the attacker needs pairs of inputs and what left the
    head.
    """
    if tail is None:
        raise ValueError(
            "a shadow head is trained through the server's part and the loss, and after two cuts "
            "the loss is with the clients: an attacker without the head needs pairs of inputs and "
            "what has left it"
        )
    with _seeded(decoder.seed, "shadow head"):
        shadow = make()
    inputs, targets = public
    seen = _moments(values)

    def misfit(at: Tensor) -> Tensor:
        given = shadow(inputs[at])
        pairs = zip(_moments(given), seen, strict=True)
        unlike = [(mine - true).square().sum() / true.square().sum() for mine, true in pairs]
        return loss(tail(given), targets[at]) + torch.stack(unlike).sum()

    decoder.fit(shadow, misfit, len(inputs))
    return shadow


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance."""
    flat = values.flatten(1)
    return flat.mean(dim=0), flat.T.cov()


@contextmanager
def _seeded(seed: int, purpose: str) -> Iterator[None]:
    """Modules are made by torch's global generator, which is put back."""
    before = generators_state()
    seed_generators(seed, purpose)
    try:
        yield
    finally:
        restore_generators(before)
