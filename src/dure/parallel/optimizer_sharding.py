"""Check whether an optimizer can be divided over ranks: by whole parameters, or inside parameters.

    parameter-wise   each parameter is updated from its own gradient and state. Not so: LBFGS, and
                     optimizers that scale all updates by a norm over all gradients. Pipeline
                     stages need this property.
    element-wise     each element of a parameter is, too. Not so: optimizers that use a whole
                     tensor, such as a norm, a factored moment or an orthogonal update. ZeRO needs
                     this property.

The properties of torch's optimizers are known. Other optimizers are tried on a small matrix: the
updates of the whole matrix are compared with the updates of its pieces. An optimizer that cannot
be tried is not divided inside parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from dure.errors import described, text_of

_ELEMENT_WISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
# the last two are not in every torch that dure runs with
_PARAMETER_WISE = _ELEMENT_WISE | {
    optim.SparseAdam,
    getattr(optim, "Adafactor", optim.SparseAdam),
    getattr(optim, "Muon", optim.SparseAdam),
}


def check_element_wise(optimizer: Optimizer) -> None:
    """Check that an optimizer updates every element of a tensor alone.

    Raises ValueError otherwise.
    """
    if type(optimizer) in _ELEMENT_WISE:
        return
    problem = _problem(
        optimizer, lambda matrix: torch.split(matrix.reshape(-1), [7, 17]), "pieces of a matrix"
    )
    if problem is not None:
        raise ValueError(
            f"{type(optimizer).__name__} cannot be divided element by element: {problem}; use an "
            "optimizer that updates every element independently, such as SGD or AdamW, or data "
            "parallel, where every rank has whole tensors"
        )


def check_parameter_wise(optimizer: Optimizer) -> None:
    """Check that an optimizer updates every parameter alone. Raises ValueError otherwise."""
    if type(optimizer) in _PARAMETER_WISE:
        return
    problem = _problem(
        optimizer, lambda matrix: [matrix[:2], matrix[2:]], "parameters apart", together=True
    )
    if problem is not None:
        raise ValueError(
            f"{type(optimizer).__name__} cannot be divided over stages: {problem}; use an "
            "optimizer that updates every parameter independently, such as SGD or AdamW, or data "
            "parallel, where every rank has all of them"
        )


def is_element_wise(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is an element-wise optimizer of torch."""
    return type(optimizer) in _ELEMENT_WISE


def check_steps_apart(optimizer: Any) -> None:
    """Check that an optimizer's state can be offloaded. Raises ValueError otherwise.

    With offloading each parameter is updated while the state of the other parameters is elsewhere.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"the state of {name} cannot be offloaded: it is not a torch.optim.Optimizer, so dure "
            "does not know where its state is"
        )
    try:
        check_parameter_wise(optimizer)
    except ValueError as error:
        raise ValueError(
            f"the state of {name} cannot be offloaded, because parameters are then updated one "
            f"after another: {error}"
        ) from error


def _problem(
    optimizer: Optimizer,
    cut: Callable[[Tensor], Sequence[Tensor]],
    what: str,
    together: bool = False,
) -> str | None:
    """Return how separate optimizers for the pieces differ from a joint optimizer; None if equal.

    cut: divides a tensor into pieces. what: a phrase for the pieces, for the message. together: the
    joint optimizer has the pieces as parameters; otherwise it has the whole matrix.
    """
    # A fixed seed, so that the answer is the same in every run; three steps, because state begins
    # at zero.
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 6, 4, generator=generator, dtype=torch.float64)
    whole = [nn.Parameter(piece.clone()) for piece in (cut(start) if together else [start])]
    pieces = [nn.Parameter(piece.clone()) for piece in cut(start)]
    try:
        _steps(
            optimizer,
            [whole],
            [cut(gradient) if together else [gradient] for gradient in gradients],
        )
        _steps(optimizer, [[piece] for piece in pieces], [cut(gradient) for gradient in gradients])
    except Exception as error:
        needs_closure = isinstance(error, TypeError) and "closure" in text_of(error)
        if together and not needs_closure:
            return None  # a user-defined optimizer: most update each parameter alone
        return f"trying it out failed ({described(error)})"
    if torch.equal(_joined(whole), _joined(pieces)):
        return None
    return f"it updates {what} differently than all together"


def _joined(parts: Sequence[nn.Parameter]) -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _steps(
    optimizer: Optimizer, owned: Sequence[list[nn.Parameter]], gradients: Sequence[Sequence[Tensor]]
) -> None:
    """Step optimizers of this kind, each with the parameters that it owns.

    gradients: for each step, the gradients of all parameters in `owned`.
    """
    # Without settings that are tensors, such as a learning rate: the probes would share them.
    settings = {
        key: value for key, value in optimizer.defaults.items() if not isinstance(value, Tensor)
    }
    probes: list[Any] = [type(optimizer)(parameters, **settings) for parameters in owned]
    for given in gradients:
        for parameter, gradient in zip(
            [p for parameters in owned for p in parameters], given, strict=True
        ):
            parameter.grad = gradient.clone()
        for probe in probes:
            probe.step()
