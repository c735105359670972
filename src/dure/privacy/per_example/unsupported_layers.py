"""Checks for models that cannot be trained with differential privacy of examples, before any trial.

batch norm                  an output depends on all examples of its batch: group norm instead
running statistics          of the data, without noise: instance norm without them
embeddings                  with max_norm, which changes rows that are used; with
                            scale_grad_by_freq, which counts in the whole batch; sparse ones,
                            for noise is added to every row
hooks on gradients          of parameters and modules: they see those of a batch, or none
half precision, complex     norms of half precision may be too small, and then an example has more
                            influence than allowed
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from dure.privacy.per_example.clipping import trained
from dure.tensors.backward import has_hooks

_EXACT = (torch.float32, torch.float64)


def check_layers(model: nn.Module) -> None:
    """Raise ValueError, with the remedy, for a model that no way can train."""
    if not trained(model):
        raise ValueError("dp-sgd: the model has no parameter to train")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"dp-sgd: {name} has no shape before the first batch: give the layers their sizes"
            )
        if parameter.requires_grad and parameter.dtype not in _EXACT:
            raise ValueError(
                f"dp-sgd: {name} is {parameter.dtype}, but per-example norms are computed in "
                "float32 or float64: call float() on the model"
            )
        if parameter.requires_grad and has_hooks(parameter):
            raise ValueError(
                f"dp-sgd: {name} has a hook on its gradient, which would never run, or change it "
                f"after it was clipped: leave register_hook and "
                f"register_post_accumulate_grad_hook out, or change gradients in the optimizer"
            )
    for name, module in model.named_modules():
        reason = _reason(module)
        if reason is not None:
            raise ValueError(f"dp-sgd: {name or 'the model'} is {type(module).__name__}, {reason}")


def _reason(module: nn.Module) -> str | None:
    if module._backward_hooks or module._backward_pre_hooks:
        return "with a backward hook, which sees the gradients of a whole batch: leave it out"
    if isinstance(module, _InstanceNorm):
        if module.track_running_stats:
            return "which keeps statistics of the data without noise: leave track_running_stats out"
        return None
    if isinstance(module, _BatchNorm):
        return "which mixes the examples of a batch: use nn.GroupNorm instead"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.weight.requires_grad:
        if module.max_norm is not None:
            return "with max_norm, which changes rows without noise: leave max_norm out"
        if module.scale_grad_by_freq:
            return "with scale_grad_by_freq, which counts in the whole batch: leave it out"
        if module.sparse:
            return "with sparse gradients, but noise is added to every row: leave sparse out"
    return None
