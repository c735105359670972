"""What travels in each system: bytes and messages of every participant, what is hidden, who waits.

Every parallelism of dure's catalogue, and FedAvg, trains the same model on the same number of
samples: an MLP of 10 million parameters (784-2800-2800-10) or, with --task digits, one of 55,210.
Bytes and messages are counted with --count-ranks workers and compared with the formula of the
system's leading term, without tails and padding. Time is measured with --ranks workers, in rounds
in which each system runs once, beginning with another one each time; shares are medians over the
rounds.

    python benchmarks/communication.py --out docs/images --page docs/study-communication.md \\
        --result benchmarks/results/communication.json
    python benchmarks/communication.py --systems data-parallel local-sgd --quick
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from figures import Axis, Panel, bars, save
from outcome import give, takes_result
from pages import fill, table
from torch import nn
from torch.nn import functional as F

import dure
from dure.collectives.all_reduce import ALGORITHMS
from dure.collectives.cost import bytes_sent
from dure.contracts.world import World
from dure.record import idleness
from dure.record.meter import Counters
from dure.record.run import RunFolder
from dure.run.registry import parse_strategy, strategy_class

BATCH = 64
STEPS = 8
"""Examples of a joint step, and steps of an epoch."""

PERIOD = 4
"""Steps between the synchronisations of systems that have few."""

JSON = dict[str, Any]


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Facts:
    """What formulas are made of. d: parameters. n: workers. inputs, outputs: elements of an
    example. epochs: all."""

    d: int
    n: int
    inputs: int
    width: int
    outputs: int
    epochs: int

    @property
    def steps(self) -> int:
        return STEPS * self.epochs


Formula = Callable[[Facts], list[float]]
"""Bytes that each participant sends in the whole run, in the order of the meters."""


@dataclass(frozen=True)
class Case:
    """One contender. spec: as `dure compare` takes it. kind: of the world, None is the strategy's
    own. what: travels, in words. formula: its leading term, in symbols. sent: the same as numbers.
    also: what its label does not say."""

    spec: str
    what: str
    formula: str
    sent: Formula | None = None
    kind: str | None = None
    also: str = ""

    @property
    def system(self) -> str:
        return self.spec.partition(",")[0]

    def spec_of(self, ranks: int) -> str:
        return self.spec.format(n=ranks, half=ranks // 2)


def by_all_reduce(algorithm: str, of: Callable[[Facts], float]) -> Formula:
    """All ranks sum d elements as often as `of` says."""
    same = "ring" if algorithm in ("native", "auto") else algorithm

    def sent(facts: Facts) -> list[float]:
        return [of(facts) * bytes_sent(same, 4 * facts.d, facts.n, rank) for rank in range(facts.n)]

    return sent


def every_step(facts: Facts) -> float:
    return facts.steps


def every_period(facts: Facts) -> float:
    return facts.steps / PERIOD


def zero_sends(times: int) -> Formula:
    return lambda facts: [times * (facts.n - 1) / facts.n * 4 * facts.d * facts.steps] * facts.n


def master_and_workers(facts: Facts) -> list[float]:
    """The master hands out inputs and gradients of outputs; a worker hands back outputs and
    gradients."""
    master = 4 * BATCH * (facts.inputs + facts.outputs) * facts.steps
    worker = (4 * BATCH * facts.outputs / facts.n + 4 * facts.d) * facts.steps
    return [master, *[worker] * facts.n]


def stages(facts: Facts) -> list[float]:
    """Activations to the stage behind, their gradients to the one before; all cuts lie in the
    hidden layers."""
    cut = 4 * BATCH * facts.width * facts.steps
    return [cut * ((rank < facts.n - 1) + (rank > 0)) for rank in range(facts.n)]


def neighbours(facts: Facts) -> list[float]:
    """What the two hidden layers, by columns and by rows, sum over all ranks: the activations, once
    a step."""
    return [2 * (facts.n - 1) / facts.n * 4 * BATCH * facts.width * facts.steps] * facts.n


def pairs_of_neighbours(facts: Facts) -> list[float]:
    """Pairs of tensor neighbours; each rank sums the gradients of its half with its like in the
    other pairs."""
    pairs = facts.n // 2
    elements = BATCH / pairs * facts.width + 2 * (pairs - 1) / pairs * facts.d / 2
    return [4 * elements * facts.steps] * facts.n


def server_and_clients(facts: Facts) -> list[float]:
    return [4 * facts.d * facts.n * facts.epochs, *[4 * facts.d * facts.epochs] * facts.n]


RING = "2(N-1)/N · d a step"
CASES = [
    Case("single-worker", "nothing", "0", lambda facts: [0.0]),
    *(
        Case(
            f"data-parallel,all_reduce={algorithm}",
            "gradients, summed",
            {
                "master": "d a step; rank 0: (N-1) · d",
                "tree": "up to (1 + log2 N) · d a step",
            }.get(algorithm, RING),
            by_all_reduce(algorithm, every_step),
        )
        for algorithm in ALGORITHMS
    ),
    *(
        Case(
            f"data-parallel,all_reduce=native,overlap={overlap}",
            "gradients, summed",
            RING,
            by_all_reduce("native", every_step),
            also=f", {overlap} backward",
        )
        for overlap in ("beside", "after")
    ),
    Case(
        "data-parallel",
        "inputs, outputs, gradients",
        "worker: d + outputs a step; master: inputs + outputs",
        master_and_workers,
        kind="threads",
    ),
    Case("data-parallel,compression=cast:bfloat16", "gradients, rounded", f"1/2 · {RING}"),
    Case(
        "data-parallel,compression=top-k:0.01",
        "the largest gradients",
        "about 2 · 0.01 (N-1) · d a step",
    ),
    Case(
        "data-parallel,compression=power-sgd:2",
        "factors of rank 2",
        "2 · 2(N-1)/N · (rows + columns) a matrix",
    ),
    Case("zero,stage=1", "gradients; parameters", RING, zero_sends(2)),
    Case("zero,stage=2", "gradients; parameters", RING, zero_sends(2)),
    Case("zero,stage=3", "gradients; parameters twice", "3(N-1)/N · d a step", zero_sends(3)),
    Case(
        f"local-sgd,period={PERIOD}",
        "weights",
        "1/H of data parallel",
        by_all_reduce("ring", every_period),
    ),
    Case(
        f"diloco,period={PERIOD}",
        "weights",
        "1/H of data parallel",
        by_all_reduce("ring", every_period),
    ),
    Case(
        f"admm,local_steps={PERIOD}",
        "weights and duals, as one sum",
        "1/H of data parallel",
        by_all_reduce("ring", every_period),
    ),
    Case(
        "parallel-sgd",
        "weights, once",
        "2(N-1)/N · d a run",
        by_all_reduce("ring", lambda facts: 1.0),
    ),
    Case(
        "layers-per-core,microbatches=4",
        "activations, and their gradients",
        "2 · B · width a cut and step",
        stages,
    ),
    Case(
        "pipeline,microbatches=4",
        "activations, and their gradients",
        "2 · B · width a cut and step",
        stages,
    ),
    Case(
        "tensor-parallel",
        "activations, summed",
        "2(N-1)/N · B · width a pair of layers and step",
        neighbours,
    ),
    Case(
        "parallel,data={half},tensor=2",
        "activations, summed; gradients of halves",
        "T tensor, D data: 2(T-1)/T · B/D · width + 2(D-1)/D · d/T a step",
        pairs_of_neighbours,
    ),
    Case("hogwild", "nothing: shared memory", "0", lambda facts: [0.0] * facts.n, kind="threads"),
    Case("hogwild", "nothing: shared memory", "0", lambda facts: [0.0] * facts.n, kind="ranks"),
    Case(
        "fed-avg,fraction=1.0,local_epochs=1,clients={n}",
        "weights down, updates up",
        "client: d a round; server: K · d",
        server_and_clients,
    ),
]


def cases(systems: list[str]) -> list[Case]:
    """The cases of these systems."""
    return [case for case in CASES if case.system in systems]


WIDTHS = {"mlp": 2800, "digits": 200}
"""Of the hidden layers, by the name of the task."""


def mlp() -> nn.Module:
    """10,068,810 parameters, as a chain of layers."""
    return nn.Sequential(
        nn.Linear(784, 2800), nn.ReLU(), nn.Linear(2800, 2800), nn.ReLU(), nn.Linear(2800, 10)
    )


def small() -> nn.Module:
    """55,210 parameters: the MLP of digits."""
    return nn.Sequential(
        nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    )


def task_of(name: str) -> dure.Task:
    """What is sent does not depend on what is learned: random inputs and labels, eight batches of
    them."""
    inputs = 784 if name == "mlp" else 64
    generator = torch.Generator().manual_seed(0)
    data = (
        torch.randn(BATCH * STEPS, inputs, generator=generator),
        torch.randint(0, 10, (BATCH * STEPS,), generator=generator),
    )
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9)  # noqa: E731
    return dure.Task(
        mlp if name == "mlp" else small, F.cross_entropy, data, optimizer=optimizer, name=name
    )


def world_of(case: Case, ranks: int) -> World:
    own = strategy_class(case.system)
    kind = case.kind or own.kind
    if case.system == "single-worker":
        return dure.Processes(1)
    if kind == "clients":
        return dure.Simulated()
    return dure.Threads(ranks) if kind == "threads" else dure.Processes(ranks)


def run(case: Case, task: dure.Task, ranks: int, epochs: int) -> tuple[dure.Run, list[Counters]]:
    """A run, and the counters of its workers at the end."""
    strategy = parse_strategy(case.spec_of(ranks))
    with tempfile.TemporaryDirectory() as folder:
        done = dure.train(
            task,
            strategy,
            world_of(case, ranks),
            dure.Stop(epochs=epochs),
            out=Path(folder) / "run",
            evaluate_every=10**9,
            checkpoint_every=10**9,
        )
        checkpoint = RunFolder(Path(folder) / "run").read_checkpoint()
        assert checkpoint is not None
        return done, [Counters(**row) for row in checkpoint.tree["workers"]]


def check(chosen: list[Case], task: dure.Task, ranks: int) -> None:
    """Raises ValueError if one of them cannot run with so many workers."""
    for case in chosen:
        parse_strategy(case.spec_of(ranks)).check(task, world_of(case, ranks))


def label_of(case: Case, ranks: int) -> str:
    """As tables call it, with the world's name where the strategy has no label of its own for
    it."""
    world, strategy = world_of(case, ranks), parse_strategy(case.spec_of(ranks))
    label = strategy.label_in(world.kind) + case.also
    return label if case.kind is None or label != strategy.label else f"{label} in {world.name}"


def counted(case: Case, task: dure.Task, ranks: int, epochs: int) -> JSON:
    """Bytes and messages of every participant in an epoch, and the formula's."""
    done, workers = run(case, task, ranks, epochs)
    inputs = task.train.inputs[0].numel()
    outputs = 10
    epochs = round(done.summary["epochs"])
    facts = Facts(done.summary["parameters"], ranks, inputs, WIDTHS[task.name], outputs, epochs)
    expected = case.sent(facts) if case.sent is not None else None
    sent = [one.bytes_sent for one in workers]
    row = {
        "label": label_of(case, ranks),
        "system": case.system,
        "strategy": case.spec_of(ranks),
        "world": done.summary["world"],
        "what": case.what,
        "formula": case.formula,
        "participants": [one["name"] for one in done.summary["per_worker"]],
        "epochs": facts.epochs,
        "bytes_sent_per_epoch": [value / facts.epochs for value in sent],
        "formula_bytes_per_epoch": None
        if expected is None
        else [value / facts.epochs for value in expected],
        "bytes_over_formula": None
        if not expected or not sum(expected)
        else sum(sent) / sum(expected),
        "messages_per_epoch": [one.messages_sent / facts.epochs for one in workers],
        "busiest_over_mean": max(sent) / (sum(sent) / len(sent)) if sum(sent) else None,
        "peak_memory": [one.peak_memory for one in workers],
    }
    ratio = row["bytes_over_formula"]
    beside = "" if ratio is None else f", {ratio:.4f} of the formula"
    show(f"{row['label']:<44} {sum(sent) / facts.epochs / 1e6:9.2f} MB an epoch{beside}")
    return row


KINDS = ("compute", "communication", "idle", "hidden")
"""Kinds of a participant's seconds."""


def timed(case: Case, task: dure.Task, ranks: int, epochs: int) -> JSON | None:
    """Seconds of an epoch and where they went, for every participant; None where clients only
    simulate."""
    if "clients" in strategy_class(case.system).traits.kinds:
        return None
    done, workers = run(case, task, ranks, epochs)
    epochs_done = done.summary["epochs"]
    row: JSON = {"seconds": done.summary["seconds"] / epochs_done}
    for kind in KINDS:
        row[kind] = [getattr(one, f"{kind}_seconds") / epochs_done for one in workers]
    return row


def summed_up(rounds: list[JSON]) -> JSON:
    """Medians over the rounds. Shares are of the time that all participants spend together."""

    def median(of: Callable[[JSON], float]) -> float:
        return statistics.median(map(of, rounds))

    def share(kind: str) -> float:
        return median(
            lambda one: (
                sum(one[kind]) / (sum(one["compute"] + one["communication"] + one["idle"]) or 1.0)
            )
        )

    def by_participant(kind: str) -> list[float]:
        every_round = [one[kind] for one in rounds]
        return [statistics.median(values) for values in zip(*every_round, strict=True)]

    def hidden(one: JSON) -> float:
        total = sum(one["hidden"]) + sum(one["communication"])
        return sum(one["hidden"]) / total if total else 0.0

    return {
        "seconds_per_epoch": median(lambda one: one["seconds"]),
        "compute_share": share("compute"),
        "communication_share": share("communication"),
        "idle_share": share("idle"),
        "hidden_of_communication": median(hidden),
        "compute_of_busiest_over_mean": median(
            lambda one: max(one["compute"]) * len(one["compute"]) / (sum(one["compute"]) or 1.0)
        ),
        **{f"{kind}_seconds": by_participant(kind) for kind in KINDS},
    }


def measured(asked: argparse.Namespace) -> JSON:
    task = task_of(asked.task)
    chosen = cases(asked.systems)
    rows = [counted(case, task, asked.count_ranks, 1 if asked.quick else 2) for case in chosen]
    rounds: list[list[JSON]] = [[] for _ in chosen]
    for turn in range(asked.repeat):
        for position in range(len(chosen)):
            at = (position + turn) % len(chosen)
            one = timed(chosen[at], task, asked.ranks, 2 if asked.quick else 4)
            if one is not None:
                rounds[at].append(one)
        show(f"round {turn + 1} of {asked.repeat}")
    for case, row, found in zip(chosen, rows, rounds, strict=True):
        row["time"] = {"label": label_of(case, asked.ranks), **summed_up(found)} if found else None
        if row["time"] is not None:
            show(
                f"{row['time']['label']:<44} {row['time']['seconds_per_epoch'] * 1e3 / STEPS:8.1f} "
                f"ms a step, "
                f"communication {row['time']['communication_share']:.0%}, idle "
                f"{row['time']['idle_share']:.0%}, "
                f"hidden {row['time']['hidden_of_communication']:.0%}"
            )
    return {
        "benchmark": "communication",
        "task": asked.task,
        "batch": BATCH,
        "steps_per_epoch": STEPS,
        "period": PERIOD,
        "counted_with": asked.count_ranks,
        "timed_with": asked.ranks,
        "repeat": asked.repeat,
        "torch": torch.__version__,
        "rows": rows,
    }


def draw(result: JSON, out: Path) -> None:
    """Bytes and messages of every participant; where the time goes."""
    rows = [row for row in result["rows"] if sum(row["bytes_sent_per_epoch"])]
    most = max(len(row["participants"]) for row in rows)
    labels = [row["label"] for row in rows]

    def by_participant(key: str, unit: float) -> dict[str, list[float | None]]:
        """A master or server first, then workers; systems without one leave the first row empty."""
        names = ["master or server", *(f"worker {rank}" for rank in range(most - 1))]
        columns: dict[str, list[float | None]] = {name: [] for name in names}
        for row in rows:
            values = (
                row[key] if row["participants"][0] in ("master", "server") else [None, *row[key]]
            )
            padded = [*values, *[None] * (most - len(values))]
            for name, value in zip(names, padded, strict=True):
                columns[name].append(None if not value else value / unit)
        return columns

    steps = result["steps_per_epoch"]
    n = result["counted_with"]
    panels: list[Panel] = [
        bars(
            "Sent in a step",
            labels,
            by_participant("bytes_sent_per_epoch", steps * 1e6),
            Axis("MB", log=True),
            width=620,
        ),
        bars(
            "Messages in a step",
            labels,
            by_participant("messages_per_epoch", steps),
            Axis("messages", log=True),
            width=620,
        ),
    ]
    save(
        out / "communication-bytes.svg",
        f"What each of {n} workers sends, and who stands out",
        panels,
    )
    timed_rows = [row for row in result["rows"] if row["time"] is not None]
    labels = [row["time"]["label"] for row in timed_rows]
    shares = {}
    for kind in ("compute", "communication", "idle"):
        shares[kind] = [row["time"][f"{kind}_share"] * 100 for row in timed_rows]
    hidden = {"": [row["time"]["hidden_of_communication"] * 100 for row in timed_rows]}
    step = {"": [row["time"]["seconds_per_epoch"] / steps * 1e3 for row in timed_rows]}
    uneven = {"": [row["time"]["compute_of_busiest_over_mean"] for row in timed_rows]}
    panels = [
        bars(
            "Where the time goes",
            labels,
            shares,
            Axis("% of all workers' time", high=100.0),
            stacked=True,
            width=620,
        ),
        bars(
            "Communication behind computation",
            labels,
            hidden,
            Axis("% hidden", low=0.0, high=100.0),
            width=620,
        ),
        bars("A step", labels, step, Axis("ms"), width=620),
        bars(
            "Computing: the busiest over the mean",
            labels,
            uneven,
            Axis("times the mean", low=0.0),
            width=620,
        ),
    ]
    save(
        out / "communication-time.svg",
        f"{result['timed_with']} workers on two cores: what hides, who waits",
        panels,
    )


def describe(result: JSON, page: Path) -> None:
    """The tables of the page."""
    steps = result["steps_per_epoch"]

    def one(row: JSON) -> list[str]:
        sent = [value / steps / 1e6 for value in row["bytes_sent_per_epoch"]]
        ratio = row["bytes_over_formula"]
        most = max(sent)
        first = row["participants"][0] in ("master", "server")
        workers = sent[1:] if first else sent
        return [
            row["label"],
            row["what"],
            row["formula"],
            f"{statistics.fmean(workers):.3g}",
            f"{most:.3g}"
            + (
                f" ({row['participants'][sent.index(most)]})"
                if most > 1.01 * max(min(sent), 1e-9)
                else ""
            ),
            "" if ratio is None else f"{ratio:.4f}",
            f"{max(row['messages_per_epoch']) / steps:.3g}",
        ]

    def other(row: JSON) -> list[str]:
        time = row["time"]
        shares = [f"{time[share]:.0%}" for share in ("compute_share", "communication_share")]
        shares += [idleness.written(time["idle_share"]), f"{time['hidden_of_communication']:.0%}"]
        each = f"{time['seconds_per_epoch'] / steps * 1e3:.1f}"
        uneven = f"{time['compute_of_busiest_over_mean']:.2f}"
        return [time["label"], each, *shares, uneven]

    sent = [
        "system",
        "content",
        "elements that a worker sends",
        "MB a worker",
        "MB of the busiest",
        "counted over formula",
    ]
    times = [
        "system",
        "ms a step",
        "compute",
        "communication",
        "idle (over busy)",
        "hidden",
        "busiest / mean compute",
    ]
    fill(
        page,
        {
            "sent": table([*sent, "messages"], [one(row) for row in result["rows"]]),
            "time": table(times, [other(row) for row in result["rows"] if row["time"] is not None]),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = list(dict.fromkeys(case.system for case in CASES))
    parser.add_argument(
        "--systems", nargs="+", choices=known, default=known, metavar="SYSTEM", help="by name; all"
    )
    parser.add_argument("--task", choices=("mlp", "digits"), default="mlp")
    parser.add_argument("--count-ranks", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer epochs a run")
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
    try:
        for ranks in (asked.count_ranks, asked.ranks):
            check(cases(asked.systems), task_of(asked.task), ranks)
    except ValueError as error:
        parser.error(f"with {ranks} workers: {error}")
    result = measured(asked) if asked.earlier is None else json.loads(asked.earlier.read_text())
    if asked.earlier is None:
        give(result, asked.result)
    if asked.out is not None:
        draw(result, asked.out)
    if asked.page is not None:
        describe(result, asked.page)


if __name__ == "__main__":
    main()
