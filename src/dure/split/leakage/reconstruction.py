"""Reconstruction attack: rebuilds inputs from the output of the head by a decoder.

The attacker has public examples of the same kind.

    head known      runs public inputs through the head, and trains a decoder Z -> X on the pairs
    head unknown    first trains a shadow head, such that the server's part, unchanged, predicts
                    the labels of public examples from its output, and such that its output has the
                    mean and the covariance of the observed values; then as above

The server knows the head if weights are passed on through the server, or if it enrols a client of
its own. The shadow needs a server's part that ends with the loss, so a single cut; with two cuts an
attacker without the head needs pairs (Z, X).

The attack is measured on private examples: the mean squared error, beside the error of the mean of
the public examples, which uses no Z; and for images SSIM (`dure.tasks.image_similarity`).

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
from dure.tasks.image_similarity import ssim

Head = Callable[[Tensor], Tensor]
"""head(inputs): the output of the head; the first dimension counts examples."""


class Rebuilt(NamedTuple):
    """Inputs that an attacker has rebuilt, and their errors.

    inputs: of the shape of the true inputs. squared_error: the mean over all numbers. of_mean: the
    squared error of the mean of the public examples. ssim: the mean over the images; None if inputs
    are not images.
    """

    inputs: Tensor
    squared_error: float
    of_mean: float
    ssim: float | None


@dataclass(frozen=True)
class ReconstructionDecoder:
    """Settings and training of the attacker's network: a single hidden layer, trained by Adam.

    width: of the hidden layer. steps, batch_size, lr: of the training. seed: of the weights and of
    the order of examples.
    """

    width: int = 256
    steps: int = 600
    batch_size: int = 64
    lr: float = 2e-3
    seed: int = 0

    def train(self, values: Tensor, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        """Return decoder(values) -> inputs, trained on these pairs."""
        flat = values.flatten(1)
        wanted = inputs.flatten(1)
        # A single scale: a number that is constant in public examples may vary in private ones.
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
        """Train a network.

        loss: `loss(indices)` returns the loss of the examples at these indices, each below
        `examples`.
        """
        weights = list(net.parameters())
        optimizer = torch.optim.Adam(weights, lr=self.lr)
        for batch in self._batches(examples):
            # autograd.grad leaves the `grad` of other modules, such as the tail, untouched.
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
    head: Head,
    public: Tensor,
    values: Tensor,
    inputs: Tensor,
    decoder: ReconstructionDecoder = ReconstructionDecoder(),
) -> Rebuilt:
    """Attack the output of a head, and measure the rebuilt inputs.

    Args:
        head: the known head, or the attacker's guess.
        public: inputs of the same kind that the attacker has.
        values: observed output of the true head, for private examples.
        inputs: the true inputs of these examples.
        decoder: settings of the attack.
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
    decoder: ReconstructionDecoder = ReconstructionDecoder(steps=300, batch_size=128),
) -> nn.Module:
    """Return a head of the attacker's own, trained to fit the server's part.

    Costs O(d²) a step for d numbers an example.

    Args:
        make: returns a new module of the architecture that the attacker assumes.
        tail: the server's part, which is not changed; None if it does not end with the loss.
        loss: loss of the outputs and the targets.
        public: inputs and their targets.
        values: observed output of the true head.
        decoder: settings of the training.

    Raises:
        ValueError: there is no tail; the attacker then needs pairs of inputs and outputs of the
            head.
    """
    if tail is None:
        raise ValueError(
            "a shadow head is trained through the server's part and the loss, but after two cuts "
            "the loss is with the clients: without the head, an attacker needs pairs of inputs "
            "and activations"
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
    """Return mean and covariance of the rows."""
    flat = values.flatten(1)
    return flat.mean(dim=0), flat.T.cov()


@contextmanager
def _seeded(seed: int, purpose: str) -> Iterator[None]:
    """Context manager: seeds torch's global generator inside, and restores it afterwards."""
    before = generators_state()
    seed_generators(seed, purpose)
    try:
        yield
    finally:
        restore_generators(before)
