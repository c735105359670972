"""How fast a message is sealed and opened, beside the cipher alone, and in how much memory.

    python benchmarks/sealing.py --megabytes 256

The cipher alone is AES-256-GCM of `cryptography` in one call, which makes its result in new memory,
as sealing does. Memory is what is allocated at the peak besides the message, in messages.
"""

from __future__ import annotations

import argparse
import os
import time
import tracemalloc
from collections.abc import Callable

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from outcome import give, takes_result

from dure.wire.boxes import BoxKey
from dure.wire.sealing import SealedMessageContext, seal, unseal
from dure.wire.signatures import Key

RUN = "benchmark"
ABOUT = SealedMessageContext(RUN, turn=0, sender=0, receiver=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sealing, measured.")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    takes_result(parser)
    how = parser.parse_args()
    message = os.urandom(how.megabytes * 1_000_000)
    keys = [Key.make(), Key.make()]
    boxes = [BoxKey.make(), BoxKey.make()]
    sender, receiver = (boxes[at].member(keys[at], at, f"client {at}", RUN) for at in range(2))
    cipher = AESGCM(bytes(32))
    sealed = seal(message, to=receiver, identity=keys[0], about=ABOUT)
    works: dict[str, Callable[[], object]] = {
        "cipher": lambda: cipher.encrypt(bytes(12), message, None),
        "seal": lambda: seal(message, to=receiver, identity=keys[0], about=ABOUT),
        "unseal": lambda: unseal(sealed, box=boxes[1], sender=sender, about=ABOUT),
    }
    found: dict[str, float] = {"megabytes": how.megabytes}
    for name, work in works.items():
        best = min(seconds(work) for _ in range(how.repeats))
        found[f"{name}_megabytes_per_second"] = round(how.megabytes / best)
        found[f"{name}_memory"] = round(peak(work) / len(message), 3)
    give(found, how.result)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def peak(work: Callable[[], object]) -> int:
    """Bytes that are allocated at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    main()
