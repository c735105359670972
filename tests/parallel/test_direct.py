"""Gradients computed where they leave from: the same bits as autograd's own, whatever else happens
to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dure.parallel.gradients_into_buckets import GradientsIntoBuckets

WIDTH = 1024
INPUTS = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers with weights of 4 MB, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, 3),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(self.two(torch.tanh(self.one(inputs))))
        return result


def penalised(net: Net) -> Tensor:
    inputs = INPUTS.clone().requires_grad_()
    loss = net(inputs).square().mean()
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + slope.square().sum()


def halved(net: Net) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net(INPUTS).float().square().mean()


LOSSES: dict[str, tuple[Callable[[Net], Tensor], bool]] = {
    "rows": (lambda net: net(INPUTS).square().mean(), True),
    "sequences": (lambda net: net(INPUTS.view(2, 4, WIDTH)).square().mean(), True),
    "checkpointed": (
        lambda net: checkpoint(net, INPUTS, use_reentrant=False).square().mean(),
        True,
    ),
    "two uses": (lambda net: (net(INPUTS) + net(2 * INPUTS)).square().mean(), False),
    "weight decay in the loss": (
        lambda net: net(INPUTS).square().mean() + net.two.weight.square().mean(),
        False,
    ),
    "a penalty on slopes": (penalised, False),
    "autocast": (halved, False),
}


def prepared(net: Net) -> tuple[GradientsIntoBuckets, dict[int, Tensor]]:
    places = {
        id(parameter): torch.full_like(parameter, torch.nan) for parameter in net.parameters()
    }
    return GradientsIntoBuckets(
        net.parameters(), lambda parameter: places[id(parameter)].detach()
    ), places


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_have_the_bits_of_autograd_and_where_that_can_be_their_place(name: str) -> None:
    net, (loss, can_be) = Net(), LOSSES[name]
    loss(net).backward()  # type: ignore[no-untyped-call]
    expected = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    direct, places = prepared(net)
    result = loss(net)
    direct.prepare([result])
    result.backward()  # type: ignore[no-untyped-call]
    for parameter, value in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert value is not None
        assert torch.equal(parameter.grad, value)
    at_its_place = [
        w.grad.data_ptr() == places[id(w)].data_ptr() for w in (net.one.weight, net.two.weight)
    ]  # type: ignore[union-attr]
    assert at_its_place[1] == can_be
    assert net.out.weight.grad.data_ptr() != places[id(net.out.weight)].data_ptr(), (
        "short ones are left alone"
    )  # type: ignore[union-attr]


def test_a_gradient_that_is_asked_for_by_itself_or_added_to_is_left_to_autograd() -> None:
    net = Net()
    direct, places = prepared(net)
    loss = net(INPUTS).square().mean()
    direct.prepare([loss])
    (gradient,) = torch.autograd.grad(loss, net.two.weight, retain_graph=True)
    assert net.two.weight.grad is None
    assert places[id(net.two.weight)].isnan().all()
    loss.backward(retain_graph=True)
    assert net.two.weight.grad is not None
    assert torch.equal(net.two.weight.grad, gradient)
    loss.backward()
    assert torch.equal(net.two.weight.grad, 2 * gradient)


def test_a_hook_of_the_user_has_its_way() -> None:
    net = Net()
    direct, _ = prepared(net)
    net.two.weight.register_hook(lambda gradient: 2 * gradient)
    plain, doubled = Net(), net
    plain(INPUTS).square().mean().backward()
    loss = doubled(INPUTS).square().mean()
    direct.prepare([loss])
    loss.backward()
    assert net.two.weight.grad is not None
    assert plain.two.weight.grad is not None
    assert torch.equal(net.two.weight.grad, 2 * plain.two.weight.grad)


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    net = Net()
    direct, places = prepared(net)

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, inputs: Tensor) -> Tensor:
            return inputs.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            raise OverflowError

    loss = net.out(net.two(Breaks.apply(net.one(INPUTS)))).sum()  # type: ignore[no-untyped-call]
    direct.prepare([loss])
    with pytest.raises(OverflowError):
        loss.backward()
    places[id(net.one.weight)].zero_()
    product = torch.mm(INPUTS.t(), INPUTS)
    assert product.data_ptr() not in {place.data_ptr() for place in places.values()}
