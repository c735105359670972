"""Rules against liars: MNIST, the 2NN of 199,210 parameters, 20 clients of whom 4 lie, every attack against every rule.

Each cell is the test accuracy after --rounds rounds of 10 local steps with batches of 50 (lr 0.1), examples divided
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


def accuracy(task: dure.Task, rule: str, attack: str, rounds: int, seed: int) -> float | None:
    """Test accuracy at the end; None where the model did not stay finite."""
    liars: dict[str, Any] = {"attack": attack, "attackers": LIARS} if attack != "none" else {}
    strategy = dure.FedAvg(clients=CLIENTS, local_steps=10, batch_size=50, aggregate=rule)  # type: ignore[arg-type]
    try:
        run = dure.train(
            task, strategy, dure.Simulated(**liars), dure.Stop(rounds=rounds), seed=seed, evaluate_every=rounds
        )
    except LossNotFiniteError:
        return None
    return float(run.summary["test_accuracy"])


def cells(task: dure.Task, rounds: int, seed: int, rules: dict[str, str], attacks: dict[str, str]) -> dict[str, Any]:
    """Accuracy by rule and attack."""
    found: dict[str, dict[str, float | None]] = {}
    for name, rule in rules.items():
        found[name] = {}
        for told, attack in attacks.items():
            started = time.perf_counter()
            found[name][told] = accuracy(task, rule, attack, rounds, seed)
            value = found[name][told]
            said = "diverged" if value is None else f"{value:.4f}"
            show(f"{name} under {told}: {said}, {time.perf_counter() - started:.0f} s")
    return found


def stood(found: dict[str, Any], rule: str, attack: str) -> bool:
    value = found[rule][attack]
    return value is not None and value >= max(found[rule]["none"], found["mean"]["none"]) - CLOSE


def shown(found: dict[str, Any]) -> str:
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
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three rules, four attacks, five rounds")
    parser.add_argument("--page", type=Path, help="the page whose table is filled")
    asked = parser.parse_args()
    rules = dict(list(RULES.items())[:3]) if asked.quick else RULES
    attacks = dict(list(ATTACKS.items())[:4]) if asked.quick else ATTACKS
    rounds = 5 if asked.quick else asked.rounds
    task = dure.load_task("mnist", data=str(asked.data), model="2nn", lr=0.1)
    found = cells(task, rounds, asked.seed, rules, attacks)
    result = {
        "compared": "test accuracy of MNIST 2NN by aggregation rule and attack",
        "clients": CLIENTS,
        "liars": LIARS,
        "rounds": rounds,
        "seed": asked.seed,
        "rules": rules,
        "attacks": attacks,
        "accuracy": found,
        "stood": {rule: [attack for attack in attacks if stood(found, rule, attack)] for rule in rules},
    }
    print(json.dumps(result, indent=1))
    if asked.page is not None:
        fill(asked.page, {"accuracy": shown(found)})


if __name__ == "__main__":
    main()
