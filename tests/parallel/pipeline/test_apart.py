"""Operations whose weight gradient is left for later find the gradients of autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dure.parallel.pipeline.program import StageProgram
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.split_backward import DeferredGradients, compute_now, split_operation
from dure.parallel.pipeline.stage import Microbatch, Stage
from dure.tasks.loss_shares import ComputedLoss, LossShare

aten = torch.ops.aten


def gradients(
    operation: Any, arguments: list[Any], remaining: DeferredGradients
) -> list[Tensor | None]:
    """Of all tensors among the arguments, twice added, as for two micro-batches."""
    leaves = [
        argument.detach().clone().requires_grad_()
        for argument in arguments
        if isinstance(argument, Tensor)
    ]
    given = iter(leaves)
    for _ in range(2):
        again = [
            next(given) if isinstance(argument, Tensor) else argument for argument in arguments
        ]
        (operation(*again).abs() ** 2).sum().backward()
        given = iter(leaves)
    for compute in remaining:
        with torch.no_grad():
            compute()
    return [leaf.grad for leaf in leaves]


def agree(operation: Any, arguments: list[Any]) -> None:
    """Left for later, and computed when backward comes to it."""
    remaining: DeferredGradients = []
    expected = gradients(operation, arguments, [])
    for later in (remaining.append, compute_now):
        place, deferred = split_operation(operation, later)
        assert deferred is not None
        assert isinstance(arguments[place], Tensor)
        found = gradients(deferred, arguments, remaining if later is not compute_now else [])
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    assert len(remaining) in (0, 2)


DTYPES = st.sampled_from([torch.float64, torch.complex128])


@given(
    st.lists(st.integers(1, 4), max_size=3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
    DTYPES,
)
def test_a_linear_layer(
    leading: list[int], ins: int, outs: int, biased: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(*leading, ins, dtype=dtype)
    weight = torch.randn(outs, ins, dtype=dtype)
    agree(aten.linear.default, [x, weight, *([torch.randn(outs, dtype=dtype)] if biased else [])])


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), DTYPES)
def test_a_product_with_a_weight(rows: int, ins: int, outs: int, dtype: torch.dtype) -> None:
    shapes = [(outs,), (rows, ins), (ins, outs)]
    agree(aten.addmm.default, [torch.randn(*shape, dtype=dtype) for shape in shapes])


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"), [(1, 0, 1, 1), (2, 1, 1, 2), (1, 2, 2, 1)]
)
def test_a_convolution(
    dimensions: int, stride: int, padding: int, dilation: int, groups: int
) -> None:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1](
        4, 6, 3, groups=groups, dtype=torch.float64
    )
    operation = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)[dimensions - 1]
    assert layer.bias is not None
    x = torch.randn(2, 4, *(7 for _ in range(dimensions)), dtype=torch.float64)
    settings = [[stride], [padding] * dimensions, [dilation], groups]
    agree(operation, [x, layer.weight.detach(), layer.bias.detach(), *settings])


def test_what_has_no_such_form_stays_with_autograd() -> None:
    agree(aten.linear.default, [torch.randn(3, 4), torch.randn(4)])
    complex_numbers = [
        torch.randn(*shape, dtype=torch.complex128) for shape in [(2, 4, 7), (6, 4, 3), (6,)]
    ]
    agree(aten.conv1d.default, [*complex_numbers, [1], [0], [1], 1])


def test_what_an_interrupted_step_has_left_is_not_added_to_the_next() -> None:
    """A backward pass that fails has left weight gradients that belong to no micro-batch yet."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            raise ArithmeticError("in the middle")

    remaining: DeferredGradients = []
    first = nn.Linear(3, 3)
    second = nn.Linear(3, 3)
    _, deferred = split_operation(aten.linear.default, remaining.append)
    assert deferred is not None
    fails = [True]

    class Module(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            hidden = deferred(x, first.weight, first.bias)
            hidden = Fails.apply(hidden) if fails[0] else hidden  # type: ignore[no-untyped-call]
            return (deferred(hidden, second.weight, second.bias),)

    program = StageProgram(Module(), inputs=(0,), received=(), leaving=(), shapes=(None,))
    structure = tree_flatten(torch.zeros(()))[1]
    stage = Stage(
        0,
        last=True,
        program_for=lambda n: program,
        structure_for=lambda n: structure,
        loss=lambda out, *_: ComputedLoss(out.sum(), 2.0),
        stream=RandomStream(0, False),
        remaining=remaining,
    )
    batch = Microbatch(2, LossShare(2.0, 2.0), lambda: (torch.ones(2, 3), None))

    def step() -> None:
        stage.begin(0)
        stage.forward(0, batch, [])
        stage.backward(0, batch, [])

    with pytest.raises(ArithmeticError, match="in the middle"):
        step()
    fails[0] = False
    step()
    found = second.weight.grad
    second.weight.grad = None
    step()
    assert found is not None
    assert second.weight.grad is not None
    assert torch.equal(found, second.weight.grad)


@pytest.mark.parametrize("name", ["linear", "addmm", "conv1d"])
def test_weights_that_are_frozen_watched_or_saved_elsewhere_are_as_in_autograd(name: str) -> None:
    shapes = {
        "linear": [(3, 4), (5, 4), (5,)],
        "addmm": [(5,), (3, 4), (4, 5)],
        "conv1d": [(3, 4, 7), (5, 4, 2), (5,)],
    }
    remaining: DeferredGradients = []
    for later in (compute_now, remaining.append):
        place, deferred = split_operation(getattr(aten, name).default, later)
        assert deferred is not None
        tensors = [torch.randn(*shape, requires_grad=True) for shape in shapes[name]]
        weight = tensors[place]
        seen = []

        def gradient(
            tensors: list[Tensor] = tensors, deferred: Any = deferred, weight: Tensor = weight
        ) -> Any:
            weight.grad = None
            with torch.autograd.graph.save_on_cpu():
                loss = deferred(*tensors).sum()
            loss.backward()
            while remaining:
                with torch.no_grad():
                    remaining.pop()()
            return weight.grad

        (right,) = torch.autograd.grad(getattr(aten, name).default(*tensors).sum(), [weight])
        torch.testing.assert_close(gradient(), right)
        handle = weight.register_hook(seen.append)
        torch.testing.assert_close(gradient(), right)
        assert len(seen) == 1
        handle.remove()
        assert gradient(tensors, deferred, weight.requires_grad_(False)) is None


def test_other_operations_have_no_such_form() -> None:
    assert split_operation(aten.relu.default, compute_now)[1] is None
