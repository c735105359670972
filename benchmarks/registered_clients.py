"""What clients cost that are registered and not asked: 100 of up to 1,000,000 are asked in a round.

Every client has one example of eight numbers, the model is linear, and 40 rounds ask 100 clients
each. So a round's time is that of its administration. Each number of clients has processes of its
own, in turns. Measured are

- seconds from the start of Python to the first new model, which include importing torch and making
  the data;
- seconds of a round, the median over the rounds after the first; and
- the process's largest resident memory.

Figures are medians over the repeats.

    python benchmarks/registered_clients.py --page docs/simulation.md \\
        --result benchmarks/results/registered_clients.json

Progress goes to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outcome import give, takes_result
from pages import fill, table
from rounds import quartiles_of, turns

JSON = dict[str, Any]
ASKED = 100
ROUNDS = 40


def one(clients: int, started: float) -> JSON:
    """A federation of so many in this process. started: when Python was, by `time.time`."""
    import torch

    import dure

    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(clients, 8, generator=draws)
    targets = torch.randint(0, 2, (clients,), generator=draws)
    task = dure.Task(
        lambda: torch.nn.Linear(8, 2),
        torch.nn.functional.cross_entropy,
        dure.Examples(inputs, targets),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    strategy = dure.FedAvg(clients=clients, fraction=ASKED / clients)
    run = dure.train(
        task, strategy, dure.Simulated(), dure.Stop(rounds=ROUNDS), evaluate_every=ROUNDS
    )
    ended = time.time()
    at = [step.seconds for step in run.history.steps]
    updates = {step.numbers["updates"] for step in run.history.steps if step.numbers}
    assert updates == {float(ASKED)}, updates
    return {
        "seconds_to_first_model": ended - started - (run.summary["seconds"] - at[0]),
        "seconds_of_a_round": statistics.median(
            after - before for before, after in itertools.pairwise(at)
        ),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def measured(clients: int) -> JSON:
    command = [sys.executable, __file__, "--one", str(clients), "--started", repr(time.time())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: JSON = json.loads(done.stdout)
    return found


def shown(rows: JSON) -> str:
    head = ["registered clients", "a round of 100", "first new model", "memory"]
    lines = []
    for clients, row in rows.items():
        round, first, memory = (row[name]["median"] for name in row)
        lines.append(
            [
                f"{int(clients):,}",
                f"{1e3 * round:.1f} ms",
                f"{first:.1f} s",
                f"{memory / 1e6:.0f} MB",
            ]
        )
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000, 1_000_000]
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--page", type=Path, help="the page whose table is filled")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=time.time(), help=argparse.SUPPRESS)
    takes_result(parser)
    asked = parser.parse_args()
    if asked.one is not None:
        print(json.dumps(one(asked.one, asked.started)))
        return
    if min(asked.clients) < ASKED:
        parser.error(f"{ASKED} clients are asked in a round: there are at least as many")
    samples: dict[str, list[JSON]] = {str(clients): [] for clients in asked.clients}
    for number in range(asked.repeats):
        for clients in turns(list(samples), number):
            samples[clients].append(measured(int(clients)))
            print(
                f"repeat {number + 1}: {int(clients):,} clients: {samples[clients][-1]}",
                file=sys.stderr,
                flush=True,
            )
    names = ("seconds_of_a_round", "seconds_to_first_model", "peak_bytes")
    rows = {}
    for clients, own in samples.items():
        rows[clients] = {name: quartiles_of(own, name) for name in names}
    give(
        {"benchmark": "registered_clients", "asked": ASKED, "rounds": ROUNDS, "rows": rows},
        asked.result,
        indent=1,
    )
    if asked.page is not None:
        fill(asked.page, {"registered": shown(rows)})


if __name__ == "__main__":
    main()
