"""Kinds of tensors that a model may have: tensors that can be saved and sent.

Training in a single process reads and writes any tensor that torch knows. Checkpoints and run
folders contain dense tensors; ranks, clients and servers also add, compare and send tensors, for
which torch lacks functions for exotic dtypes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_SENT = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def check_supported(model: nn.Module, sent: bool) -> None:
    """Raise ValueError for a tensor of the model that cannot be saved or sent.

    sent: whether several processes have the model.
    """
    for name, parameter in model.named_parameters():
        _check(f"the parameter {name}", parameter, sent)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"the buffer {name} is on the meta device, where it has no values")
        _check(f"the buffer {name}", buffer, sent)
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} of the model's state_dict is a {type(value).__name__}, but run folders "
                "can contain only tensors: return a tensor from get_extra_state"
            )


def _check(what: str, tensor: Tensor, sent: bool) -> None:
    if is_lazy(tensor):
        return
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise ValueError(
            f"{what} is {kind}, but only dense tensors can be saved and sent: store its parts, "
            "such as indices and values, and build it in the forward pass"
        )
    if sent and tensor.dtype not in _SENT:
        raise ValueError(
            f"{what} is {tensor.dtype}, which only single-worker supports: store it in another "
            "dtype, and convert it in the forward pass"
        )
