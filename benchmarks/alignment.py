"""How many ids a second entity alignment takes, and how many bytes.

    python benchmarks/alignment.py --ids 5000

Two parties, one of which has the labels, with as many ids each, of which half are common. Both
compute one after another in this process: on two machines the time is a little more than half.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import TypeVar

from outcome import give, takes_result

from dure.fleet.virtual_network import VirtualNetwork
from dure.split.alignment import AlignedHolder, AlignedParty, SecretScalar, point_of

Value = TypeVar("Value")


def main() -> None:
    parser = argparse.ArgumentParser(description="Entity alignment, measured.")
    parser.add_argument("--ids", type=int, default=5000)
    takes_result(parser)
    asked = parser.parse_args()
    count = asked.ids
    ours, theirs = range(count), range(count // 2, count // 2 + count)
    hashed, points = timed(lambda: [point_of(str(one)) for one in ours])
    exponent = SecretScalar(bytes(range(32)))
    raised, _ = timed(lambda: [exponent.power(point) for point in points])
    whole, traffic = timed(lambda: align(list(ours), list(theirs)))
    give(
        {
            "ids": count,
            "hashed_per_second": round(count / hashed),
            "powers_per_second": round(count / raised),
            "ids_per_second": round(2 * count / whole),
            "bytes_per_id": traffic / (2 * count),
        },
        asked.result,
    )


def timed(work: Callable[[], Value]) -> tuple[float, Value]:
    """The seconds that it takes, and what comes of it."""
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def align(ours: list[int], theirs: list[int]) -> int:
    """The bytes that travel."""
    network = VirtualNetwork()
    holder = AlignedHolder("party 0", ["party 1"], ours, bytes(range(32)))
    network.add("party 0", holder)
    network.add("party 1", AlignedParty("party 1", "party 0", theirs, bytes(range(1, 33))))
    network.send("party 0", holder.begin(0.0))
    # Until nothing is under way any more.
    network.run(lambda: False, math.inf)
    return sum(sum(network.traffic(name).sent) for name in ("party 0", "party 1"))


if __name__ == "__main__":
    main()
