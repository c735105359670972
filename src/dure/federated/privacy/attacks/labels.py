"""Labels from the last layer: how many examples of each class an update was made of.

Cross-entropy of n examples with scores W h + b: the gradient by b is, class by class,

    g_c = (1/n) sum over i of (p_ic - y_ic)        so        s_c = mean of p_ic - g_c

is the share of class c. Whoever sees g (the update over -lr and the number of steps) needs only the
mean of the predictions p, and has the model: it predicts for inputs of its own, at the weights
before and after training. With public examples of known classes, P_jc = mean of p_c over examples
of class j, the share follows from

    g = P^T s - s,   sum of s = 1                  least squares, negative shares set to 0

Without any, all rows of P are the predictions for noise. Without a bias the rows of the gradient by
W stand in for g: sum_j dW_cj = g_c · (mean of sum_j h_j), where that mean is the model's own for
the attacker's inputs. Counts are the shares times n, rounded so that they add up to n.

One example alone: its class is the only one with g_c < 0 (iDLG), whatever P is.

Exact for one step where P is right, such as at weights of 0; an estimate after several steps.

Cost: a few forward passes.

Sources: B. Zhao, K. R. Mopuri, H. Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020;
A. Wainakh et al., "User-Level Label Leakage from Gradients in Federated Learning", PETS 2022;
H. Yin et al., "See through Gradients", CVPR 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.federated.privacy.attacks.seen import Model, Seen, mean_loss

FEW = 512
"""Public examples that are looked at, at the most."""


class Public(NamedTuple):
    """Examples that the attacker has of its own. labels: None where it made the inputs up."""

    inputs: Any
    labels: Tensor | None


@dataclass(frozen=True)
class LastLayer:
    """A linear layer whose outputs are the model's. weight, bias: the names of its parameters."""

    module: nn.Linear
    weight: str
    bias: str | None


def last_layer(model: Model, seen: Seen, inputs: Tensor) -> LastLayer:
    """The layer that gives the scores, found by what it gives for these inputs.

    Raises ValueError where the scores come from something else, or the loss is no cross-entropy.
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


def _check_loss(model: Model, outputs: Tensor) -> None:
    """Raises ValueError unless the loss is a cross-entropy with the same weight for each class."""
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


def label_shares(model: Model, seen: Seen, public: Public) -> Tensor:
    """The share of each class in what an update was made of, float64 of shape (classes,).

    Raises ValueError where `last_layer` does.
    """
    layer = last_layer(model, seen, _some(public.inputs))
    measured = (
        _by_bias(layer, seen) if layer.bias is not None else _by_weight(model, layer, seen, public)
    )
    if seen.examples == 1 and seen.steps == 1:
        # Of one example the sign alone tells, whatever the model predicts.
        return nn.functional.one_hot(measured.argmin(), len(measured)).double()
    return _solved(measured, _predictions(model, seen, public))


def label_counts(shares: Tensor, examples: int) -> Tensor:
    """Shares as whole numbers that add up to `examples`, int64: the largest remainders go up."""
    wanted = shares * examples
    counts = wanted.floor().long()
    missing = examples - int(counts.sum())
    order = (wanted - counts).argsort(descending=True, stable=True)
    counts[order[: max(missing, 0)]] += 1
    return counts


def labels_of(counts: Tensor) -> Tensor:
    """As many labels of each class as `counts` says, in order."""
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def share_right(counts: Tensor, true: Tensor) -> float:
    """The share of labels that are right: the overlap of two counts of the same examples."""
    return float(torch.minimum(counts, true).sum()) / max(int(true.sum()), 1)


def _by_bias(layer: LastLayer, seen: Seen) -> Tensor:
    assert layer.bias is not None
    return seen.gradient[layer.bias].double()


def _by_weight(model: Model, layer: LastLayer, seen: Seen, public: Public) -> Tensor:
    """As the gradient of a bias would be. Its sign is right where the layer's inputs are not
    negative."""
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
def _predictions(model: Model, seen: Seen, public: Public) -> Tensor:
    """P, of shape (classes, classes): before and after training, in the mean."""
    inputs = _some(public.inputs)
    found = [
        model.outputs(state, inputs).double().softmax(dim=1) for state in (seen.state, seen.after)
    ]
    # One step is made at the weights before it.
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
    """s with (P^T - I) s = g, sum of s = 1, by least squares; negative shares are set to 0."""
    classes = len(measured)
    # The sum is certain, so it weighs more than what is measured.
    rows = torch.cat(
        [
            predicted.T - torch.eye(classes, dtype=torch.float64, device=measured.device),
            torch.full((1, classes), 10.0, dtype=torch.float64, device=measured.device),
        ]
    )
    wanted = torch.cat([measured, measured.new_full((1,), 10.0)])
    shares: Tensor = torch.linalg.lstsq(rows, wanted[:, None]).solution[:, 0].clamp(min=0)
    total = float(shares.sum())
    # Noise may leave nothing: then all classes are as likely.
    return shares / total if total > 0 else torch.full_like(shares, 1 / classes)


def _some(inputs: Any) -> Any:
    return inputs[:FEW]


def counts_of(labels: Sequence[int] | Tensor, classes: int) -> Tensor:
    """How many of each class."""
    return torch.bincount(torch.as_tensor(labels), minlength=classes)
