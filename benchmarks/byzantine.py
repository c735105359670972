"""Rules against liars: MNIST, the 2NN of 199,210 parameters, 20 clients of whom 4 lie, every attack against every rule.

Each cell is the test accuracy after so many --rounds of 10 local steps with batches of 50 (lr 0.1), examples divided
IID, the same seed in every cell, so that all rules see the same clients, batches and liars. The server does not know
who lies; each rule is told that there may be 4. `byzantine` is the geometric median of 10 random groups' means (Chen,
Su, Xu 2017), which 4 < 10/2 liars do not break wherever they fall. A cell is "stood" where it is within 2 points of the
same rule's own run without liars *and* of the mean's.

    python benchmarks/byzantine.py --data DIR --page docs/study-byzantine.md > benchmarks/results/byzantine.json

Progress goes to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from pages import fill, table

import dure
from dure.errors import LossNotFiniteError

CLIENTS, LIARS = 20, 4
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
    "ALIE": "alie",
    "inner product 0.3": "inner-product:0.3",
    "inner product 5": "inner-product:5",
    "mimic": "mimic",
    "1e30": "large:1e30",
    "NaN": "nan",
}
CLOSE = 0.02


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def accuracies(task: dure.Task, rule: str, attack: str, rounds: list[int], seed: int) -> dict[int, float | None]:
    """Test accuracy after each of these numbers of rounds; None where the model did not stay finite."""
    liars: dict[str, Any] = {"attack": attack, "attackers": LIARS} if attack != "none" else {}
    strategy = dure.FedAvg(clients=CLIENTS, local_steps=10, batch_size=50, aggregate=rule)  # type: ignore[arg-type]
    last, every = rounds[-1], math.gcd(*rounds)
    try:
        run = dure.train(
            task, strategy, dure.Simulated(**liars), dure.Stop(rounds=last), seed=seed, evaluate_every=every
        )
    except LossNotFiniteError:
        before = accuracies(task, rule, attack, rounds[:-1], seed) if len(rounds) > 1 else {}
        return before | {last: None}
    measured = {found.step: found.metrics["test_accuracy"] for found in run.history.evaluations}
    return {number: measured[number] for number in rounds}


Found = dict[str, dict[str, float | None]]  # accuracy by rule and attack


def cells(
    task: dure.Task, rounds: list[int], seed: int, rules: dict[str, str], attacks: dict[str, str]
) -> dict[int, Found]:
    """Accuracy by number of rounds, rule and attack."""
    found: dict[int, Found] = {number: {rule: {} for rule in rules} for number in rounds}
    for name, rule in rules.items():
        for told, attack in attacks.items():
            started = time.perf_counter()
            measured = accuracies(task, rule, attack, rounds, seed)
            for number, value in measured.items():
                found[number][name][told] = value
            said = ", ".join("diverged" if value is None else f"{value:.4f}" for value in measured.values())
            show(f"{name} under {told}: {said}, {time.perf_counter() - started:.0f} s")
    return found


def stood(found: Found, rule: str, attack: str) -> bool:
    value, clean, best = found[rule][attack], found[rule]["none"], found["mean"]["none"]
    return value is not None and clean is not None and best is not None and value >= max(clean, best) - CLOSE


def shown(found: Found) -> str:
    """The table: accuracy in percent, in bold where the attack is stood."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of MNIST's four files")
    parser.add_argument("--rounds", type=int, nargs="+", default=[30, 100], help="accuracy is measured after each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three rules, four attacks, five rounds")
    parser.add_argument("--page", type=Path, help="the page whose tables of 30 and 100 rounds are filled")
    asked = parser.parse_args()
    rules = dict(list(RULES.items())[:3]) if asked.quick else RULES
    attacks = dict(list(ATTACKS.items())[:4]) if asked.quick else ATTACKS
    rounds = [5] if asked.quick else sorted(set(asked.rounds))
    task = dure.load_task("mnist", data=str(asked.data), model="2nn", lr=0.1)
    found = cells(task, rounds, asked.seed, rules, attacks)
    result = {
        "compared": "test accuracy of MNIST 2NN by aggregation rule and attack",
        "clients": CLIENTS,
        "liars": LIARS,
        "seed": asked.seed,
        "rules": rules,
        "attacks": attacks,
        "after_rounds": {
            number: {
                "accuracy": cell,
                "stood": {rule: [attack for attack in attacks if stood(cell, rule, attack)] for rule in rules},
            }
            for number, cell in found.items()
        },
    }
    print(json.dumps(result, indent=1))
    if asked.page is not None:
        fill(asked.page, {f"after {number} rounds": shown(cell) for number, cell in found.items()})


if __name__ == "__main__":
    main()
