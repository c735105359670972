"""Digests of the model sent to a client: for binding a sum to a model, and for counting its use.

    agreed    SHA-256 of weights, buffers and extras, to the bit. Part of the context of a sum:
              clients that received different models cannot be in the same sum.
    spent     SHA-256 of the numbers of the weights alone. A client contributes once for each.

The second digest names the start of local training. A server that could give the same model two
names would get two sums of the same updates, whose difference reveals a client's update. The digest
therefore leaves out all data that leave the update unchanged, or change it by an amount that the
server can compute: round, run, attempt and participants; buffers (statistics of batch norm do not
enter a training step); extras (a control of SCAFFOLD moves the update by a known vector); the order
and the shapes in which weights travel, their dtype, the sign of a zero, and the payload of a NaN.

The digest does not stop a server that changes the last bit of a weight: that is another model with
nearly the same update. No digest can prevent this; noise can.

Cost: d numbers are hashed once for both digests, and read once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dure.protocol.messages import Assignment

_SIGN = {torch.float32: (np.int32, -(2**31)), torch.float64: (np.int64, -(2**63))}
"""By dtype: the integer type of its size, and the integer with the bits of -0.0."""


class ModelDigest(NamedTuple):
    """Both digests: `agreed` as hexadecimal digits, `spent` as 32 bytes."""

    agreed: str
    spent: bytes


def digest_of(asked: Assignment) -> str:
    """Return the `agreed` digest of an assignment's model.

    Weights, buffers and extras, to the bit.
    """
    return _agreed(asked, list(map(_hashed, asked.weights)))


def digests_of(asked: Assignment, trained: Sequence[Tensor] = ()) -> ModelDigest:
    """Return both digests of an assignment's model.

    `trained` are tensors of the dtypes in which the weights are trained, in the same order; empty
    if the weights travel in these dtypes.
    """
    hashes = list(map(_hashed, asked.weights))
    dtypes = [one.dtype for one in trained] or [one.dtype for one in asked.weights]
    spent = []
    for tensor, digest, dtype in zip(asked.weights, hashes, dtypes, strict=True):
        numbers = _numbers(tensor, dtype)
        spent.append(digest if numbers is tensor else _hashed(numbers))
    whole = hashlib.sha256(b"dure spent model 1\n" + b"".join(sorted(spent)))
    return ModelDigest(_agreed(asked, hashes), whole.digest())


def _agreed(asked: Assignment, weights: Sequence[bytes]) -> str:
    digest = hashlib.sha256(b"dure model 2\n")
    for hashes in (weights, map(_hashed, asked.buffers), map(_hashed, asked.extra)):
        digest.update(b"".join(hashes) + b"|")
    return digest.hexdigest()


def _hashed(tensor: Tensor) -> bytes:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def _numbers(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that training starts from, in a canonical form.

    The form is flat, float32, or float64 for numbers that float32 cannot represent; without -0.0,
    and with a single NaN. A tensor that has this form is returned itself.
    """
    cast = tensor if tensor.dtype == dtype else tensor.to(dtype)
    real = torch.view_as_real(cast.resolve_conj()) if cast.is_complex() else cast
    wide = real if real.dtype in _SIGN else real.double()
    flat = wide if wide.dim() == 1 else wide.reshape(-1)
    if flat.dtype == torch.float64:
        flat = _narrow(flat)
    if _is_plain(flat):
        return flat
    return torch.where(flat.isnan(), torch.nan, flat + 0.0)


def _narrow(wide: Tensor) -> Tensor:
    """Return the numbers as float32, if float32 represents all of them."""
    # A few numbers suffice to recognise most float64 models.
    for some in (wide[:1024], wide):
        if not bool(((some.float().double() == some) | some.isnan()).all()):
            return wide
    return wide.float()


def _is_plain(flat: Tensor) -> bool:
    """Return whether no number is -0.0 or NaN."""
    integers, negative_zero = _SIGN[flat.dtype]
    bits = flat.detach().cpu().contiguous().numpy().view(integers)
    # inf - inf in the sum may give a false NaN: the caller then canonicalises for nothing.
    return not bool((bits == negative_zero).any()) and not bool(flat.sum().isnan())
