"""Label inference: number of examples of each class in an update, from the last layer.

For a cross-entropy of n examples with scores W h + b, the gradient by b is, class by class,

    g_c = (1/n) sum over i of (p_ic - y_ic)        so        s_c = mean of p_ic - g_c

is the share of class c. An attacker that observes g (the update over -lr and the number of steps)
needs only the mean of the predictions p. The attacker has the model and predicts for public inputs,
at the weights before and after training. With public examples of known classes, and P_jc = mean of
p_c over examples of class j, the shares follow from

    g = P^T s - s,   sum of s = 1                  least squares, negative shares set to 0

Without public examples, all rows of P are the predictions for noise. Without a bias, the rows of
the gradient by W replace g: sum_j dW_cj = g_c · (mean of sum_j h_j), where that mean is the model's
own for the attacker's inputs. Counts are the shares times n, rounded so that they add up to n.

For a single example the class is the only one with g_c < 0 (iDLG), for every P.

The result is exact for a single step if P is right, such as at weights of 0, and an estimate after
several steps.

Cost: a few forward passes.

Sources: B. Zhao, K. R. Mopuri, H. Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020; A.
Wainakh et al., "User-Level Label Leakage from Gradients in Federated Learning", PETS 2022; H. Yin
et al., "See through Gradients", CVPR 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.federated.attacks.observation import AttackedModel, ObservedUpdate, mean_loss

FEW = 512
"""Largest number of public examples in use."""


class PublicExamples(NamedTuple):
    """The attacker's own examples.

    Args:
        inputs: inputs of shape (n, ...).
        labels: class of each; None for invented inputs.
    """

    inputs: Any
    labels: Tensor | None


@dataclass(frozen=True)
class LastLayer:
    """Linear layer whose outputs are the model's outputs.

    Args:
        module: the layer.
        weight: name of the weight.
        bias: name of the bias; None without a trained bias.
    """

    module: nn.Linear
    weight: str
    bias: str | None


def last_layer(model: AttackedModel, seen: ObservedUpdate, inputs: Tensor) -> LastLayer:
    """Return the linear layer that computes the scores, found by comparing layer outputs.

    Raises ValueError if no such layer exists, or the loss is not a cross-entropy.
    """
    caught: dict[str, Tensor] = {}

    def catch(name: str) -> Any:
        def keep(module: nn.Module, given: Any, output: Tensor) -> None:
            caught[name] = output

        return keep

    linear = {
        name: module for name, module in model.module.named_modules() if type(module) is nn.Linear
    }
    hooks = [module.register_forward_hook(catch(name)) for name, module in linear.items()]
    try:
        with torch.no_grad():
            outputs = model.outputs(seen.state, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[1] < 2:
        raise ValueError(
            "labels are read from the scores of classes, which the model does not give"
        )
    _check_loss(model, outputs)
    for name, module in linear.items():
        within = f"{name}." if name else ""
        if caught.get(name) is outputs and f"{within}weight" in seen.delta:
            bias = f"{within}bias" if f"{within}bias" in seen.delta else None
            return LastLayer(module, f"{within}weight", bias)
    raise ValueError("labels are read from a linear layer that gives the scores, and there is none")


def _check_loss(model: AttackedModel, outputs: Tensor) -> None:
    """Check that the loss is a cross-entropy with equal class weights; raises ValueError if not."""
    scores = outputs.detach().clone().requires_grad_()
    n, classes = scores.shape
    targets = torch.arange(n, device=scores.device) % classes
    try:
        loss = mean_loss(model.loss, scores, targets)
        (found,) = torch.autograd.grad(loss, scores)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"labels are read from a cross-entropy, and the loss is not ({error})"
        ) from error
    one_hot = nn.functional.one_hot(targets, classes)
    expected = (scores.detach().softmax(dim=1) - one_hot) / n
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-5):
        raise ValueError(
            "labels are read from a cross-entropy of equal classes, which the loss is not"
        )


def label_shares(model: AttackedModel, seen: ObservedUpdate, public: PublicExamples) -> Tensor:
    """Return the share of each class in an update, float64 of shape (classes,).

    Raises ValueError in the cases of `last_layer`.
    """
    layer = last_layer(model, seen, _some(public.inputs))
    measured = (
        _by_bias(layer, seen) if layer.bias is not None else _by_weight(model, layer, seen, public)
    )
    if seen.examples == 1 and seen.steps == 1:
        # For a single example the sign of the gradient gives the class, for any prediction.
        return nn.functional.one_hot(measured.argmin(), len(measured)).double()
    return _solved(measured, _predictions(model, seen, public))


def label_counts(shares: Tensor, examples: int) -> Tensor:
    """Return shares as int64 counts that add up to `examples`, by the largest remainders."""
    wanted = shares * examples
    counts = wanted.floor().long()
    missing = examples - int(counts.sum())
    order = (wanted - counts).argsort(descending=True, stable=True)
    counts[order[: max(missing, 0)]] += 1
    return counts


def labels_of(counts: Tensor) -> Tensor:
    """Return an int64 tensor with `counts[c]` labels of each class c, in ascending order."""
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def share_right(counts: Tensor, true: Tensor) -> float:
    """Return the fraction of right labels: the overlap of two counts of the same examples."""
    return float(torch.minimum(counts, true).sum()) / max(int(true.sum()), 1)


def _by_bias(layer: LastLayer, seen: ObservedUpdate) -> Tensor:
    assert layer.bias is not None
    return seen.gradient[layer.bias].double()


def _by_weight(
    model: AttackedModel, layer: LastLayer, seen: ObservedUpdate, public: PublicExamples
) -> Tensor:
    """Return an estimate of the bias's gradient from the weight's, for a layer without a bias.

    The sign is right if the layer's inputs are not negative.
    """
    caught: list[Tensor] = []
    hook = layer.module.register_forward_pre_hook(lambda module, given: caught.append(given[0]))
    try:
        with torch.no_grad():
            model.outputs(seen.state, _some(public.inputs))
    finally:
        hook.remove()
    scale = caught[0].double().sum(dim=1).mean()
    return seen.gradient[layer.weight].double().sum(dim=1) / scale


@torch.no_grad()
def _predictions(model: AttackedModel, seen: ObservedUpdate, public: PublicExamples) -> Tensor:
    """Return P of shape (classes, classes): mean of the predictions before and after training."""
    inputs = _some(public.inputs)
    found = [
        model.outputs(state, inputs).double().softmax(dim=1) for state in (seen.state, seen.after)
    ]
    # A single step uses the weights before training.
    mean = found[0] if seen.steps == 1 else (found[0] + found[1]) / 2
    overall: Tensor = mean.mean(dim=0)
    if public.labels is None:
        return overall.expand(len(overall), -1)
    labels = public.labels[: len(mean)]
    rows = [
        mean[labels == c].mean(dim=0) if bool((labels == c).any()) else overall
        for c in range(len(overall))
    ]
    return torch.stack(rows)


def _solved(measured: Tensor, predicted: Tensor) -> Tensor:
    """Return s of (P^T - I) s = g, sum of s = 1, by least squares; negative shares become 0."""
    classes = len(measured)
    # The sum is exact and the gradient is not, so the row of the sum has a larger weight.
    rows = torch.cat(
        [
            predicted.T - torch.eye(classes, dtype=torch.float64, device=measured.device),
            torch.full((1, classes), 10.0, dtype=torch.float64, device=measured.device),
        ]
    )
    wanted = torch.cat([measured, measured.new_full((1,), 10.0)])
    shares: Tensor = torch.linalg.lstsq(rows, wanted[:, None]).solution[:, 0].clamp(min=0)
    total = float(shares.sum())
    # Noise may make all shares negative: then all classes are equally likely.
    return shares / total if total > 0 else torch.full_like(shares, 1 / classes)


def _some(inputs: Any) -> Any:
    return inputs[:FEW]


def counts_of(labels: Sequence[int] | Tensor, classes: int) -> Tensor:
    """Return the number of labels of each class, of shape (classes,)."""
    return torch.bincount(torch.as_tensor(labels), minlength=classes)
