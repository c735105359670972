"""What a client computes and holds: one part of a model, alone in a process.

    python burden.py MODEL PART BATCH

MODEL is 2nn, cnn or transformer. PART is whole (a client of FedAvg), head (one cut) or ends (the
U-shape: head and end). Each makes three steps, with the optimizer's. Printed as JSON:

    weights, tensors    of the part
    values              elements of an example that cross the cuts one way
    flops               of a step: matrix products and convolutions, forward and backward, as torch
                        counts them while they run
    tensor_bytes        the most that tensors had at a time, as torch's allocator counts them:
                        weights, gradients, the optimizer's memory, activations
    process_bytes       by how much the process grew at most (VmHWM of Linux) since it had made
                        steps of another, tiny model, so that torch and its libraries do not count;
                        freed memory that the process still had is used again and not counted
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from settings import Parts, parts_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode


def resident(what: str) -> int:
    """VmRSS, what the process has now, or VmHWM, the most that it had; bytes."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def warm() -> None:
    """Steps of a tiny model with a layer of each kind."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 4)
    )
    for make in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = make(model.parameters(), lr=0.1)
        F.cross_entropy(model(torch.randn(2, 1, 8, 8)), torch.tensor([0, 1])).backward()
        optimizer.step()
    one = torch.randn(1, 1, 4, 4, requires_grad=True)
    F.scaled_dot_product_attention(one, one, one, is_causal=True).sum().backward()


def whole(parts: Parts, inputs: Tensor, targets: Tensor) -> None:
    F.cross_entropy(parts.whole(inputs), targets).backward()


def head(parts: Parts, inputs: Tensor, targets: Tensor) -> None:
    values = parts.head(inputs)
    # What comes back has the values' shape, whatever it is.
    values.backward(torch.ones_like(values))


def ends(parts: Parts, inputs: Tensor, targets: Tensor) -> None:
    values = parts.head(inputs)
    came = torch.zeros(len(inputs), *parts.between, requires_grad=True)
    F.cross_entropy(parts.end(came), targets).backward()
    values.backward(torch.ones_like(values))


STEPS: dict[str, Callable[[Parts, Tensor, Tensor], None]] = {
    "whole": whole,
    "head": head,
    "ends": ends,
}


def held(parts: Parts, part: str) -> list[nn.Module]:
    """The modules of a part, with weights in memory; those of the rest never have any."""
    modules = {"whole": [parts.whole], "head": [parts.head], "ends": [parts.head, parts.end]}[part]
    for module in modules:
        module.to_empty(device="cpu")
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
    return modules


@torch.no_grad()
def values_of(parts: Parts, part: str) -> int:
    """Elements of an example that cross the cuts one way."""
    if part == "whole":
        return 0
    inputs, _ = parts.inputs(1)
    between = math.prod(parts.between) if part == "ends" else 0
    return int(parts.head(inputs).numel()) + between


def step(parts: Parts, part: str, batch: int, optimizer: torch.optim.Optimizer) -> None:
    inputs, targets = parts.inputs(batch)
    STEPS[part](parts, inputs, targets)
    optimizer.step()
    optimizer.zero_grad()


def steps(model: str, part: str, batch: int) -> tuple[Parts, list[nn.Parameter]]:
    """Makes the part, and three steps of it."""
    with torch.device("meta"):
        parts = parts_of(model)
    parameters = [one for module in held(parts, part) for one in module.parameters()]
    optimizer = parts.optimizer(parameters)
    for _ in range(3):
        step(parts, part, batch, optimizer)
    return parts, parameters


def most_of_tensors(model: str, part: str, batch: int) -> int:
    """The most bytes that tensors had at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        steps(model, part, batch)
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = [one for one in found.profiler.kineto_results.events() if one.name() == "[memory]"]
    events.sort(key=lambda one: one.start_ns())
    return max(accumulate(one.nbytes() for one in events))


def main(model: str, part: str, batch: int) -> None:
    torch.set_num_threads(1)
    warm()
    # What the process had at most until now is forgotten.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    parts, parameters = steps(model, part, batch)
    grown = resident("VmHWM") - before
    optimizer = parts.optimizer(parameters)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step(parts, part, batch, optimizer)
    print(
        json.dumps(
            {
                "weights": sum(one.numel() for one in parameters),
                "tensors": len(parameters),
                "values": values_of(parts, part),
                "flops": counter.get_total_flops(),
                "tensor_bytes": most_of_tensors(model, part, batch),
                "process_bytes": grown,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
