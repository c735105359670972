"""What a trace would lose silently is refused, and names what to do; what it keeps is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from dure.parallel.mesh.pipeline import Pipeline
from dure.parallel.pipeline.side_effects import record_side_effects
from dure.parallel.pipeline.trace import ModelTrace
from small import CLASSES, FEATURES, check_all, small_task


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


reverse: Callable[[Tensor], Tensor] = Reversed.apply
"""As everybody writes it: bound before anything is traced."""


class Strange(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.cached = None
        self.first = nn.Linear(FEATURES, 4)
        self.last = nn.Linear(4, CLASSES)
        if what == "module hook":
            self.last.register_full_backward_hook(lambda *_: None)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        match self.what:
            case "function":
                hidden = reverse(hidden)
            case "function of the inputs":
                hidden = self.first(reverse(inputs))
            case "hook":
                hidden.register_hook(lambda gradient: -gradient)
            case "reentrant":
                hidden = checkpoint(torch.tanh, hidden, use_reentrant=True)
            case "checkpoint":
                hidden = checkpoint(torch.tanh, hidden, use_reentrant=False)
            case "random":
                hidden = hidden * random.random()
            case "cache":
                self.cached = hidden.shape[0]
            case "straight through":
                hidden = hidden + (hidden.round() - hidden).detach()
        scores: Tensor = self.last(hidden)
        return scores


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("function", r"it calls Reversed, a torch\.autograd\.Function"),
        ("hook", "it registers a hook on a tensor"),
        ("module hook", "it calls BackwardHookFunction"),
        ("reentrant", "it calls CheckpointFunction"),
        (
            "random",
            r"it draws random numbers from Python or numpy \(the model itself at "
            r"test_unseen\.py:\d+, `hidden = hidden \* random\.random\(\)`\)",
        ),
    ],
)
def test_what_a_trace_would_lose_is_refused(what: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"a Strange cannot be cut, because {said}") as caught:
        check_all(Pipeline(8), small_task(model=lambda: Strange(what)), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "what", ["function of the inputs", "checkpoint", "cache", "straight through"]
)
def test_what_a_trace_keeps_is_not_refused(what: str) -> None:
    check_all(Pipeline(8), small_task(model=lambda: Strange(what)), 2)


def test_what_another_thread_draws_meanwhile_is_not_said_of_the_model() -> None:
    model = nn.Linear(2, 2)
    with record_side_effects(model, torch.zeros(1, 2)) as found:
        random.random()
    assert found == []


@pytest.mark.parametrize("what", ["function", "hook", "reentrant"])
def test_gradients_matter_in_training_alone(what: str) -> None:
    model = Strange(what).eval()
    ModelTrace(model, torch.zeros(2, FEATURES, dtype=torch.float64))
    forward = reverse(torch.ones(1, requires_grad=True))
    forward.backward()  # type: ignore[no-untyped-call]
    assert not model._forward_hooks
