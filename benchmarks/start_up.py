"""How long a run takes until its first step, for models that fit: this dure beside another one.

For each system and each size the time from the call of `dure.train` to the end of the first step is
taken, in a process of its own; this checkout and the other one take turns.

    python benchmarks/start_up.py [--source DIR] [--repeats 3] [--sizes 10 100]
        --result benchmarks/results/start_up.json

--source: the folder `src` of another checkout; without it only this one is measured. --sizes:
millions of parameters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outcome import give, takes_result
from part_memory import EXAMPLES, SYSTEMS, WIDTH, Make

HERE = Path(__file__).parent.parent / "src"


def first_step(system: str, millions: float) -> float:
    """Seconds from the call to the end of the first step, in this process."""
    import torch
    from torch.nn import functional as F

    import dure

    blocks = max(1, round(millions * 1e6 / (8 * WIDTH * WIDTH)))
    task = dure.Task(
        model=Make(blocks),
        loss=F.cross_entropy,
        train=(torch.rand(EXAMPLES, 16), torch.arange(EXAMPLES) % 4),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    )
    strategy, ranks = SYSTEMS[system]
    begun = time.perf_counter()
    done: list[float] = []

    def told(event: dict[str, Any]) -> None:
        if event["step"] >= 1:
            done.append(time.perf_counter() - begun)

    dure.train(task, strategy, dure.Processes(ranks), dure.Stop(steps=1), on_progress=told)
    return done[0]


def timed(source: Path, system: str, millions: float) -> float:
    """The same, of a checkout, in a process of its own."""
    paths = os.pathsep.join([str(source), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, __file__, "--only", system, str(millions)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Times all systems and sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="the folder src of another checkout")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", type=float, nargs="*", default=[10, 100])
    parser.add_argument("--systems", nargs="*", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    takes_result(parser)
    asked = parser.parse_args()
    if asked.only:
        print(first_step(asked.only[0], float(asked.only[1])))
        return
    sources = {"this": HERE, **({} if asked.source is None else {"other": asked.source})}
    rows = []
    for system in asked.systems:
        for millions in asked.sizes:
            seconds: dict[str, list[float]] = {name: [] for name in sources}
            for _ in range(asked.repeats):
                for name, source in sources.items():
                    seconds[name].append(timed(source, system, millions))
            medians = {name: statistics.median(each) for name, each in seconds.items()}
            row: dict[str, Any] = {"system": system, "millions": millions, "seconds": medians}
            if asked.source is not None:
                row["this_over_other"] = medians["this"] / medians["other"]
            rows.append({**row, "all": seconds})
    give({"rows": rows}, asked.result, indent=1)


if __name__ == "__main__":
    main()
