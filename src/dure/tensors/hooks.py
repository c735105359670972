"""Hooks that a user has registered on a parameter's gradient."""

from __future__ import annotations

from torch import Tensor


def has_hooks(parameter: Tensor) -> bool:
    """Return whether a hook sees, and may change, the gradient that autograd computes."""
    return bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )
