"""The CPU against a GPU: layers, cores that share it, loaders that feed it, NCCL on one device.

    layers    forward and backward of convolutions and of fully connected layers, of small and large
              batches: all cores of the CPU, the GPU, and the GPU where the batch comes from the
              CPU's memory each time. GFLOP/s count two operations a multiplication, and backward as
              two forwards. Results are compared with those of the CPU in float32
    threads   examples a second of a CNN that threads of one process train on the one GPU
              (DataParallel in Threads(n, ("cuda:0",))), against one worker on it, and on the CPU
    loaders   examples a second of one worker on the GPU whose examples take long to read, with 0,
              1, 2, … loaders
    steps     seconds of a step of ResNet-20, and of a GPT of 124 M parameters in bf16, by a single
              worker against a loop by hand, also with both compiled (gpu_steps.py)
    alone     collectives of dure over NCCL, in a group of one rank on the one device: each gives
              what it got; microseconds of an all-reduce. More ranks need more devices

    python benchmarks/study_gpu.py --page docs/study-gpu.md \\
        --result benchmarks/results/study_gpu.json

Where there is no CUDA device it says so in a word, and measures nothing. --device cpu tries the
script, on the CPU alone, with gloo in NCCL's place. Progress and tables go to standard error, the
result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_steps import step_rows
from outcome import give, takes_result
from pages import fill, table
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.all_gather import all_gather
from dure.collectives.all_reduce import all_reduce
from dure.collectives.broadcast import broadcast
from dure.collectives.group import Group
from dure.collectives.reduce_scatter import reduce_scatter
from dure.machine.cores import available_cores
from dure.tasks.models import CNN

JSON = dict[str, Any]
TOLERANCE = 1e-2
"""Of results in float32, over the largest value: kernels add in other orders."""


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Layer(NamedTuple):
    """make: the layer. shape: of one example. flops: forward, of one example."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    flops: int


def convolution(channels: int, size: int) -> Layer:
    return Layer(
        f"convolution 3x3, {channels} channels, {size}x{size}",
        partial(nn.Conv2d, channels, channels, 3, padding=1),
        (channels, size, size),
        2 * 9 * channels * channels * size * size,
    )


def connected(width: int) -> Layer:
    return Layer(
        f"fully connected, {width} to {width}",
        partial(nn.Linear, width, width),
        (width,),
        2 * width * width,
    )


LAYERS = (convolution(32, 28), convolution(128, 28), connected(1024), connected(4096))
BATCHES = (1, 16, 256)


# Layers.


def passes(layer: nn.Module, inputs: Tensor, fresh: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs, and the weight's gradient. fresh: the batch where it lies, copied here first."""
    given = inputs if fresh is None else fresh.to(inputs.device, non_blocking=True)
    layer.zero_grad()
    outputs = layer(given)
    outputs.sum().backward()
    weight = layer.weight
    assert isinstance(weight, Tensor)
    assert weight.grad is not None
    return outputs.detach(), weight.grad


def finished(device: torch.device) -> None:
    """Waits until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median of some rounds, each of as many calls as take a few milliseconds."""
    for _ in range(3):
        work()
    finished(device)
    started = time.perf_counter()
    work()
    finished(device)
    calls = max(1, min(100, int(0.02 / max(1e-6, time.perf_counter() - started))))
    samples = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            work()
        finished(device)
        samples.append((time.perf_counter() - started) / calls)
    return statistics.median(samples)


def layer_row(layer: Layer, batch: int, device: torch.device, rounds: int) -> JSON:
    torch.manual_seed(0)
    here = layer.make()
    there = layer.make().to(device)
    there.load_state_dict(here.state_dict())
    inputs = torch.randn(batch, *layer.shape)
    moved = inputs.to(device)
    pinned = inputs.pin_memory() if device.type == "cuda" else inputs
    for one, other in zip(passes(here, inputs, None), passes(there, moved, None), strict=True):
        apart = float((one - other.cpu()).abs().max() / one.abs().max())
        if not apart < TOLERANCE:
            raise ValueError(f"{layer.name}: the results differ by {apart:.1e} of the largest")
    cpu = torch.device("cpu")
    seconds = {
        "cpu": seconds_of(lambda: passes(here, inputs, None), cpu, rounds),
        "device": seconds_of(lambda: passes(there, moved, None), device, rounds),
        "device, copied": seconds_of(lambda: passes(there, moved, pinned), device, rounds),
    }
    work = 3 * layer.flops * batch / 1e9
    return {
        "layer": layer.name,
        "batch": batch,
        "seconds": seconds,
        "gflops": {name: work / one for name, one in seconds.items()},
    }


# Training.


class Images(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images that take `seconds` to read, as if a transform worked on them."""

    def __init__(self, count: int, seconds: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(count, 1, 28, 28, generator=generator)
        self.labels = torch.randint(0, 10, (count,), generator=generator).tolist()
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # Works, as a transform in Python does, and does not sleep.
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass
        return self.images[index], self.labels[index]


def task_of(examples: int, seconds: float = 0.0) -> dure.Task:
    if seconds:
        train: Any = Images(examples, seconds)
    else:
        whole = Images(examples, 0.0)
        train = (whole.images, torch.tensor(whole.labels))
    return dure.Task(CNN, F.cross_entropy, train, optimizer=partial(torch.optim.SGD, lr=0.05))


def rate(task: dure.Task, strategy: Any, world: Any, rounds: int) -> float:
    """Examples a second, in the median of some runs of two epochs; the first one warms up."""
    found = []
    for _ in range(rounds + 1):
        run = dure.train(task, strategy, world, dure.Stop(epochs=2), seed=0)
        found.append(run.summary["samples"] / run.summary["seconds"])
    return statistics.median(found[1:])


def powers(most: int) -> Iterator[int]:
    """1, 2, 4, … and the last one itself."""
    number = 1
    while number < most:
        yield number
        number *= 2
    yield most


def thread_rows(device: torch.device, asked: argparse.Namespace) -> list[JSON]:
    task = task_of(asked.examples)
    batch = asked.batch
    rows = [
        {
            "setup": "one worker, CPU",
            "rate": rate(task, dure.SingleWorker(batch), None, asked.rounds),
        }
    ]
    alone = dure.SingleWorker(batch, device=device.type)
    rows.append({"setup": f"one worker, {device}", "rate": rate(task, alone, None, asked.rounds)})
    for threads in powers(available_cores()):
        world = dure.Threads(threads, (str(device),))
        several = rate(task, dure.DataParallel(batch), world, asked.rounds)
        rows.append({"setup": f"{threads} threads, {device}", "rate": several})
        show(f"{threads} threads: {several:,.0f} examples/s")
    return rows


def loader_rows(device: torch.device, asked: argparse.Namespace) -> list[JSON]:
    task = task_of(asked.examples, asked.reading / 1e6)
    rows = []
    for loaders in (0, *powers(available_cores())):
        strategy = dure.SingleWorker(asked.batch, device=device.type, loaders=loaders)
        found = rate(task, strategy, None, asked.rounds)
        rows.append({"loaders": loaders, "rate": found})
        show(f"{loaders} loaders: {found:,.0f} examples/s")
    return rows


# NCCL.


def alone(backend: str, device: torch.device, rounds: int) -> JSON:
    """Every collective in a group of one rank gives what it got."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
            device_id=device if device.type == "cuda" else None,
        )
        try:
            group = Group()
            tensor = torch.arange(1 << 20, dtype=torch.float32, device=device)
            found = {
                "all_reduce": all_reduce(tensor.clone(), group, "native"),
                "all_gather": all_gather(tensor.clone(), group, "native").view(-1),
                "reduce_scatter": reduce_scatter(tensor.clone()[None], group, "native").view(-1),
                "broadcast": broadcast(tensor.clone(), group),
            }
            for name, result in found.items():
                if not torch.equal(result.view(-1), tensor):
                    raise ValueError(f"{name} over {backend} gives something else than it got")
            # torch's own call, which does not stop at a group of one
            seconds = seconds_of(lambda: dist.all_reduce(tensor), device, rounds)
            several = sorted(found)
            return {
                "backend": backend,
                "collectives": several,
                "all_reduce_of_4_mib_us": 1e6 * seconds,
            }
        finally:
            dist.destroy_process_group()


# The page.


def layer_cells(rows: list[JSON]) -> str:
    head = ["layer", "batch", "CPU, ms", "GPU, ms", "GPU with the copy, ms"]
    head += ["CPU, GFLOP/s", "GPU, GFLOP/s", "CPU over GPU"]
    lines = []
    for row in rows:
        seconds = row["seconds"]
        rates = row["gflops"]
        lines.append(
            [
                row["layer"],
                str(row["batch"]),
                *(f"{1e3 * seconds[name]:.3f}" for name in ("cpu", "device", "device, copied")),
                *(f"{rates[name]:,.0f}" for name in ("cpu", "device")),
                f"{seconds['cpu'] / seconds['device']:.1f}",
            ]
        )
    return table(head, lines)


def rate_cells(rows: list[JSON], name: str) -> str:
    return table([name, "examples/s"], [[str(row[name]), f"{row['rate']:,.0f}"] for row in rows])


def step_cells(rows: list[JSON]) -> str:
    lines = [
        [
            row["model"],
            *(f"{1e3 * row['seconds'][name]:.2f}" for name in ("by hand", "dure")),
            f"{row['dure over by hand']:.3f}",
        ]
        for row in rows
    ]
    return table(["model", "by hand, ms", "dure, ms", "dure over by hand"], lines)


def alone_cells(found: JSON) -> str:
    several = ", ".join(found["collectives"])
    return (
        f"{found['backend']}: {several} return their input. An all-reduce of 4 MiB by one rank "
        f"takes {found['all_reduce_of_4_mib_us']:.0f} µs."
    )


def measured(device: torch.device, asked: argparse.Namespace) -> JSON:
    # Products in full float32 on both sides.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    layers = []
    for layer in LAYERS:
        for batch in asked.batches:
            layers.append(layer_row(layer, batch, device, asked.rounds))
            show(f"{layer.name}, batch {batch}: {layers[-1]['seconds']}")
    return {
        "layers": layers,
        "threads": thread_rows(device, asked),
        "loaders": loader_rows(device, asked),
        "steps": step_rows(device, asked.rounds, asked.small),
        "alone": alone("nccl" if device.type == "cuda" else "gloo", device, asked.rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--examples", type=int, default=20_000, help="of a training")
    parser.add_argument("--batch", type=int, default=512, help="of a training step")
    parser.add_argument("--reading", type=float, default=100, metavar="US", help="of an example")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small models of the same kinds")
    parser.add_argument("--page", type=Path, help="the page whose tables are filled")
    takes_result(parser)
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.device_count():
        print("skipped: there is no CUDA device here")
        return
    device = torch.device("cuda", 0) if asked.device == "cuda" else torch.device("cpu")
    found = measured(device, asked)
    blocks = {
        "layers": layer_cells(found["layers"]),
        "threads": rate_cells(found["threads"], "setup"),
        "loaders": rate_cells(found["loaders"], "loaders"),
        "steps": step_cells(found["steps"]),
        "alone": alone_cells(found["alone"]),
    }
    for block in blocks.values():
        show(block)
    if asked.page is not None:
        fill(asked.page, blocks)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    head = {"benchmark": "study_gpu", "device": name, "cores": available_cores()}
    give({**head, "torch": torch.__version__, **found}, asked.result)


if __name__ == "__main__":
    main()
