"""Hooks that a user has put on a parameter's gradient."""

from __future__ import annotations

from torch import Tensor


def has_hooks(parameter: Tensor) -> bool:
    """Whether a hook sees, and may change, the parameter's gradient as autograd makes it."""
    return bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )
