"""Gradient descent against SGD: what a batch size costs in steps, epochs, operations and seconds.

For every batch size the learning rate is the best of one grid, the powers of 2. From the best rate
of the batch size before, rates are tried upwards and downwards until one is worse. A rate is better
if it takes fewer steps to the target, a mean loss over the training data, on the worst of three
seeds. With its rate each batch size then runs on --seeds other seeds, batch sizes in turn; reported
are medians. The optimizer is plain SGD without momentum.

The benchmark also measures the variance of batch gradients at three points of the way, and compares
it with sigma^2/B * (n-B)/(n-1), which is valid for batches drawn without replacement. From it
follows the noise scale tr(Sigma)/|G|^2, the batch size beyond which steps stop getting fewer in
proportion (McCandlish et al. 2018). It is compared with the critical batch size of a fit of
S(B) = S_min * (1 + B_c/B).

    python benchmarks/gradient_descent.py --data DIR --out docs/images \\
        --page docs/study-gradient-descent.md --result benchmarks/results/gradient_descent.json

There are two tasks: digits (64-200-200-10, 1,437 examples), and the first 5,000 examples of MNIST
(784-200-200-10) if --data names the folder of its files. Curves have the best value so far, in the
same way as steps to a target are counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from figures import NEUTRAL, Axis, Curve, bars, lines, save
from outcome import give, takes_result
from pages import fill, table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import dure
from dure.contracts.fresh_model import seeded_model
from dure.data.batches import Batches
from dure.tasks.flops import flops_per_step

MNIST_EXAMPLES = 5_000
EXPONENTS = range(-9, 4)
"""Of 2: the grid of learning rates."""

EPOCHS = 1_000
STEPS = 20_000
"""A rate that has not reached the target by the sooner of them has not reached it."""

CHOOSING = (-1, -2, -3)
"""The seeds on which rates are chosen."""

CURVE_POINTS = 60
DRAWN = 20_000
"""Examples drawn for each variance: batches of the size in question, at least 8 and at most 400 of
them."""


@dataclass(frozen=True)
class Setting:
    """One task of the study. target: mean loss over the training data. None among the batches is
    all of them."""

    name: str
    task: dure.Task
    batches: tuple[int | None, ...]
    target: float

    @property
    def n(self) -> int:
        return len(self.task.train)

    def size(self, batch: int | None) -> int:
        return self.n if batch is None else batch

    def steps_per_epoch(self, batch: int | None) -> int:
        return -(-self.n // self.size(batch))


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def settings(data: Path | None, quick: bool) -> list[Setting]:
    digits = dure.load_task("digits")
    found = [Setting("digits", digits, (1, 4, 16, 64, 256, None), 0.3 if quick else 0.1)]
    if data is not None:
        mnist = dure.load_task("mnist", data=str(data), model="2nn")
        few = torch.arange(2_000 if quick else MNIST_EXAMPLES)
        part = dataclasses.replace(mnist, train=mnist.train.batch(few), name="mnist")
        batches = (64, 512, None) if quick else (4, 16, 64, 256, 1024, None)
        found.append(Setting("mnist", part, batches, 0.5 if quick else 0.1))
    return [dataclasses.replace(one, batches=one.batches[-3:]) for one in found] if quick else found


def run(
    setting: Setting,
    batch: int | None,
    rate: float,
    seed: int,
    stop: dure.Stop,
    every: int,
    on: str = "train",
) -> dure.Run | None:
    """One run of SGD, evaluated on the training data or on the test data; None if it diverges."""
    measured = setting.task.train if on == "train" else setting.task.test
    optimizer = functools.partial(torch.optim.SGD, lr=rate)
    task = dataclasses.replace(setting.task, test=measured, optimizer=optimizer)
    try:
        return dure.train(
            task, dure.SingleWorker(batch), stop=stop, seed=seed, evaluate_every=every
        )
    except dure.errors.LossNotFiniteError:
        return None


def steps_to_target(
    setting: Setting, batch: int | None, rate: float, seed: int, most: float
) -> float:
    """Steps until the target, infinite if `most` steps do not reach it."""
    every = max(1, setting.steps_per_epoch(batch) // 4)
    most = min(most, EPOCHS * setting.steps_per_epoch(batch), STEPS)
    stop = dure.Stop(steps=math.ceil(most / every) * every, target={"test_loss": setting.target})
    done = run(setting, batch, rate, seed, stop, every)
    reached = done.history.to_target("test_loss", setting.target) if done is not None else None
    return math.inf if reached is None else reached


def best_rate(
    setting: Setting, batch: int | None, start: int
) -> tuple[int, dict[str, float | None]]:
    """The exponent of the rate with the fewest steps, and the steps of all that were tried."""
    tried: dict[int, float] = {}

    def steps(exponent: int) -> float:
        if exponent not in tried:
            most = min(
                tried.values(), default=math.inf
            )  # who needs more than the best so far is worse
            tried[exponent] = 0.0
            for seed in CHOOSING:
                if tried[exponent] < math.inf:
                    tried[exponent] = max(
                        tried[exponent], steps_to_target(setting, batch, 2.0**exponent, seed, most)
                    )
            show(
                f"{setting.name} batch {setting.size(batch)} rate 2^{exponent}: "
                f"{tried[exponent]:.1f} steps"
            )
        return tried[exponent]

    best = start
    while steps(best) == math.inf and best - 1 in EXPONENTS:
        best -= 1
    for direction in (1, -1):
        while best + direction in EXPONENTS and steps(best + direction) < steps(best):
            best += direction
    known = {f"{2.0**exponent:g}": _finite(value) for exponent, value in sorted(tried.items())}
    return best, known


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def measured(
    setting: Setting, batch: int | None, rate: float, seed: int, steps: float
) -> dict[str, Any]:
    """Steps and seconds to the target of one seed, and the curve of the training loss until half as
    far again."""
    limit = math.ceil(1.5 * steps) + 1
    every = max(1, min(limit // CURVE_POINTS, setting.steps_per_epoch(batch) // 4))
    done = run(setting, batch, rate, seed, dure.Stop(steps=limit), every)
    if done is None:
        return {"steps": None, "seconds": None, "curve": None}
    seconds = [e.seconds for e in done.history.evaluations]
    losses = [e.metrics["test_loss"] for e in done.history.evaluations]
    reached = done.history.to_target("test_loss", setting.target)
    per_step = done.summary["seconds"] / done.summary["steps"]
    return {
        "steps": reached,
        "seconds": None if reached is None else reached * per_step,
        "microseconds_per_example": per_step
        * 1e6
        * done.summary["steps"]
        / done.summary["samples"],
        "curve": {
            "step": [e.step for e in done.history.evaluations],
            "seconds": seconds,
            "loss": losses,
        },
    }


def accuracy(
    setting: Setting, batch: int | None, rate: float, seed: int, steps: float
) -> dict[str, Any]:
    """The curve of the accuracy on the test data, over the same steps."""
    limit = math.ceil(1.5 * steps) + 1
    done = run(
        setting, batch, rate, seed, dure.Stop(steps=limit), max(1, limit // CURVE_POINTS), on="test"
    )
    step, value = done.history.curve("test_accuracy") if done is not None else ([], [])
    return {"step": step, "accuracy": value}


def flops(setting: Setting, batch: int | None) -> float:
    """Operations of a step: forward, backward, and two for each weight in the update."""
    model = seeded_model(setting.task, 0)
    weights = sum(parameter.numel() for parameter in model.parameters())
    return flops_per_step(model, setting.task.train, setting.size(batch)) + 2 * weights


def batch_sizes(setting: Setting, seeds: int) -> list[dict[str, Any]]:
    """One row a batch size."""
    rates: dict[int | None, tuple[int, dict[str, float | None]]] = {}
    exponent = -5
    for batch in setting.batches:
        exponent, tried = best_rate(setting, batch, exponent)
        rates[batch] = exponent, tried
    runs: dict[int | None, list[dict[str, Any]]] = {batch: [] for batch in setting.batches}
    for seed in range(1, seeds + 1):
        for batch, (exponent, tried) in rates.items():
            steps = tried[f"{2.0**exponent:g}"]
            if steps is not None:
                runs[batch].append(measured(setting, batch, 2.0**exponent, seed, steps))
    rows = []
    for batch, (exponent, tried) in rates.items():
        reached = [one for one in runs[batch] if one["steps"] is not None]
        if not reached:
            show(f"{setting.name} batch {setting.size(batch)}: the target is not reached")
            continue
        steps = statistics.median(one["steps"] for one in reached)
        row = {
            "batch": setting.size(batch),
            "all": batch is None,
            "rates": tried,
            "rate": 2.0**exponent,
            "rate_at_the_end_of_the_grid": exponent in (EXPONENTS[0], EXPONENTS[-1]),
            "reached": f"{len(reached)} of {seeds} seeds",
            "steps": steps,
            "epochs": steps / setting.steps_per_epoch(batch),
            "flops_per_step": flops(setting, batch),
            "operations": steps * flops(setting, batch),
            "seconds": statistics.median(one["seconds"] for one in reached),
            "microseconds_per_example": statistics.median(
                one["microseconds_per_example"] for one in reached
            ),
            "curve": reached[0]["curve"],
            "test": accuracy(setting, batch, 2.0**exponent, 1, steps),
        }
        rows.append(row)
        show(
            f"{setting.name} batch {row['batch']}: rate {row['rate']:g}, {steps:.1f} steps, "
            f"{row['epochs']:.2f} epochs, {row['operations']:.3g} operations, {row['seconds']:.3f} "
            f"s"
        )
    return rows


def fit(rows: list[dict[str, Any]]) -> dict[str, float]:
    """S_min and B_c of S = S_min * (1 + B_c/B), by least squares of logarithms, B_c from a grid of
    2^(1/8)."""
    points = [(row["batch"], math.log(row["steps"])) for row in rows]

    def least(critical: float) -> tuple[float, float]:
        rests = [value - math.log1p(critical / batch) for batch, value in points]
        mean = statistics.fmean(rests)
        return sum((rest - mean) ** 2 for rest in rests), mean

    critical = min((2 ** (k / 8) for k in range(120)), key=lambda one: least(one)[0])
    error, mean = least(critical)
    return {
        "least_steps": math.exp(mean),
        "critical_batch": critical,
        "rms_log": math.sqrt(error / len(points)),
    }


def gradients(setting: Setting, rate: float, batch: int) -> list[dict[str, Any]]:
    """The noise of batch gradients on the way of SGD with `batch`: at the start, after an epoch,
    and at its end."""
    every = setting.steps_per_epoch(batch)
    rows = []
    for epochs in (0, 1, 4):
        model = seeded_model(setting.task, 1)
        if epochs:
            done = run(setting, batch, rate, 1, dure.Stop(epochs=epochs), every)
            if done is None:
                continue
            model = done.model
        rows.append({"epochs": epochs, **noise(setting, model)})
        show(f"{setting.name} after {epochs} epochs: noise scale {rows[-1]['noise_scale']:.1f}")
    return rows


def noise(setting: Setting, model: nn.Module) -> dict[str, Any]:
    """|G|^2 and tr(Sigma) of the gradients of single examples, and the measured variance of
    batches."""
    weights = {name: value.detach() for name, value in model.named_parameters()}
    inputs = setting.task.train.inputs
    targets = setting.task.train.targets

    def loss(values: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return setting.task.loss(functional_call(model, values, (one[None],)), target[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    squares = 0.0
    total = {name: torch.zeros_like(value) for name, value in weights.items()}
    for part in torch.split(torch.arange(setting.n), 100):
        found = each(weights, inputs[part], targets[part])
        squares += sum(float(value.double().square().sum()) for value in found.values())
        for name, value in found.items():
            total[name] += value.sum(dim=0)
    mean = torch.cat([value.reshape(-1) for value in total.values()]).double() / setting.n
    norm = float(mean.square().sum())
    trace = squares / setting.n - norm
    rows = []
    for batch in setting.batches[:-1]:
        size = setting.size(batch)
        count = min(400, max(8, DRAWN // size))
        apart = [
            float((gradient(setting, model, indices) - mean).square().sum())
            for indices in drawn(setting.n, size, count)
        ]
        expected = trace / size * (setting.n - size) / (setting.n - 1)
        rows.append(
            {
                "batch": size,
                "variance": statistics.fmean(apart),
                "expected": expected,
                "batches": count,
            }
        )
    return {
        "gradient_norm_squared": norm,
        "trace": trace,
        "noise_scale": trace / norm,
        "batches": rows,
    }


def drawn(n: int, batch: int, count: int) -> list[Tensor]:
    """`count` batches as SGD draws them, the smaller last ones of epochs left out."""
    order = Batches(n, batch, seed=7)
    whole = n // batch
    return [order.at(i // whole * order.steps_per_epoch + i % whole) for i in range(count)]


def gradient(setting: Setting, model: nn.Module, indices: Tensor) -> Tensor:
    """The gradient of the mean loss over a batch, in one vector."""
    model.zero_grad()
    inputs, targets = setting.task.train.batch(indices)
    torch.autograd.backward(setting.task.loss(model(inputs), targets))
    return torch.cat(
        [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
    ).double()


def name_of(row: dict[str, Any]) -> str:
    return f"all {row['batch']:,}" if row["all"] else f"{row['batch']:,}"


def best_so_far(values: list[float | None], falling: bool) -> list[float]:
    choose, start = (min, math.inf) if falling else (max, -math.inf)
    return list(
        itertools.accumulate((start if value is None else value for value in values), choose)
    )


def draw(result: dict[str, Any], out: Path) -> None:
    """Figures of a result: curves, and what a batch size costs, for each task."""
    for one in result["tasks"]:
        per_epoch = {row["batch"]: -(-one["examples"] // row["batch"]) for row in one["rows"]}
        against: dict[Axis, list[Curve]] = {
            (epochs := Axis("epochs", log=True)): [],
            (seconds := Axis("seconds", log=True)): [],
            (operations := Axis("operations", log=True, short=True)): [],
        }
        accuracies = []
        for row in one["rows"]:
            name = name_of(row)
            steps = row["curve"]["step"]
            each = per_epoch[row["batch"]]
            loss = best_so_far(row["curve"]["loss"], falling=True)
            against[epochs].append(Curve(name, [step / each for step in steps], loss))
            against[seconds].append(Curve(name, row["curve"]["seconds"], loss))
            against[operations].append(
                Curve(name, [step * row["flops_per_step"] for step in steps], loss)
            )
            right = best_so_far(row["test"]["accuracy"], falling=False)
            accuracies.append(Curve(name, [step / each for step in row["test"]["step"]], right))
        panels = [
            lines(
                f"Training loss against {axis.title}", curves, axis, Axis("training loss", log=True)
            )
            for axis, curves in against.items()
        ]
        panels.append(
            lines(
                "Test accuracy against epochs", accuracies, epochs, Axis("test accuracy", high=1.0)
            )
        )
        save(out / f"gradient-descent-{one['task']}.svg", f"Batch sizes on {one['task']}", panels)
        draw_costs(one, out)


def over_best(rows: list[dict[str, Any]], key: str) -> list[float]:
    best = min(row[key] for row in rows)
    return [row[key] / best for row in rows]


def draw_costs(one: dict[str, Any], out: Path) -> None:
    rows = one["rows"]
    fitted = one["fit"]
    sizes = [row["batch"] for row in rows]
    curve = [fitted["least_steps"] * (1 + fitted["critical_batch"] / size) for size in sizes]
    batch = Axis("batch size", log=True, short=True)
    steps = lines(
        f"Steps to a training loss of {one['target']:g}",
        [
            Curve("measured", sizes, [row["steps"] for row in rows], marks=True),
            Curve(
                f"fit, critical batch {fitted['critical_batch']:.0f}",
                sizes,
                curve,
                dashed=True,
                colour=NEUTRAL,
            ),
        ],
        batch,
        Axis("steps", log=True, short=True),
    )
    rates = lines(
        "The best learning rate",
        [Curve("", sizes, [row["rate"] for row in rows], marks=True)],
        batch,
        Axis("learning rate", log=True),
    )
    noises = []
    expected = []
    for position, when in enumerate(one["gradients"]):
        batches = when["batches"]
        of = [r["batch"] for r in batches]
        measured = [r["variance"] for r in batches]
        by_rule = [r["expected"] for r in batches]
        noises.append(Curve(f"{when['epochs']} epochs", of, measured, marks=True))
        expected.append(Curve("", of, by_rule, dashed=True, colour=position))
    variance = lines(
        "Variance of a batch's gradient (dashed: expected)",
        noises + expected,
        batch,
        Axis("variance", log=True),
    )
    costs = bars(
        "Relative cost to the target (best = 1)",
        [name_of(row) for row in rows],
        {key: over_best(rows, key) for key in ("epochs", "operations", "seconds")},
        Axis("times the best", log=True, low=0.9),
    )
    title = f"What a batch size costs on {one['task']}"
    save(out / f"gradient-descent-{one['task']}-costs.svg", title, [steps, rates, variance, costs])


def describe(result: dict[str, Any], page: Path) -> None:
    """The tables of the page."""
    blocks = {}
    for one in result["tasks"]:
        rows = [
            [
                name_of(row),
                f"{row['rate']:g}",
                f"{row['steps']:,.0f}",
                f"{row['epochs']:,.2f}",
                f"{row['operations'] / 1e9:.3g} G",
                f"{row['seconds']:.2f}",
                f"{row['microseconds_per_example']:.1f}",
                row["reached"].replace(" seeds", ""),
            ]
            for row in one["rows"]
        ]
        head = [
            "batch",
            "best rate",
            "steps",
            "epochs",
            "operations",
            "seconds",
            "µs an example",
            "seeds that reached the target",
        ]
        blocks[f"{one['task']}-costs"] = table(head, rows)
        fitted = one["fit"]
        noises = [
            [
                f"after {when['epochs']} epochs" if when["epochs"] else "at the start",
                f"{when['gradient_norm_squared']:.3g}",
                f"{when['trace']:.3g}",
                f"{when['noise_scale']:.0f}",
            ]
            for when in one["gradients"]
        ]
        noises.append(["critical batch size of the fit", "", "", f"{fitted['critical_batch']:.0f}"])
        head = [
            "",
            "squared norm of the gradient",
            "trace of the covariance",
            "noise scale, examples",
        ]
        blocks[f"{one['task']}-noise"] = table(head, noises)
    fill(page, blocks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="folder of MNIST's four IDX files; without it digits alone"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="three batch sizes, targets that are reached soon"
    )
    parser.add_argument("--out", type=Path, help="folder for the figures")
    parser.add_argument("--page", type=Path, help="the page whose tables to fill")
    parser.add_argument(
        "--from",
        type=Path,
        dest="earlier",
        help="a result to draw again, without measuring",
    )
    takes_result(parser)
    asked = parser.parse_args()
    result = measured_all(asked) if asked.earlier is None else json.loads(asked.earlier.read_text())
    if asked.earlier is None:
        give(result, asked.result)
    if asked.out is not None:
        draw(result, asked.out)
    if asked.page is not None:
        describe(result, asked.page)


def measured_all(asked: argparse.Namespace) -> dict[str, Any]:
    tasks = []
    for setting in settings(asked.data, asked.quick):
        rows = batch_sizes(setting, asked.seeds)
        middle = next(row for row in rows if row["batch"] >= 64)
        tasks.append(
            {
                "task": setting.name,
                "examples": setting.n,
                "target": setting.target,
                "rows": rows,
                "fit": fit(rows),
                "gradients": gradients(setting, middle["rate"], middle["batch"]),
            }
        )
    grid = [2.0**exponent for exponent in EXPONENTS]
    about = {
        "benchmark": "gradient_descent",
        "grid": grid,
        "seeds": asked.seeds,
        "threads": torch.get_num_threads(),
    }
    return {**about, "torch": torch.__version__, "tasks": tasks}


if __name__ == "__main__":
    main()
