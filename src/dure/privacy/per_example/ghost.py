"""Ghost norms: norms of per-example gradients without these gradients, in a single backward pass.

    forward     keeps the input of every layer that has weights
    backward    gives the gradient of every such layer's output, and none of weights
    norms       of each example, from these two (`dure.privacy.per_example.layers`)
    sum         of the clipped gradients, from the same two, with each example's factor

Embeddings of positions are looked up once for the whole batch, and added to every example. Here
each example gets a copy of the rows, so that it has a gradient of its own. Such embeddings are
detected in the proof, with a number of examples that differs from the number of positions.

Cost: a step of SGD, and the norms. Source: see `layers`; Bu et al. 2023 for the single backward
pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dure.privacy.per_example.clipping import (
    CannotClipError,
    ClippedSums,
    PerExampleClipping,
    count,
    factors,
    norms_of,
    trained,
)
from dure.privacy.per_example.layers import NAMES, RULES, ParameterContribution
from dure.privacy.per_example.losses import Each


class _Call(NamedTuple):
    """Call of a layer.

    version: of the input's memory, to detect changes in place. edge: the graph edge of the output's
    gradient, valid even if the output is changed in place later.
    """

    layer: nn.Module
    given: Tensor
    version: int
    edge: GradientEdge


class GhostClipping(PerExampleClipping):
    """Clipping by ghost norms, from inputs and output gradients of every layer.

    shared: names of embeddings that are looked up once for the whole batch; None detects them.
    Raises CannotClipError for a model with trained parameters in layers of other kinds.
    """

    name = "ghost norms"

    def __init__(self, model: nn.Module, each: Each, shared: frozenset[str] | None = None) -> None:
        self.model = model
        self.each = each
        self.parameters = trained(model)
        self.layers = _layers(model)
        self._names = {layer: name for name, layer in model.named_modules()}
        self._looks = shared is None
        self.shared = set(shared or ())

    def clipped(self, inputs: Any, targets: Any, clip: float) -> ClippedSums:
        examples = count(targets)
        with self._listening(examples) as calls:
            losses = self.each(self.model(inputs), targets)
        parts = self._parts(losses, calls)
        found = [part.norms() for part in parts.values()]
        norms = norms_of(found) if found else losses.detach().double() * 0
        each = factors(norms, clip).to(losses.dtype)
        sums = [
            parts[parameter].total(each.to(parameter.dtype))
            if parameter in parts
            else torch.zeros_like(parameter)
            for parameter in self.parameters
        ]
        return ClippedSums(sums, norms, losses.detach())

    @contextmanager
    def _listening(self, examples: int) -> Iterator[list[_Call]]:
        """Context manager: yields the list of the layers' calls inside."""
        calls: list[_Call] = []

        def note(layer: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.requires_grad:
                return output
            if len(given) != 1 or not isinstance(given[0], Tensor):
                raise CannotClipError("a layer is called with other arguments than its input")
            inputs = given[0].detach()
            if self._is_shared(layer, inputs, examples):
                inputs = inputs.reshape(1, -1).expand(examples, -1)
                output = output.reshape(1, -1, output.shape[-1]).expand(examples, -1, -1)
            if len(inputs) != examples or len(output) != examples:
                raise CannotClipError("a layer is called with a first dimension of other things")
            calls.append(_Call(layer, inputs, inputs._version, get_gradient_edge(output)))
            return output

        hooks = [layer.register_forward_hook(note) for layer in self.layers]
        try:
            yield calls
        finally:
            for hook in hooks:
                hook.remove()

    def _is_shared(self, layer: nn.Module, indices: Tensor, examples: int) -> bool:
        """Return whether the layer is an embedding of the whole batch: indices (T,) or (1, T)."""
        if not isinstance(layer, nn.Embedding):
            return False
        name = self._names[layer]
        whole = indices.ndim == 1 or (indices.ndim == 2 and len(indices) == 1)
        if self._looks and whole and len(indices) != examples:
            self.shared.add(name)
        return whole and name in self.shared

    @torch.no_grad()
    def _parts(self, losses: Tensor, calls: list[_Call]) -> dict[Tensor, ParameterContribution]:
        """Return the gradient part of every parameter that the losses depend on."""
        if not losses.requires_grad or not calls:
            return {}
        with torch.enable_grad():
            outgoing = torch.autograd.grad(
                losses.sum(), [call.edge for call in calls], allow_unused=True
            )
        parts: dict[Tensor, ParameterContribution] = {}
        for call, gradient in zip(calls, outgoing, strict=True):
            if gradient is None:
                continue
            if call.given._version != call.version:
                raise CannotClipError("the input of a layer is changed in place after its use")
            for parameter, part in RULES[type(call.layer)](call.layer, call.given, gradient):
                if parameter.requires_grad:
                    known = parts.get(parameter)
                    parts[parameter] = part if known is None else known.with_more(part)
        return parts


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers with trained weights. Raises CannotClipError for an unsupported layer."""
    found = []
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if not any(parameter.requires_grad for parameter in own.values()):
            continue
        if type(module) not in RULES or not set(own) <= set(NAMES):
            raise CannotClipError(
                f"the per-example norms of {type(module).__name__} are not implemented"
            )
        found.append(module)
    return found
