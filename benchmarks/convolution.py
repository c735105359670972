"""Convolution as a matrix product against torch's native one, and fully connected layers.

Forward and backward passes are measured in one run, on 1 and 2 threads, and on a GPU if there is
one:

    native      torch's conv2d: oneDNN on a CPU, cuDNN on a GPU
    fused       torch's conv2d with oneDNN and NNPACK switched off: im2col in C++, and a matrix
                product for each image
    im2col      dure.parallel.threads.convolution.conv2d_im2col: the same in a few operations of
                torch, a part of the batch at a time
    whole       the same for the whole batch at once
    copies      only im2col (forward), only im2col and col2im (backward)
    products    only the matrix products, on columns that are there already

There are five sweeps around one layer (a batch of 16, 32 to 32 channels, 28x28 pixels, 3x3 kernels,
stride 1, padded to the same size): kernels, channels, batches, image sizes, strides. Then follow
the layers of the FedAvg CNN and of ResNet-8, and fully connected layers as a product, and as native
and as im2col convolutions whose kernel covers the image. Every contender's results are compared
with native's in float64 before it is timed. Rounds are interleaved, and figures are medians. On one
thread seconds are those of CPU time. GFLOP/s count 2·Co·C·k²·oh·ow·B operations forward and twice
as many backward. `peak` is the best matrix product of the same run.

At the end come the steps of two models on 28x28 pixels (forward, backward, SGD): the shares of
convolution, fully connected layers and the rest in parameters, in operations and in measured time.
Times are the operators' own, by torch's profiler.

    python benchmarks/convolution.py --out docs/images --result benchmarks/results/convolution.json

Progress goes to standard error, the result as JSON to standard output. --figures RESULT draws the
figures of an earlier result, --tables RESULT prints its tables. docs/study-convolution.md has both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import NEUTRAL, Axis, Curve, Panel, bars, lines, save
from outcome import give, takes_result
from torch import Tensor, nn
from torch.nn import functional as F

from dure.machine.cores import available_cores
from dure.parallel.threads.convolution import col2im, conv2d_flops, conv2d_im2col, im2col, window
from dure.tasks.models import CNN, ResNet

JSON = dict[str, Any]
PHASES = ("forward", "backward")


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Layer:
    """A convolution of square images with square kernels; the padding None keeps the size."""

    sweep: str
    name: str
    batch: int = 16
    channels: int = 32
    kernels: int = 32
    size: int = 28
    k: int = 3
    stride: int = 1
    padding: int | None = None

    @property
    def settings(self) -> dict[str, int]:
        return {
            "stride": self.stride,
            "padding": self.k // 2 if self.padding is None else self.padding,
        }

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        return (self.batch, self.channels, self.size, self.size), (
            self.kernels,
            self.channels,
            self.k,
            self.k,
        )

    @property
    def flops(self) -> int:
        return conv2d_flops(*self.shapes, window(self.k, **self.settings))

    @property
    def blow_up(self) -> float:
        """Elements of the columns over those of the images."""
        oh, ow = window(self.k, **self.settings).outputs(self.size, self.size)
        return self.k**2 * oh * ow / self.size**2


def layers() -> list[Layer]:
    found = [Layer("kernels", str(k), k=k) for k in (1, 3, 5, 7, 11)]
    found += [Layer("channels", str(c), channels=c, kernels=c) for c in (1, 4, 16, 64, 128)]
    found += [Layer("batches", str(b), batch=b) for b in (1, 4, 16, 64)]
    found += [Layer("sizes", str(s), size=s, batch=8) for s in (7, 14, 28, 56, 112)]
    found += [Layer("strides", str(s), k=5, stride=s) for s in (1, 2, 4)]
    found += [
        Layer("models", "CNN 1", 64, 1, 32, 28, 5),
        Layer("models", "CNN 2", 64, 32, 64, 14, 5),
        Layer("models", "ResNet stem", 64, 1, 16, 28, 3),
        Layer("models", "ResNet 1", 64, 16, 16, 28, 3),
        Layer("models", "ResNet 2", 64, 32, 32, 14, 3),
        Layer("models", "ResNet 3", 64, 64, 64, 7, 3),
    ]
    found += [Layer("connected", str(b), b, 64, 512, 7, 7, padding=0) for b in (1, 16, 64, 256)]
    return found


Run = tuple[Callable[[], Tensor], tuple[Tensor, ...]]
"""A forward pass, and the tensors whose gradients its backward pass makes."""


@contextmanager
def only_fused() -> Iterator[None]:
    """Inside, torch's conv2d on the CPU is its own im2col."""
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False):
        yield


def contenders(
    layer: Layer, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, Run]:
    """All that compute the layer, on the same numbers."""
    random = torch.Generator().manual_seed(0)
    images, kernels = (
        torch.randn(shape, generator=random, dtype=torch.float64) for shape in layer.shapes
    )
    leaves = tuple(
        each.to(device, dtype).requires_grad_()
        for each in (images, kernels / layer.k**2 / layer.channels)
    )
    found: dict[str, Run] = {"native": (partial(F.conv2d, *leaves, **layer.settings), leaves)}
    if device.type == "cpu":
        found["fused"] = found["native"]
    found["im2col"] = (partial(conv2d_im2col, *leaves, **layer.settings), leaves)
    found["whole"] = (
        partial(conv2d_im2col, *leaves, **layer.settings, at_once=layer.batch),
        leaves,
    )
    if layer.sweep == "connected":
        found["product"] = (
            lambda: F.linear(leaves[0].flatten(1), leaves[1].flatten(1))[..., None, None],
            leaves,
        )
    return found


def parts(layer: Layer, device: torch.device) -> dict[str, Callable[[], object]]:
    """What im2col is made of: copies and products, of the forward and of the backward pass."""
    images, kernels = (torch.randn(shape, device=device) for shape in layer.shapes)
    over = {"kernel": layer.k, **layer.settings}
    columns = im2col(images, **over)  # type: ignore[arg-type]
    matrix = kernels.flatten(1)
    gradient = matrix @ columns

    def copies_backward() -> None:
        im2col(images, **over)  # type: ignore[arg-type]
        col2im(columns, layer.shapes[0], **over)  # type: ignore[arg-type]

    def products_backward() -> None:
        torch.mm(gradient, columns.t())
        torch.mm(matrix.t(), gradient)

    return {
        "copies forward": partial(im2col, images, **over),  # type: ignore[arg-type]
        "copies backward": copies_backward,
        "products forward": partial(torch.mm, matrix, columns),
        "products backward": products_backward,
    }


def passes(name: str, run: Run) -> tuple[float, float]:
    """Seconds of a forward and a backward pass."""
    forward, leaves = run
    with only_fused() if name == "fused" else torch.enable_grad():
        started = clock(leaves[0].device)
        outputs = forward()
        between = clock(leaves[0].device)
        torch.autograd.grad(outputs, leaves, torch.ones_like(outputs))
        return between - started, clock(leaves[0].device) - between


def clock(device: torch.device) -> float:
    """Seconds: CPU time on one thread; otherwise of the clock on the wall, when a GPU has done what
    it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (
        time.thread_time()
        if device.type == "cpu" and torch.get_num_threads() == 1
        else time.perf_counter()
    )


def timed(call: Callable[[], object], device: torch.device) -> float:
    started = clock(device)
    call()
    return clock(device) - started


def check_that_all_agree(layer: Layer, device: torch.device) -> None:
    """In float64, to 1e-10: values and gradients."""
    found = contenders(dataclasses.replace(layer, batch=min(layer.batch, 4)), device, torch.float64)
    results = {}
    for name, (forward, leaves) in found.items():
        with only_fused() if name == "fused" else torch.enable_grad():
            outputs = forward()
            results[name] = [
                outputs,
                *torch.autograd.grad(outputs, leaves, torch.ones_like(outputs)),
            ]
    for name, result in results.items():
        for one, native in zip(result, results["native"], strict=True):
            assert torch.allclose(one, native, rtol=1e-10, atol=1e-10), (
                f"{name} computes something else: {layer}"
            )


def measure(layer: Layer, device: torch.device, rounds: int) -> JSON:
    """Median seconds of every contender and part, in rounds that take turns."""
    check_that_all_agree(layer, device)
    found = contenders(layer, device)
    made_of = parts(layer, device)
    samples: dict[str, list[float]] = {}
    for number in range(-1, rounds):  # the first round chooses kernels and allocates
        for name, run in list(found.items())[:: 1 if number % 2 else -1]:
            for phase, seconds in zip(PHASES, passes(name, run), strict=True):
                samples.setdefault(f"{name} {phase}", []).append(seconds)
        for name, call in made_of.items():
            samples.setdefault(name, []).append(timed(call, device))
    return {
        **dataclasses.asdict(layer),
        "padding": layer.settings["padding"],
        "flops": layer.flops,
        "blow_up": layer.blow_up,
        "seconds": {name: statistics.median(values[1:]) for name, values in samples.items()},
        "samples": {name: values[1:] for name, values in samples.items()},
    }


def gflops(row: JSON, name: str, phase: str) -> float | None:
    seconds = row["seconds"].get(f"{name} {phase}")
    return (
        None
        if seconds is None
        else 1e-9 * row["flops"] * (1 if phase == "forward" else 2) / seconds
    )


def peak(device: torch.device) -> float:
    """GFLOP/s of the best of some square matrix products."""
    n = 1024 if device.type == "cpu" else 8192
    matrix = torch.randn(n, n, device=device)
    torch.mm(matrix, matrix)
    return 2e-9 * n**3 / min(timed(partial(torch.mm, matrix, matrix), device) for _ in range(7))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "FedAvg CNN": partial(CNN, 1, 28, 10),
    "ResNet-8": partial(ResNet, 1, 10, 8, 16),
    "ResNet-20": partial(ResNet, 1, 10, 20, 16),
}
KINDS = ("convolution", "fully connected", "the rest")


def shares(name: str, batch: int, steps: int) -> JSON:
    """Parameters, operations of a step, and its time by kinds of layers."""
    model = MODELS[name]()
    parameters = dict.fromkeys(KINDS, 0)
    flops = dict.fromkeys(KINDS, 0.0)

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        kind = kind_of(layer)
        own = sum(parameter.numel() for parameter in layer.parameters())
        parameters[kind] += own
        # a multiplication and an addition a weight and output; the first layer needs no gradient of
        # its images
        weights = layer.weight.numel() if kind != "the rest" else 0
        positions = outputs.numel() // outputs.shape[1]
        flops[kind] += (3 if inputs[0].requires_grad else 2) * 2 * weights * positions

    hooks = [
        layer.register_forward_hook(count)
        for layer in model.modules()
        if not list(layer.children())
    ]
    images = torch.randn(batch, 1, 28, 28)
    labels = torch.randint(0, 10, (batch,))
    F.cross_entropy(model(images), labels).backward()
    for hook in hooks:
        hook.remove()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    step()
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        for _ in range(steps):
            step()
    seconds = dict.fromkeys(KINDS, 0.0)
    for event in profile.key_averages():
        seconds[kind_of_operator(event.key)] += event.self_cpu_time_total * 1e-6 / steps
    plain = statistics.median(timed(step, images.device) for _ in range(steps))
    return {
        "model": name,
        "batch": batch,
        "parameters": parameters,
        "flops": flops,
        "seconds": seconds,
        "step": plain,
    }


def kind_of(layer: nn.Module) -> str:
    return (
        KINDS[0]
        if isinstance(layer, nn.Conv2d)
        else KINDS[1]
        if isinstance(layer, nn.Linear)
        else KINDS[2]
    )


def kind_of_operator(name: str) -> str:
    name = name.lower()
    if "conv" in name:
        return KINDS[0]
    return (
        KINDS[1]
        if any(word in name for word in ("addmm", "aten::mm", "linear", "addmmbackward"))
        else KINDS[2]
    )


def measured(rounds: int, batch: int, threads: Sequence[int], only: Sequence[str]) -> JSON:
    result: JSON = {
        "benchmark": "convolution",
        "torch": torch.__version__,
        "cores": available_cores(),
    }
    result |= {"rounds": rounds, "devices": []}
    settings = [(torch.device("cpu"), number) for number in threads]
    if torch.cuda.is_available():
        settings.append((torch.device("cuda"), 1))
        torch.backends.cudnn.allow_tf32 = False  # the matrix products have float32's precision too
    else:
        show("no GPU here: its rows are left out")
    for device, number in settings:
        torch.set_num_threads(number)
        name = (
            torch.cuda.get_device_name()
            if device.type == "cuda"
            else f"{number} thread" + "s" * (number > 1)
        )
        best = peak(device)
        show(f"{name}: peak {best:.0f} GFLOP/s; GFLOP/s forward/backward")
        rows = []
        for layer in layers():
            if not only or layer.sweep in only:
                rows.append(measure(layer, device, rounds))
                show(line(rows[-1]))
        result["devices"].append({"device": name, "peak_gflops": best, "layers": rows})
    torch.set_num_threads(1)
    result["shares"] = [shares(name, batch, 10) for name in MODELS]
    return result


def line(row: JSON) -> str:
    pairs = []
    for name in ("native", "fused", "im2col", "whole", "product", "copies", "products"):
        both = [gflops(row, name, phase) for phase in PHASES]
        if None not in both:
            pairs.append(f"{name} {both[0]:.1f}/{both[1]:.1f}")
    about = f"{row['sweep']:<10}{row['name']:<12}{row['flops'] / 1e6:9.1f} M"
    return f"{about}  x{row['blow_up']:<5.1f} {'  '.join(pairs)}"


NAMES = {
    "native": "native",
    "fused": "torch's own im2col",
    "im2col": "dure's im2col",
    "whole": "of the whole batch at once",
    "products": "its products alone",
}
WHAT = {"parameters": "parameters", "flops": "operations", "seconds": "time"}
SWEEPS = {
    "kernels": ("Kernel sizes", "kernel size k"),
    "channels": ("Channels", "channels, in and out"),
    "batches": ("Batches", "images in a batch"),
    "sizes": ("Image sizes", "height and width in pixels, 8 images"),
}


def speeds(device: JSON, sweep: str, phase: str) -> Panel:
    rows = [row for row in device["layers"] if row["sweep"] == sweep]
    x = [float(row["name"]) for row in rows]
    curves = []
    for name in NAMES:
        reached = [gflops(row, name, phase) for row in rows]
        if reached[0] is not None:
            dashed = name == "products"
            curves.append(Curve(NAMES[name], x, reached, dashed=dashed, marks=True))
    curves.append(
        Curve(
            "a square product",
            [x[0], x[-1]],
            [device["peak_gflops"]] * 2,
            dashed=True,
            colour=NEUTRAL,
        )
    )
    title, axis = SWEEPS[sweep]
    return lines(f"{title}, {phase}", curves, Axis(axis, log=True), Axis("GFLOP/s", low=0))


def ratios(device: JSON, sweeps: Sequence[str]) -> Panel:
    """How many times longer im2col takes than native, forward and backward."""
    rows = [row for row in device["layers"] if row["sweep"] in sweeps]
    seconds = [row["seconds"] for row in rows]
    series = {}
    for phase in PHASES:
        series[phase] = [each[f"im2col {phase}"] / each[f"native {phase}"] for each in seconds]
    names = [
        f"stride {row['name']}, 5x5" if row["sweep"] == "strides" else row["name"] for row in rows
    ]
    return bars("Time of dure's im2col over native", names, series, Axis("ratio", low=0))


def memory(device: JSON) -> Panel:
    rows = [row for row in device["layers"] if row["sweep"] == "kernels" or row["stride"] > 1]
    names = [f"{row['k']}x{row['k']}, stride {row['stride']}" for row in rows]
    return bars(
        "Elements of the columns over those of the images",
        names,
        {"": [row["blow_up"] for row in rows]},
        Axis("times"),
    )


def both_passes(row: JSON, name: str) -> float:
    """GFLOP/s of the forward and the backward pass together."""
    return row["flops"] * 3e-9 / sum(row["seconds"][f"{name} {phase}"] for phase in PHASES)


def connected(device: JSON) -> Panel:
    rows = [row for row in device["layers"] if row["sweep"] == "connected"]
    x = [float(row["name"]) for row in rows]
    titles = {"product": "as a product", "native": "as a native convolution", "im2col": "as im2col"}
    curves = []
    for name, title in titles.items():
        curves.append(Curve(title, x, [both_passes(row, name) for row in rows], marks=True))
    curves.append(
        Curve(
            "a square product",
            [x[0], x[-1]],
            [device["peak_gflops"]] * 2,
            dashed=True,
            colour=NEUTRAL,
        )
    )
    title = "A fully connected layer, 3136 to 512, both passes"
    return lines(title, curves, Axis("images in a batch", log=True), Axis("GFLOP/s", low=0))


def share(result: JSON) -> Panel:
    names: list[str] = []
    series: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for row in result["shares"]:
        for what in WHAT:
            names.append(f"{row['model']}: {WHAT[what]}")
            for kind in KINDS:
                series[kind].append(100 * row[what][kind] / sum(row[what].values()))
    return bars(
        "Shares of a training step",
        names,
        series,
        Axis("%", low=0, high=100),
        stacked=True,
        width=620,
    )


def draw(result: JSON, out: Path) -> None:
    """The study's figures: speeds on one thread (or the GPU), ratios and memory, fully connected
    layers and shares."""
    for device in result["devices"]:
        name = device["device"].lower().replace(" ", "-")
        measured = {row["sweep"] for row in device["layers"]}
        panels = []
        for sweep in SWEEPS:
            if sweep in measured:
                panels += [speeds(device, sweep, phase) for phase in PHASES]
        if panels:
            save(out / f"convolution-{name}.svg", f"Convolution on {device['device']}", panels)
        save(
            out / f"convolution-{name}-layers.svg",
            f"Layers on {device['device']}",
            [ratios(device, ("models", "strides")), memory(device), connected(device)],
        )
    save(out / "convolution-shares.svg", "What a step consists of, on one thread", share(result))


COLUMNS = ("native", "fused", "im2col", "whole", "products")


def tables(result: JSON) -> str:
    """The study's tables, in Markdown: GFLOP/s forward / backward of every layer, and the
    shares."""
    text = []
    for device in result["devices"]:
        text += [f"\n{device['device']}, peak {device['peak_gflops']:.0f} GFLOP/s\n"]
        text += [
            "| layer | MFLOP | columns | native | torch's im2col | dure's im2col | whole batch | "
            "products alone |"
        ]
        text += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
        for row in device["layers"]:
            cells = [
                f"{row['sweep']} {row['name']}",
                f"{row['flops'] / 1e6:,.0f}",
                f"{row['blow_up']:.1f}x",
            ]
            for name in COLUMNS:
                both = [gflops(row, name, phase) for phase in PHASES]
                cells.append("" if None in both else f"{both[0]:.0f} / {both[1]:.0f}")
            text.append(f"| {' | '.join(cells)} |")
    text += [
        "\n| model, batch | share of | convolution | fully connected | the rest |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["shares"]:
        for what, title in WHAT.items():
            total = sum(row[what].values())
            cells = [f"{100 * row[what][kind] / total:.1f} %" for kind in KINDS]
            text.append(f"| {row['model']}, {row['batch']} | {title} | {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--batch", type=int, default=64, help="of the steps whose shares are measured"
    )
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    sweeps = list(dict.fromkeys(layer.sweep for layer in layers()))
    parser.add_argument(
        "--sweeps", nargs="*", choices=sweeps, default=[], help="only these, without figures; all"
    )
    parser.add_argument("--out", type=Path, help="folder for the figures")
    parser.add_argument("--figures", type=Path, help="draw this result again and measure nothing")
    parser.add_argument(
        "--tables", type=Path, help="print the tables of this result and measure nothing"
    )
    takes_result(parser)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", message="TF32 acceleration")
    if asked.figures is not None:
        draw(json.loads(asked.figures.read_text()), asked.out or Path())
        return
    if asked.tables is not None:
        print(tables(json.loads(asked.tables.read_text())))
        return
    if asked.sweeps and asked.out is not None:
        parser.error("the figures take all sweeps: leave --sweeps or --out out")
    result = measured(asked.rounds, asked.batch, asked.threads, asked.sweeps)
    give(result, asked.result)
    if asked.out is not None:
        draw(result, asked.out)


if __name__ == "__main__":
    main()
