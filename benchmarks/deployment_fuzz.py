"""Requests that nobody should send, thousands of them: does the server of a federation bear them?

    python benchmarks/deployment_fuzz.py [--requests 10000] [--seed 0]

Prints JSON: answers by their status, the server's errors (5xx), states that a refused request has
changed, and the memory of the process before and after. The requests are those of the tests
(tests/deploy/fuzzed.py), drawn by hypothesis.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from outcome import give, takes_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "worlds" / "network"))

from fuzzed import Plan, Target, plans, sent


def resident() -> int:
    """Bytes of this process that lie in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def requests(count: int, seeded: int) -> list[Plan]:
    """So many of them, drawn before any is sent: hypothesis remembers what it has drawn."""
    drawn: list[Plan] = []

    @seed(seeded)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(plan=plans())
    def draw(plan: Plan) -> None:
        drawn.append(plan)

    draw()
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    takes_result(parser)
    asked = parser.parse_args()
    drawn = requests(asked.requests, asked.seed)
    answers: Counter[int] = Counter()
    changed: list[str] = []
    errors: list[str] = []
    memory: list[int] = []
    with tempfile.TemporaryDirectory() as folder, Target(Path(folder)) as target:
        began = time.perf_counter()
        for number, plan in enumerate(drawn):
            if number % max(1, len(drawn) // 10) == 0:
                gc.collect()
                memory.append(resident())
            target.assign()
            before = target.state()
            status = sent(target, plan)
            answers[status] += 1
            if status >= 500:
                errors.append(repr(plan)[:500])
            if (status >= 400 or status == 0) and target.state() != before:
                changed.append(repr(plan)[:500])
        seconds = time.perf_counter() - began
        sizes = target.sizes()
    result = {
        "requests": sum(answers.values()),
        "seconds": round(seconds, 1),
        "answers": {str(status): number for status, number in sorted(answers.items())},
        "errors": errors[:5],
        "number_of_errors": len(errors),
        "refused_and_changed": changed[:5],
        "number_of_changed": len(changed),
        "resident_bytes_by_tenth": memory,
        "what_is_remembered": sizes,
    }
    give(result, asked.result, indent=2)
    sys.exit(bool(errors or changed))


if __name__ == "__main__":
    main()
