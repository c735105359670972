"""Models that are chains of layers, and their division into stages of neighbouring layers.

    l_L(… l_2(l_1(x)) …): an `nn.Sequential`, or a module that calls its children in their order

Whether a model is a chain is found out by a comparison of outputs and gradients. A division is a
range of layers for each stage. The best division, which minimises the cost of the most expensive
stage, is found exactly, in O(stages x layers^2) (`divided_layers`).

Source: the linear partition problem, Skiena 2020, "The Algorithm Design Manual", section 10.7.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from dure.contracts.fresh_model import examples_for, unused_copy
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.errors import PlanError, described
from dure.machine.devices import device_of_model, synchronize, to_device
from dure.parallel.threads import batch_trees
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.tasks.modes import in_mode, perturbed

WORK_OF_AN_ELEMENT = 10
"""Operations for an element of a layer's output, in addition to the counted products."""


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a chain: a module's children in order, with each Sequential opened."""
    layers: list[nn.Module] = []
    # Not by `children`: a Sequential may have the same layer twice, which is called twice.
    for child in model if isinstance(model, nn.Sequential) else model.children():
        # Only Sequentials are opened: other modules may call their children in any way.
        layers += layers_of(child) if isinstance(child, nn.Sequential) else [child]
    return layers


def check_chain(task: Task, model: nn.Module, stages: int) -> None:
    """Check that the model is a chain of layers that `stages` threads can divide.

    The layers of a chain, called in order, compute the same outputs and parameter gradients as the
    model, in training mode, on two examples. Raises PlanError, a ValueError, if the model is no
    chain, and ValueError for too few layers or a parameter that two layers share.
    """
    whole = perturbed(unused_copy(model, task, 0), "chain")
    chain = perturbed(unused_copy(model, task, 0), "chain")
    layers = layers_of(chain)
    some = torch.arange(min(2, len(task.train)))
    inputs, _ = to_device(examples_for(task)[0].batch(some), device_of_model(whole))
    before = generators_state()
    wrong = "compute something else"
    try:
        # Layers may write into inputs: each pass has a copy.
        expected = _tried(whole, whole, copied(inputs))
        found = _tried(chain, partial(run_layers, layers), copied(inputs))
        if _same(expected.outputs, found.outputs):
            wrong = "" if _near(expected.gradients, found.gradients) else "have other gradients"
    except Exception as error:
        wrong += f" ({described(error)})".replace("\n", " ")
    finally:
        restore_generators(before)
    if wrong or not layers:
        raise PlanError(
            "the model is not a chain of its layers: its children applied one after the other "
            f"{wrong}; make it an nn.Sequential"
        )
    if stages > len(layers):
        raise ValueError(
            f"{stages} threads cannot divide {len(layers)} layers: each needs at least one"
        )
    _check_nothing_is_shared(layers, stages)


class _Tried(NamedTuple):
    outputs: Any
    gradients: list[Tensor | None]


def _tried(model: nn.Module, forward: Callable[[Any], Any], inputs: Any) -> _Tried:
    """Return outputs in training, and the gradients of a sum of them with fixed weights."""
    model.train()
    # With the same seed both passes draw the same dropout, and the same weights.
    seed_generators(0, "chain")
    outputs = forward(inputs)
    ends = [leaf for leaf in _tensors(outputs) if leaf.requires_grad]
    # Effects of a forward pass on gradients (detach, no_grad, hooks) show in the backward pass.
    if ends:
        torch.autograd.backward(ends, [torch.randn_like(end) for end in ends])
    return _Tried(outputs, [parameter.grad for parameter in model.parameters()])


def _same(expected: Any, found: Any) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(tree_leaves(expected), tree_leaves(found), strict=True)
    )


def _near(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> bool:
    """Return whether gradients agree, except for the rounding of sums in another order."""
    return all(_is_near(one, other) for one, other in zip(expected, found, strict=True))


def _is_near(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    dense, like = one.to_dense(), other.to_dense()
    largest = float(dense.abs().max()) if dense.numel() else 0.0
    return torch.allclose(dense, like, rtol=1e-4, atol=1e-4 * largest, equal_nan=True)


def _check_nothing_is_shared(layers: Sequence[nn.Module], stages: int) -> None:
    owners: dict[int, int] = {}
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            other = owners.setdefault(id(parameter), number)
            if other != number and stages > 1:
                raise ValueError(
                    f"layers {other} and {number} share a parameter, which two threads cannot train"
                )


def run_layers(layers: Iterable[nn.Module], inputs: Any) -> Any:
    """Return the output of the layers, called in order."""
    for layer in layers:
        inputs = layer(inputs)
    return inputs


@torch.no_grad()
def counted_costs(layers: Sequence[nn.Module], examples: Examples) -> list[float]:
    """Return the floating-point operations of each layer for an example, forward only."""
    hidden = _first(examples, 1, layers)
    costs = []
    for layer in layers:
        # In evaluation mode nothing draws, and no running statistics change.
        with in_mode(layer, training=False), FlopCounterMode(display=False) as counter:
            hidden = layer(hidden)
        elements = sum(leaf.numel() for leaf in tree_leaves(hidden) if isinstance(leaf, Tensor))
        costs.append(float(counter.get_total_flops()) + WORK_OF_AN_ELEMENT * elements)
    return costs


@torch.no_grad()
def find_inplace_layers(layers: Sequence[nn.Module], examples: Examples) -> list[bool]:
    """Return which layers write into their inputs, in evaluation or by their `inplace` flags."""
    hidden = copied(_first(examples, 1, layers))
    found = []
    for layer in layers:
        # torch counts the writes to a tensor in `_version`.
        before = [(tensor, tensor._version) for tensor in _tensors(hidden)]
        with in_mode(layer, training=False):
            hidden = layer(hidden)
        wrote = any(tensor._version != version for tensor, version in before)
        # Some layers, such as dropout, write only in training, but have an `inplace` flag.
        found.append(wrote or any(getattr(module, "inplace", False) for module in layer.modules()))
    return found


def measured_costs(
    layers: Sequence[nn.Module], examples: Examples, size: int, repeats: int = 3
) -> list[float]:
    """Return the seconds of each layer for `size` examples, forward and backward.

    The time is the best of `repeats`.
    """
    hidden = _first(examples, size, layers)
    device = device_of_model(nn.ModuleList(layers))
    costs = []
    for layer in layers:
        # the best of several, because other processes may use the cores
        seconds = []
        with in_mode(layer, training=False):
            for _ in range(repeats):
                given = copied(hidden)
                started = time.perf_counter()
                outputs = layer(given)
                ends = _tensors(outputs)
                ones = [torch.ones_like(end) if end.requires_grad else None for end in ends]
                batch_trees.backward(outputs, ones)
                synchronize(device)
                seconds.append(time.perf_counter() - started)
        # The measurement must not leave gradients.
        layer.zero_grad(set_to_none=True)
        hidden = batch_trees.detached(outputs)
        costs.append(min(seconds))
    return costs


def _first(examples: Examples, count: int, layers: Sequence[nn.Module]) -> Any:
    """Return the inputs of the first `count` examples, on the device of the layers."""
    inputs, _ = examples.batch(torch.arange(min(count, len(examples))))
    return to_device(inputs, device_of_model(nn.ModuleList(layers)))


def copied(tree: Any) -> Any:
    """Return the same values in new memory, for a layer that writes into its inputs."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def divided_layers(costs: Sequence[float], stages: int) -> list[range]:
    """Return the layers of each stage that minimise the cost of the most expensive stage.

    A stage has neighbouring layers, at least one.
    """
    n = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # least[s][j]: the smallest possible cost of the most expensive of s stages over the first j
    # layers; the last of these stages begins at layer cut[s][j].
    least = [[math.inf] * (n + 1) for _ in range(stages + 1)]
    cut = [[0] * (n + 1) for _ in range(stages + 1)]
    least[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, n + 1):
            # the previous stages have at least one layer each
            for start in range(stage - 1, end):
                dearest = max(least[stage - 1][start], sums[end] - sums[start])
                if dearest < least[stage][end]:
                    least[stage][end] = dearest
                    cut[stage][end] = start
    ranges = []
    end = n
    for stage in range(stages, 0, -1):
        ranges.append(range(cut[stage][end], end))
        end = cut[stage][end]
    return ranges[::-1]
