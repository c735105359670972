"""Digests of the model that a client is handed: what a sum is bound to, and what is spent with it.

    agreed    SHA-256 of weights, buffers and extras, to the bit. Server and clients put it into the
              context of a sum: who was told of another model is in no sum with the others.
    spent     SHA-256 of the numbers of the weights alone. A client contributes to it once.

The second digest names what local training starts from. A server that could give one model two
names would get two sums of the same updates, and their difference is one client's. So the digest
leaves out all that can be changed while the update stays what it was, or changes in a way that the
server can compute: round, run, attempt and participants; buffers (statistics of batch norm do not
enter a training step); extras (a control of SCAFFOLD moves the update by a known vector); the order
and the shapes in which weights travel, their dtype, the sign of a zero, and the payload of a NaN.

It does not stop a server that changes one weight by its last bit: that is another model, with
nearly the same update. No digest can; noise is the remedy.

Cost: d numbers are hashed once for both, and looked through once more.
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
"""By dtype: integers of its size, and the one with the bits of -0.0."""


class ModelDigest(NamedTuple):
    """agreed: hexadecimal digits. spent: 32 bytes."""

    agreed: str
    spent: bytes


def digest_of(asked: Assignment) -> str:
    """The digest of the model that was sent: weights, buffers and extras, to the bit."""
    return _agreed(asked, list(map(_hashed, asked.weights)))


def digests_of(asked: Assignment, trained: Sequence[Tensor] = ()) -> ModelDigest:
    """Both digests of the model that was sent.

    trained: tensors of the dtypes in which the weights are trained, in the same order.
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
    """The numbers that training starts from, in one form; the tensor itself where it has that form.

    The form: flat, of float32, or of float64 for numbers that float32 does not have; no -0.0, and
    one NaN.
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
    """The same numbers in float32, if it has all of them."""
    # Most models of float64 show it in their first numbers.
    for some in (wide[:1024], wide):
        if not bool(((some.float().double() == some) | some.isnan()).all()):
            return wide
    return wide.float()


def _is_plain(flat: Tensor) -> bool:
    """Whether no number is -0.0 or NaN."""
    integers, negative_zero = _SIGN[flat.dtype]
    bits = flat.detach().cpu().contiguous().numpy().view(integers)
    # A sum of finite numbers may be infinite, and is then looked at twice: that does no harm.
    return not bool((bits == negative_zero).any()) and not bool(flat.sum().isnan())
