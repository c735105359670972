"""DP-SGD next to a plain step of SGD: what the clipping of single examples' gradients costs.

All compute the same: norms of the gradients of a batch's examples, the sum of the clipped ones,
noise, and a step of SGD. Batches are of 64 examples, always the same; sums are compared first.

    plain        forward, backward, step: no privacy
    dure         `dure.privacy.per_example`, as strategies use it
    ghost        ghost clipping by hand: norms from hooks, then a second backward pass of the
                 reweighted loss
    functional   torch.func: vmap over gradients
    looped       one example after another
    opacus       its hooks, if it is installed

Noise of all but dure is `torch.randn`; dure's comes from a keystream with a key of its own, and is
rounded to a grid (`dure.randomness.keystream`). It is also given apart: `noise_ms`, and the same
numbers by torch. Repetitions are interleaved; figures are medians of the time of a step.

    python benchmarks/dp_sgd.py --result result.json
    python benchmarks/dp_sgd.py --quick
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from outcome import give, takes_result
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dure.contracts.task import Task
from dure.privacy.dp_sgd import DPSGD
from dure.privacy.example_level import noised_mean
from dure.privacy.per_example.clipping import PerExampleClipping, trained
from dure.privacy.per_example.proof import choose
from dure.randomness.keystream import normal
from dure.randomness.secret import Secret
from dure.tasks.models import CNN, TwoNN

BATCH = 64
CLIP = 1.0
NOISE = 1.1
RATE = 0.1

Gradients = Callable[[nn.Module, Tensor, Tensor], list[Tensor]]
"""The sum of the clipped gradients of a batch, one tensor a parameter."""


def ghost(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Ghost clipping with two backward passes, as the papers have it."""
    kept: dict[nn.Module, Tensor] = {}
    squares = torch.zeros(len(inputs))
    hooks = []

    def note(layer: nn.Module, given: Any, output: Tensor) -> None:
        kept[layer] = given[0].detach()

        def norm(gradient: Tensor) -> None:
            squares.add_(_squares(layer, kept[layer], gradient))

        output.register_hook(norm)

    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            hooks.append(layer.register_forward_hook(note))
    losses = F.cross_entropy(model(inputs), targets, reduction="none")
    parameters = trained(model)
    first = next(layer for layer in model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d)))
    # Gradients of the first layer's bias alone: backward goes all the way, and forms no weights.
    assert isinstance(first.bias, Tensor)
    torch.autograd.grad(losses.sum(), first.bias, retain_graph=True)
    factors = (CLIP / squares.sqrt()).clamp(max=1.0)
    for hook in hooks:
        hook.remove()
    # The hooks on outputs run once more in this pass, on squares that nobody reads again.
    return list(torch.autograd.grad((losses * factors).sum(), parameters))


def _squares(layer: nn.Module, given: Tensor, outgoing: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        own = given.square().sum(1) * outgoing.square().sum(1)
        return own + outgoing.square().sum(1)
    assert isinstance(layer, nn.Conv2d)
    patches = F.unfold(given, layer.kernel_size, padding=layer.padding)  # type: ignore[arg-type]
    weights = torch.bmm(outgoing.flatten(2), patches.mT)
    return weights.square().sum((1, 2)) + outgoing.sum((2, 3)).square().sum(1)


def functional(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    names = [name for name, _ in model.named_parameters()]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(model, values, (one[None],))
        return F.cross_entropy(outputs, target[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, inputs, targets)
    squares = torch.stack([each[name].flatten(1).square().sum(1) for name in names]).sum(0)
    factors = (CLIP / squares.sqrt()).clamp(max=1.0)
    return [torch.tensordot(factors, each[name], 1) for name in names]


def looped(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    parameters = trained(model)
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for one, target in zip(inputs.split(1), targets.split(1), strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(one), target), parameters)
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        factor = (CLIP / norm).clamp(max=1.0)
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient * factor)
    return sums


def plain(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(F.cross_entropy(model(inputs), targets), trained(model)))


class Dure:
    """`dure.privacy.per_example`, chosen once as a learner does it."""

    def __init__(self, make: Callable[[], nn.Module], inputs: Tensor, targets: Tensor) -> None:
        task = Task(model=make, loss=F.cross_entropy, train=(inputs, targets))
        self.choice = choose(task, make(), task.train)
        self.way: PerExampleClipping | None = None

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        if self.way is None:
            self.way = self.choice.made(model)
        return self.way.clipped(inputs, targets, CLIP).sums


class Step:
    """A step of SGD whose gradient comes from `gradients`; noise: how it is added."""

    def __init__(self, model: nn.Module, gradients: Gradients, noise: str) -> None:
        self.model = model
        self.gradients = gradients
        self.noise = noise
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.secret = Secret.system()
        self.done = 0

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        sums = self.gradients(self.model, inputs, targets)
        if self.noise == "torch":
            sums = [(one + torch.randn_like(one) * (NOISE * CLIP)) / BATCH for one in sums]
        elif self.noise == "keystream":
            sums = noised_mean(sums, DPSGD(CLIP, NOISE), BATCH, self.secret, self.done)
        for parameter, one in zip(self.model.parameters(), sums, strict=True):
            parameter.grad = one
        self.optimizer.step()
        self.done += 1


class Opacus:
    """A step of Opacus with its hooks, on batches that are given."""

    def __init__(self, model: nn.Module) -> None:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        self.model = GradSampleModule(model)
        self.optimizer = DPOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=RATE),
            noise_multiplier=NOISE,
            max_grad_norm=CLIP,
            expected_batch_size=BATCH,
        )

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs), targets).backward()
        self.optimizer.step()


def seconds(work: Callable[[], None], least: float) -> float:
    """Of one call, in repetitions that take `least` seconds together."""
    work()
    calls = 0
    started = time.perf_counter()
    while time.perf_counter() - started < least:
        work()
        calls += 1
    return (time.perf_counter() - started) / calls


def measured(
    name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], repeat: int, least: float
) -> dict[str, Any]:
    """The row of a model."""
    torch.manual_seed(0)
    inputs = torch.randn(BATCH, *shape)
    targets = torch.randint(0, 10, (BATCH,))
    dure = Dure(make, inputs, targets)
    check(make(), dure, inputs, targets)
    dure.way = None
    steps: dict[str, Callable[[Tensor, Tensor], None]] = {
        "plain": Step(make(), plain, "none"),
        "dure": Step(make(), dure, "keystream"),
        "ghost": Step(make(), ghost, "torch"),
        "functional": Step(make(), functional, "torch"),
        "looped": Step(make(), looped, "torch"),
    }
    if find_spec("opacus") is not None:
        steps["opacus"] = Opacus(make())
    # dure's gradients with the noise of the others: what the keystream costs is told apart.
    other = Dure(make, inputs, targets)
    steps["dure_torch_noise"] = Step(make(), other, "torch")
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(repeat):
        for way, step in steps.items():
            times[way].append(seconds(lambda step=step: step(inputs, targets), least))  # type: ignore[misc]
    elements = sum(parameter.numel() for parameter in make().parameters())
    key = bytes(32)
    medians = {way: statistics.median(one) for way, one in times.items()}
    ratios = {way: one / medians["plain"] for way, one in medians.items()}
    told = ", ".join(f"{way} {ratio:.2f}" for way, ratio in ratios.items())
    print(f"{name:<4} plain {medians['plain'] * 1e3:.2f} ms; over it: {told}", file=sys.stderr)
    return {
        "model": name,
        "parameters": elements,
        "way": dure.choice.kind.name,
        "ms": {way: one * 1e3 for way, one in medians.items()},
        "over_plain": ratios,
        "dure_over_ghost": medians["dure"] / medians["ghost"],
        "noise_ms": seconds(lambda: void(normal(key, (elements,))), least) * 1e3,
        "torch_noise_ms": seconds(lambda: void(torch.randn(elements)), least) * 1e3,
    }


def void(_: Tensor) -> None:
    """Takes a value that is not needed."""


def check(model: nn.Module, dure: Dure, inputs: Tensor, targets: Tensor) -> None:
    """All ways have the same sums, but for rounding."""
    right = looped(model, inputs, targets)
    for way in (dure, ghost, functional):
        for one, other in zip(way(model, inputs, targets), right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, in half a minute")
    takes_result(parser)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    repeat, least = (3, 0.2) if asked.quick else (asked.repeat, 1.0)
    rows = [
        measured("cnn", CNN, (1, 28, 28), repeat, least),
        measured("2nn", TwoNN, (784,), repeat, least),
    ]
    about = {"benchmark": "dp_sgd", "batch": BATCH, "threads": asked.threads, "repeat": repeat}
    give({**about, "torch": torch.__version__, "rows": rows}, asked.result)


if __name__ == "__main__":
    main()
