"""Federated against distributed: every family's representative on one task, point by point.

The task is the built-in digits with the MLP of 55,210 parameters, at one rate for all. An optimizer
step of every system takes 32 examples, whether workers make it together or each client makes its
own. All systems make the same number of passes. Accuracies are means over seeds. The parts:

    side by side    four workers or clients, 20 passes: accuracy, bytes, steps, virtual time
    skew            ten clients by how their data differ, beside two references: a model of all data
                    pooled, and each client alone
    clients         the same data over 4 to 1,000 clients, what sending the data themselves would
                    cost over the same link, and the round at which more than that was sent
    reliability     drop-outs, stragglers and absence: who waits, and how long
    liars           attackers against the mean and against robust rules
    privacy         what protection costs, and what is seen by whom
    latency         a prediction on the device against one on the server, over links of three kinds

Systems that work under a virtual clock have the same devices and links: 100 examples a second, 6
Mbit/s down and 2 up. What a system refuses is part of the result, in its own words.

    python benchmarks/study_families.py --figures docs/images --page docs/study-families.md \\
        --result benchmarks/results/study_families.json

It needs no data, and takes about ten minutes on two cores. Progress goes to standard error, the
result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from figures import NEUTRAL, Axis, Curve, lines, save
from outcome import give, takes_result
from pages import fill, table
from torch import nn

import dure
from dure.contracts.strategy import Strategy
from dure.contracts.world import World
from dure.run.latency import latency, measure_latency

ROW = dict[str, Any]
TEAM = 4
"""Workers or clients side by side: as many processes as two cores still carry."""
CLIENTS = 10
PASSES = 20
STEP = 32
"""Examples of an optimizer step."""
PERIOD = 20
"""Steps between averages of local SGD: they divide the steps of all passes."""
ATTACK = "sign-flip:3"
GOAL = 0.9
LAST = 1_000_000
"""Between evaluations: only what a run ends with is measured."""
SERVER_MBIT = 20.0
ENERGY = "joules:1e-10:2e-6:9e-6"
"""Of an operation, a byte down and a byte up: an assumption, as `dure.fleet.energy` has none."""

SKEWS = {
    "IID": "iid",
    "Dirichlet 1": "dirichlet:1",
    "Dirichlet 0.1": "dirichlet:0.1",
    "2 labels a client": "label-shards:2",
    "1 label a client": "label-shards:1",
    "unequal sizes": "quantity-skew:0.5",
    "inputs that look alike": "feature-skew:1",
    "blocks in order": "blocks:1",
}
LINKS = {
    "2 Mbit/s up, 6 down, 40 ms": (2.0, 6.0, 0.04),
    "20 Mbit/s up, 60 down, 15 ms": (20.0, 60.0, 0.015),
    "1 Gbit/s, 1 ms": (1000.0, 1000.0, 0.001),
}
"""(Mbit/s up, Mbit/s down, seconds of delay one way)."""
SLOWER = 10.0
"""How many times longer a device takes for a prediction than this machine."""
SIZES = (4, 10, 30, 100, 300, 1000)
ALONE = 100
"""Clients that still have enough examples to hold some out."""


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def passes(count: float) -> dure.Stop:
    return dure.Stop(epochs=count)


def rounds(count: int) -> dure.Stop:
    return dure.Stop(rounds=count)


class Bench:
    """Trains the task, and says what came of it. seeds: how many accuracies are a mean of."""

    def __init__(self, seeds: int) -> None:
        self.task = dure.load_task("digits")
        self.seeds = range(seeds)

    def once(
        self,
        strategy: Strategy,
        world: World | None,
        stop: dure.Stop,
        seed: int = 0,
        every: int | None = None,
    ) -> ROW:
        """every: steps or rounds between evaluations."""
        run = dure.train(self.task, strategy, world, stop, seed=seed, evaluate_every=every)
        summary = run.summary
        # Of all bytes, those that one worker sends; the same share all along.
        share = summary["bytes_sent_per_worker"] / max(1, summary["bytes_sent"])
        curve = [
            {
                "epoch": point.epoch,
                "bytes": point.bytes_sent * share,
                "accuracy": point.metrics["test_accuracy"],
            }
            for point in run.history.evaluations
        ]
        return {
            "accuracy": summary["test_accuracy"],
            "client_accuracy": summary.get("client_accuracy"),
            "worst_tenth": summary.get("client_accuracy_p10"),
            "personal_accuracy": summary.get("personal_accuracy"),
            "rounds": summary["steps"],
            "unit": summary["unit"],
            "epochs": summary["epochs"],
            "bytes_a_worker": summary["bytes_sent_per_worker"],
            "virtual_seconds": summary["numbers"].get("virtual_seconds"),
            "epsilon": summary["numbers"].get("epsilon"),
            "distance_correlation": summary["numbers"].get("distance_correlation"),
            "curve": curve,
            "exposure": exposure(summary.get("facts")),
            "cost": ((summary.get("facts") or [None])[0] or {}).get("cost"),
        }

    def over_seeds(
        self,
        name: str,
        strategy: Strategy,
        world: World | None,
        stop: dure.Stop,
        every: int | None = LAST,
    ) -> ROW:
        """The means of a run under each seed; or what refuses it, or that it diverges."""
        row: ROW = {"system": name, "batch": examples_of_step(self.task, strategy, world)}
        try:
            found = [self.once(strategy, world, stop, seed, every) for seed in self.seeds]
        except (ValueError, dure.errors.DureError) as error:
            show(f"{name}: {error}")
            # A run that began and failed: none of its updates is finite.
            key = "refused" if isinstance(error, ValueError) else "diverges"
            return {**row, key: str(error).splitlines()[0]}
        for key in MEANS:
            values = [one[key] for one in found if one[key] is not None]
            row[key] = mean(values) if values else None
        accuracies = [one["accuracy"] for one in found]
        row["accuracies"] = accuracies
        row["deviation"] = stdev(accuracies) if len(accuracies) > 1 else None
        for key in ("cost", "exposure", "unit"):
            row[key] = found[0][key]
        row["curve"] = [
            {**points[0], "accuracy": mean(point["accuracy"] for point in points)}
            for points in zip(*(one["curve"] for one in found), strict=True)
        ]
        # A single evaluation, at the end, is no curve.
        reached = (one for one in row["curve"] if every != LAST and one["accuracy"] >= GOAL)
        row["until_goal"] = next(reached, None)
        show(f"{name}: {row['accuracy']:.4f}")
        return row


MEANS = (
    "accuracy",
    "client_accuracy",
    "worst_tenth",
    "personal_accuracy",
    "bytes_a_worker",
    "virtual_seconds",
    "rounds",
    "epochs",
    "epsilon",
    "distance_correlation",
)
"""Numbers of a run of which the rows have the mean over seeds."""


def examples_of_step(task: dure.Task, strategy: Strategy, world: World | None) -> float | None:
    """Examples of an optimizer step, joint or separate; None is all data."""
    batches = strategy.batches_of_step(task, None if world is None else world.workers)
    size = strategy.batch_size
    return None if size is None or batches is None else float(size * batches)


def exposure(facts: Any) -> list[tuple[str, str]]:
    """Who could learn what, as the first worker's facts tell it."""
    told = facts[0].get("exposure") if facts and facts[0] else None
    return [tuple(one) for one in told] if isinstance(told, list) else []


def side_by_side(bench: Bench) -> list[ROW]:
    """Each family's representative at four workers or clients."""
    simulated = dure.Simulated()
    ranks = dure.Processes(TEAM)
    # Each client brings its share of a joint step.
    byzantine = dure.ByzantineGD(clients=TEAM, groups=TEAM, batch_size=STEP // TEAM)
    own: dict[str, Any] = {"clients": TEAM, "batch_size": STEP}
    asked: list[tuple[str, str, int, Strategy, World | None]] = [
        ("single worker", "nothing", 1, dure.SingleWorker(batch_size=STEP), None),
        (
            "data parallel",
            "gradients, every step",
            1,
            dure.DataParallel(batch_size=STEP, all_reduce="ring"),
            ranks,
        ),
        (
            "local SGD",
            f"weights, every {PERIOD} steps",
            TEAM,
            dure.LocalSGD(batch_size=STEP * TEAM, period=PERIOD),
            ranks,
        ),
        (
            "parameter server",
            "gradients up, weights down, every step",
            1,
            dure.ParameterServer(workers=TEAM, batch_size=STEP),
            simulated,
        ),
        ("FedAvg", "weights both ways, every pass", TEAM, dure.FedAvg(**own), simulated),
        ("FedAsync", "the same, without rounds", TEAM, dure.FedAsync(**own), simulated),
        ("Byzantine GD", "gradients up, weights down, every step", 1, byzantine, simulated),
        (
            "split learning",
            "activations, their gradients, heads",
            TEAM,
            dure.SplitLearning(**own),
            simulated,
        ),
        (
            "local only, mean of the models",
            "nothing",
            TEAM,
            dure.LocalOnly(**own, held_out=0.0),
            simulated,
        ),
    ]
    found = []
    for name, travels, apart, strategy, world in asked:
        # Byzantine GD's round is a step, and its default an evaluation after each.
        every = math.ceil(len(bench.task.train) / STEP) if strategy is byzantine else None
        row = bench.over_seeds(name, strategy, world, passes(PASSES), every)
        steps = math.ceil(len(bench.task.train) / apart / STEP) * PASSES
        # Clients of split learning train in turn, all with the server's part of the model.
        if isinstance(strategy, dure.SplitLearning):
            apart, steps = 1, steps * apart
        found.append({**row, "travels": travels, "steps": steps, "separate": apart})
    return found


def skew(bench: Bench) -> list[ROW]:
    """By how clients' data differ: a federation, without rounds too, and each client alone."""
    found = []
    for title, partition in SKEWS.items():
        shared: dict[str, Any] = {"clients": CLIENTS, "batch_size": STEP, "held_out": 0.2}
        shared["partition"] = partition
        systems: dict[str, Strategy] = {
            "FedAvg": dure.FedAvg(**shared),
            "FedAsync": dure.FedAsync(**shared),
            "alone": dure.LocalOnly(**shared),
        }
        stop = passes(PASSES)
        row: ROW = {"skew": title, "partition": partition}
        for name, strategy in systems.items():
            row[name] = bench.over_seeds(f"{title}, {name}", strategy, dure.Simulated(), stop)
        found.append(row)
    return found


def sizes(bench: Bench) -> list[ROW]:
    """The same data over few or many clients, and what their upload would have cost."""
    found = []
    examples = len(bench.task.train)
    # Their link is the server's too: with many clients it is what they wait for.
    narrow = dure.Simulated(server_mbit=SERVER_MBIT, energy=ENERGY)  # type: ignore[arg-type]
    for clients in SIZES:
        # A client with fewer examples makes steps on all of them.
        federated = dure.FedAvg(clients=clients, batch_size=STEP)
        row = bench.over_seeds(f"{clients} clients", federated, narrow, rounds(PASSES))
        wide = bench.once(federated, dure.Simulated(), rounds(1))
        alone = None
        if clients <= ALONE:
            strategy = dure.LocalOnly(clients=clients, batch_size=STEP)
            alone = bench.over_seeds(f"{clients} alone", strategy, dure.Simulated(), rounds(PASSES))
        found.append(
            {
                **row,
                "clients": clients,
                "alone": alone,
                "examples_a_client": examples / clients,
                "round_seconds": row["virtual_seconds"] / row["rounds"],
                "round_seconds_without_limit": wide["virtual_seconds"],
            }
        )
    return found


def reliability(bench: Bench) -> list[ROW]:
    """The same conditions for a parameter server's workers and for clients of federations."""
    conditions: dict[str, dict[str, Any]] = {
        "calm": {},
        "drop-out 0.3": {"drop_out": 0.3},
        "a fifth 10 times slower": {"devices": "stragglers:0.2:10"},
        "away half of the time": {"availability": "probability:0.5:60"},
    }
    own: dict[str, Any] = {"clients": CLIENTS, "batch_size": STEP}
    systems: dict[str, Strategy] = {
        "parameter server, synchronous": dure.ParameterServer(workers=CLIENTS, batch_size=STEP),
        "parameter server, any staleness": dure.ParameterServer(
            workers=CLIENTS, batch_size=STEP, staleness=None
        ),
        "FedAvg": dure.FedAvg(**own),
        "FedAvg, half a round": dure.FedAvg(**own, fraction=0.5),
        "FedAsync": dure.FedAsync(**own),
    }
    return [
        {
            **bench.over_seeds(
                f"{name}, {condition}", strategy, dure.Simulated(**given), passes(PASSES)
            ),
            "system": name,
            "condition": condition,
        }
        for name, strategy in systems.items()
        for condition, given in conditions.items()
    ]


def liars(bench: Bench) -> list[ROW]:
    """Accuracy by how many lie and by who believes them."""
    own: dict[str, Any] = {"clients": CLIENTS, "batch_size": STEP}
    # Each client brings its share of a joint step: 3 examples, 30 together.
    byzantine = dure.ByzantineGD(clients=CLIENTS, groups=CLIENTS, batch_size=STEP // CLIENTS)
    systems: dict[str, Strategy] = {
        "FedAvg, mean": dure.FedAvg(**own),
        "FedAvg, median": dure.FedAvg(**own, aggregate="median"),  # type: ignore[arg-type]
        "FedAvg, Krum": dure.FedAvg(**own, aggregate="krum:3"),  # type: ignore[arg-type]
        "Byzantine GD": byzantine,
        "parameter server": dure.ParameterServer(workers=CLIENTS, batch_size=STEP),
        "split learning": dure.SplitLearning(**own),
    }
    attacks: dict[str, Mapping[str, Any]] = {
        "none": {},
        "2 flip signs": {"attack": ATTACK, "attackers": 2},
        "3 flip signs": {"attack": ATTACK, "attackers": 3},
        "3 flip labels": {"attack": "label-flip", "attackers": 3},
    }
    return [
        {
            **bench.over_seeds(
                f"{name}, {title}", strategy, dure.Simulated(**attack), passes(PASSES)
            ),
            "system": name,
            "attack": title,
        }
        for name, strategy in systems.items()
        for title, attack in attacks.items()
    ]


def privacy(bench: Bench) -> list[ROW]:
    """What protections cost, and what others see."""

    def guarded(privacy: str, clients: int = CLIENTS) -> Strategy:
        return dure.FedAvg(clients=clients, batch_size=STEP, privacy=privacy)  # type: ignore[arg-type]

    own: dict[str, Any] = {"clients": CLIENTS, "batch_size": STEP}
    systems: dict[str, Strategy] = {
        "FedAvg": dure.FedAvg(**own),
        "FedAvg, secure aggregation": guarded("secure-aggregation"),
        "FedAvg, DP of examples": guarded("dp-sgd:1:1.1"),
        "FedAvg, DP of 100 clients": guarded("user-level:1:0.5", 100),
        "split learning": dure.SplitLearning(**own, measure_leaks=True),
    }
    return [
        bench.over_seeds(name, strategy, dure.Simulated(), rounds(PASSES))
        for name, strategy in systems.items()
    ]


def latencies(bench: Bench) -> list[ROW]:
    """A model on the device against the same on the server, which computes as this machine does."""
    models = {
        "MLP": (bench.task, bench.task.model()),
        "VGG on 224 x 224 pixels": (pictures(), vgg()),
    }
    found = []
    for name, (task, model) in models.items():
        here = measure_latency(task, model)
        for link, (up, down, delay) in LINKS.items():
            both = latency(
                here.call,
                device_seconds=SLOWER * here.seconds,
                server_seconds=here.seconds,
                up_mbit=up,
                down_mbit=down,
                delay=delay,
            )
            found.append({"model": name, "link": link, "example": here.call[0], **both._asdict()})
    show("latency: done")
    return found


def pictures() -> dure.Task:
    """Of random pixels: how long a forward pass takes does not depend on them."""
    inputs = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    return dure.Task(model=vgg, loss=nn.CrossEntropyLoss(), train=(inputs, torch.tensor([0, 1])))


def vgg() -> nn.Module:
    """The layers of VGG-11 (Simonyan and Zisserman 2015, table 1, A) without the dense ones."""
    layers: list[nn.Module] = []
    before = 3
    for width in (64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None):
        if width is None:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


PARTS: dict[str, Callable[[Bench], list[ROW]]] = {
    "families": side_by_side,
    "skew": skew,
    "clients": sizes,
    "reliability": reliability,
    "liars": liars,
    "privacy": privacy,
    "latency": latencies,
}


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def size(value: float) -> str:
    if value < 1e3:
        return f"{value:,.0f} B"
    return f"{value / 1e3:,.0f} kB" if value < 1e6 else f"{value / 1e6:,.2f} MB"


def virtual(row: ROW) -> str:
    return "" if row["virtual_seconds"] is None else f"{row['virtual_seconds']:,.0f} s"


def families_table(rows: Sequence[ROW]) -> str:
    head = [
        "system",
        "messages",
        "batch of a step",
        "steps",
        "passes",
        "accuracy",
        "sent a worker",
        f"passes until {GOAL:.0%}",
        "sent until then",
        "virtual time",
    ]
    body = []
    for row in rows:
        goal = row["until_goal"]
        spread = "" if row["deviation"] is None else f" ± {100 * row['deviation']:.1f}"
        body.append(
            [
                row["system"],
                row["travels"],
                f"{row['batch']:g}",
                f"{row['steps']:,}" + (f" of each of {TEAM}" if row["separate"] > 1 else ""),
                f"{row['epochs']:.1f}",
                f"{100 * row['accuracy']:.1f}{spread} %",
                size(row["bytes_a_worker"]),
                "never" if goal is None else f"{goal['epoch']:.0f}",
                "" if goal is None else size(goal["bytes"]),
                virtual(row),
            ]
        )
    return table(head, body)


def skew_table(rows: Sequence[ROW]) -> str:
    head = ["data of clients", "FedAvg", "FedAvg, worst tenth", "FedAsync"]
    head += ["each alone, own data", "mean of those models"]
    return table(
        head,
        [
            [
                row["skew"],
                share(row["FedAvg"].get("client_accuracy")),
                share(row["FedAvg"].get("worst_tenth")),
                share(row["FedAsync"].get("client_accuracy")),
                share(row["alone"].get("personal_accuracy")),
                share(row["alone"].get("client_accuracy")),
            ]
            for row in rows
        ],
    )


def clients_table(rows: Sequence[ROW]) -> str:
    head = ["clients", "examples each", "FedAvg", "each alone", "a round", "a round, server's link"]
    head += ["sent in all", "data in all", "their upload", "joules"]
    head += ["joules of uploading", "break-even"]
    body = []
    for row in rows:
        cost = row["cost"]
        raw = cost["raw_data"]
        body.append(
            [
                f"{row['clients']:,}",
                f"{row['examples_a_client']:,.1f}",
                share(row["accuracy"]),
                share((row["alone"] or {}).get("personal_accuracy")),
                f"{row['round_seconds_without_limit']:.2f} s",
                f"{row['round_seconds']:.2f} s",
                size(cost["bytes"]),
                size(raw["bytes"]),
                f"{raw['seconds']:.2f} s",
                f"{cost['joules']:,.0f}",
                f"{raw['joules']:,.1f}",
                f"round {cost['break_even']}",
            ]
        )
    return table(head, body)


def crossed(
    rows: Sequence[ROW], column: str, cell: Callable[[ROW], str], refused: dict[str, str]
) -> str:
    """A row a system, a column a condition. refused: gets the words of each system that refuses."""
    columns = list(dict.fromkeys(row[column] for row in rows))
    body = []
    for system in dict.fromkeys(row["system"] for row in rows):
        cells = [system]
        for title in columns:
            row = next(one for one in rows if (one["system"], one[column]) == (system, title))
            if "refused" in row:
                refused.setdefault(row["refused"].replace("|", "\\|"), system)
            ended = next((key for key in ("refused", "diverges") if key in row), None)
            cells.append(ended or cell(row))
        body.append(cells)
    return table(["system", *columns], body)


def privacy_table(rows: Sequence[ROW]) -> str:
    head = ["system", "accuracy", "epsilon", "sent a client", "the server sees"]
    body = []
    for row in rows:
        if "refused" in row:
            body.append([row["system"], "refused", "", "", row["refused"]])
            continue
        seen = next((what for who, what in row["exposure"] if "server" in who), "")
        if row["distance_correlation"] is not None:
            seen = (
                f"activations of every batch; distance correlation with the inputs "
                f"{row['distance_correlation']:.2f}"
            )
        epsilon = "" if row["epsilon"] is None else f"{row['epsilon']:.3g}"
        cells = [row["system"], share(row["accuracy"]), epsilon, size(row["bytes_a_worker"]), seen]
        body.append(cells)
    return table(head, body)


def latency_table(rows: Sequence[ROW]) -> str:
    head = ["model", "an example", "link", "on the device", "on the server", "sooner"]
    body = []
    for row in rows:
        local, remote = row["local"], row["remote"]
        times = [f"{1e3 * one:,.3g} ms" if one < 1 else f"{one:.3g} s" for one in (local, remote)]
        sooner = "device" if local <= remote else "server"
        body.append([row["model"], size(row["example"]), row["link"], *times, sooner])
    return table(head, body)


def describe(found: Mapping[str, list[ROW]], page: Path) -> None:
    """The tables of the page, of the parts that there are."""
    refused: dict[str, str] = {}

    def reached(row: ROW) -> str:
        return f"{share(row['accuracy'])}, {virtual(row)}"

    tables: dict[str, Callable[[list[ROW]], str]] = {
        "families": families_table,
        "skew": skew_table,
        "clients": clients_table,
        "reliability": lambda rows: crossed(rows, "condition", reached, refused),
        "liars": lambda rows: crossed(rows, "attack", lambda row: share(row["accuracy"]), refused),
        "privacy": privacy_table,
        "latency": latency_table,
    }
    blocks = {name: tables[name](rows) for name, rows in found.items()}
    if refused:
        said = [[f"`{words}`", system] for words, system in refused.items()]
        blocks["refused"] = table(["message", "first refused by"], said)
    fill(page, blocks)


def draw(found: Mapping[str, list[ROW]], folder: Path) -> None:
    systems = [row for row in found["families"] if row["bytes_a_worker"]]
    bytes_ = [
        Curve(
            row["system"],
            [point["bytes"] for point in row["curve"]],
            [point["accuracy"] for point in row["curve"]],
            colour=number,
        )
        for number, row in enumerate(systems)
    ]
    rows = found["clients"]
    at = [row["clients"] for row in rows]
    pooled = found["families"][0]["accuracy"]
    alone = [(row["alone"] or {}).get("personal_accuracy") for row in rows]
    by_size = [
        Curve("all data pooled", at, [pooled] * len(at), dashed=True, colour=NEUTRAL),
        Curve("FedAvg", at, [row["accuracy"] for row in rows], marks=True, colour=0),
        Curve("each client alone", at, alone, marks=True, colour=1),
    ]
    accuracy = Axis("test accuracy", low=0.0, high=1.0)
    sent = Axis("bytes sent by a worker or client", log=True, short=True)
    save(
        folder / "families.svg",
        "Digits by every family, and by clients who share the same data",
        [
            lines("Accuracy at equal bytes", bytes_, sent, accuracy),
            lines(
                f"After {PASSES} passes", by_size, Axis("clients", log=True, short=True), accuracy
            ),
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=3, help="that accuracies are a mean of")
    parser.add_argument("--figures", type=Path, default=None, help="folder for the figure")
    parser.add_argument("--page", type=Path, default=None, help="the page whose tables to fill")
    parser.add_argument(
        "--from",
        dest="known",
        type=Path,
        nargs="+",
        default=[],
        help="results whose parts are taken as they are, instead of measured",
    )
    takes_result(parser)
    asked = parser.parse_args()
    bench = Bench(asked.seeds)
    found: dict[str, list[ROW]] = {}
    for path in asked.known:
        found |= {
            name: rows for name, rows in json.loads(path.read_text()).items() if name in PARTS
        }
    found |= {name: PARTS[name](bench) for name in asked.parts if name not in found}
    if asked.figures and set(found) != set(PARTS):
        parser.error("--figures needs all parts: leave --parts out, or give --from")
    if asked.figures is not None:
        draw(found, asked.figures)
    if asked.page is not None:
        describe(found, asked.page)
    result = {
        "benchmark": "study_families",
        "setting": f"digits, mlp, {PASSES} passes, lr 0.1, steps of {STEP} examples",
        "seeds": asked.seeds,
        "parameters": sum(one.numel() for one in bench.task.model().parameters()),
        **found,
    }
    give(result, asked.result)


if __name__ == "__main__":
    main()
