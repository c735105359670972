"""Rules of aggregation against attackers: every attack against every rule.

The task is MNIST with the 2NN of 199,210 parameters, and 20 clients, 4 of which lie. Each cell is
the test accuracy after a number of rounds. Examples are divided IID, with the same seed in every
cell, so that all rules see the same clients, batches and attackers. The server does not know which
clients lie; each rule is told that there may be 4. There are two ways of working:

    local        10 local steps with batches of 50 (lr 0.1), and the rule on the changes of the
                 weights: FedAvg
    gradients    one gradient of 500 examples (lr 0.3), and the rule on the gradients: Byzantine
                 gradient descent

`byzantine` is the geometric median of 10 random groups' means (Chen, Su, Xu 2017), which 4 < 10/2
attackers do not break wherever they are. A cell is "stood" if it is within 2 points of the same
rule's own run without attackers *and* of the mean's.

    python benchmarks/byzantine.py --data DIR --page docs/study-byzantine.md \\
        --result benchmarks/results/byzantine.json

Progress goes to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outcome import give, takes_result
from pages import fill, table

import dure
from dure.errors import TooFewClientsError

CLIENTS = 20
LIARS = 4
RULES = {
    "mean": "mean",
    "byzantine": "geometric-median-of-means:10",
    "krum": f"krum:{LIARS}",
    "multi-krum": f"krum:{LIARS}:{CLIENTS - LIARS - 2}",
    "bulyan": f"bulyan:{LIARS}",
    "median": "median",
    "trimmed mean": f"trimmed-mean:{LIARS / CLIENTS}",
    "RFA": "rfa",
    "centred clipping": "centred-clipping:1:3",
}
ATTACKS = {
    "none": "none",
    "sign flip x10": "sign-flip:10",
    "Gaussian 200": "gaussian:200",
    "label flip": "label-flip",
    "ALIE": "alie:1.5",
    "inner product 0.3": "inner-product:0.3",
    "inner product 5": "inner-product:5",
    "mimic": "mimic",
    "1e30": "large:1e30",
    "NaN": "nan",
}
CLOSE = 0.02
JSON = dict[str, Any]


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def local(rule: str) -> dure.FedAvg:
    return dure.FedAvg(clients=CLIENTS, local_steps=10, batch_size=50, aggregate=rule)  # type: ignore[arg-type]


def gradients(rule: str) -> dure.FedAvg | dure.ByzantineGD:
    name, _, groups = rule.partition(":")
    if name == "geometric-median-of-means":
        return dure.ByzantineGD(clients=CLIENTS, groups=int(groups), local_steps=1, batch_size=500)
    return dure.FedAvg(clients=CLIENTS, local_steps=1, batch_size=500, aggregate=rule)  # type: ignore[arg-type]


WAYS = {
    "local": (local, 0.1, [30, 100], list(RULES)),
    "gradients": (gradients, 0.3, [100], ["mean", "byzantine", "krum", "median"]),
}
"""How clients work: the strategy, the rate, after how many rounds accuracy is measured, the rules
that are tried."""


def accuracies(
    task: dure.Task, strategy: Any, attack: str, rounds: list[int], seed: int
) -> dict[int, float | None]:
    """Test accuracy after each of these numbers of rounds; None where the model did not stay
    finite."""
    liars: dict[str, Any] = {"attack": attack, "attackers": LIARS} if attack != "none" else {}
    last = rounds[-1]
    every = math.gcd(*rounds)
    try:
        run = dure.train(
            task,
            strategy,
            dure.Simulated(**liars),
            dure.Stop(rounds=last),
            seed=seed,
            evaluate_every=every,
        )
    except TooFewClientsError:
        before = accuracies(task, strategy, attack, rounds[:-1], seed) if len(rounds) > 1 else {}
        return before | {last: None}
    measured = {found.step: found.metrics["test_accuracy"] for found in run.history.evaluations}
    # A round without a loss is one of a model at which no client's training is finite.
    lost = {step.step for step in run.history.steps if step.loss is None}
    return {number: None if number in lost else measured[number] for number in rounds}


Found = dict[str, dict[str, float | None]]  # accuracy by rule and attack


def cells(
    data: Path, way: str, rounds: list[int], seed: int, rules: list[str], attacks: dict[str, str]
) -> JSON:
    """What a way of working came to, by number of rounds."""
    make, rate, _, _ = WAYS[way]
    task = dure.load_task("mnist", data=str(data), model="2nn", lr=rate)
    found: dict[int, Found] = {}
    for number in rounds:
        found[number] = {rule: {} for rule in rules}
    for name in rules:
        for told, attack in attacks.items():
            started = time.perf_counter()
            measured = accuracies(task, make(RULES[name]), attack, rounds, seed)
            for number, value in measured.items():
                found[number][name][told] = value
            said = ", ".join(
                "diverged" if value is None else f"{value:.4f}" for value in measured.values()
            )
            show(f"{way}: {name} under {told}: {said}, {time.perf_counter() - started:.0f} s")
    result = {}
    for number, cell in found.items():
        withstood = {rule: withstood_by(rule, cell, attacks) for rule in rules}
        result[str(number)] = {"accuracy": cell, "stood": withstood}
    return result


def withstood_by(rule: str, found: Found, attacks: Iterable[str]) -> list[str]:
    """The attacks that the rule withstands."""
    return [attack for attack in attacks if stood(found, rule, attack)]


def stood(found: Found, rule: str, attack: str) -> bool:
    value = found[rule][attack]
    clean = found[rule]["none"]
    best = found["mean"]["none"]
    return (
        value is not None
        and clean is not None
        and best is not None
        and value >= max(clean, best) - CLOSE
    )


def shown(found: Found) -> str:
    """The table: accuracy in percent, in bold where the rule withstands the attack."""
    rules = list(found)
    rows = []
    for attack in found[rules[0]]:
        row = [attack]
        for rule in rules:
            value = found[rule][attack]
            text = "-" if value is None else f"{100 * value:.1f}"
            row.append(f"**{text}**" if stood(found, rule, attack) else text)
        rows.append(row)
    return table(["attack", *rules], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of MNIST's four files")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="three rules, four attacks, five rounds"
    )
    parser.add_argument("--page", type=Path, help="the page whose tables are filled")
    takes_result(parser)
    asked = parser.parse_args()
    attacks = {
        name: ATTACKS[name] for name in (list(ATTACKS)[:4] if asked.quick else asked.attacks)
    }
    ways = {}
    for way in asked.ways:
        _, _, rounds, rules = WAYS[way]
        rounds, rules = ([5], rules[:3]) if asked.quick else (rounds, rules)
        ways[way] = cells(asked.data, way, rounds, asked.seed, rules, attacks)
    result = {
        "compared": "test accuracy of MNIST 2NN by aggregation rule and attack",
        "clients": CLIENTS,
        "liars": LIARS,
        "seed": asked.seed,
        "rules": RULES,
        "attacks": attacks,
        "after_rounds": ways,
    }
    give(result, asked.result, indent=1)
    if asked.page is not None:
        tables = {}
        for way, cells_of in ways.items():
            for number, cell in cells_of.items():
                tables[f"{way} {number}"] = shown(cell["accuracy"])
        fill(asked.page, tables)


if __name__ == "__main__":
    main()
