"""How long the account of differential privacy takes, and how near its bounds are.

    python benchmarks/accountant.py

For 1000 rounds with q = 0.01, z = 1.1 and delta = 1e-5, seconds of one thread: the bound by privacy
loss distributions for the first time and for the next round, with dp-accounting's own width beside
it, the looser bound by Rényi divergences, and the noise for an epsilon of 8.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from dp_accounting.pld import privacy_loss_distribution

from dure.privacy.accountant import Releases, epsilon, noise_for, renyi_epsilon

RATE, NOISE, ROUNDS, DELTA = 0.01, 1.1, 1000, 1e-5


def timed(what: str, work: Callable[[], float]) -> None:
    """Prints what came out and how long it took."""
    began = time.perf_counter()
    found = work()
    took = time.perf_counter() - began
    print(f"{what:<44} {found:10.5f} {1000 * took:10.0f} ms")


def finest() -> float:
    """By dp-accounting, with the width that it takes itself."""
    one = privacy_loss_distribution.from_gaussian_mechanism(NOISE, sampling_prob=RATE)
    return float(one.self_compose(ROUNDS).get_epsilon_for_delta(DELTA))


def main() -> None:
    torch.set_num_threads(1)
    # Imports the library, which takes a second.
    epsilon([Releases(0.5, 2.0)], DELTA)
    timed("PLD, the first time", lambda: epsilon([Releases(RATE, NOISE, ROUNDS)], DELTA))
    timed("PLD, of one round more", lambda: epsilon([Releases(RATE, NOISE, ROUNDS + 1)], DELTA))
    timed("PLD of dp-accounting, width 1e-4", finest)
    timed("Rényi", lambda: renyi_epsilon([Releases(RATE, NOISE, ROUNDS)], DELTA))
    timed("noise for an epsilon of 8", lambda: noise_for(8.0, DELTA, RATE, ROUNDS))


if __name__ == "__main__":
    main()
