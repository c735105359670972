"""A round of secure aggregation: what it costs a client and the server, next to the least it could.

Client and server are dure's state machines, without a network and on one thread; figures are CPU
seconds. A client's are the median over the clients, from its keys to its last answer, with the
rounding of its update to integers. The server's are all that it computes in the round. Lost clients
have shared their keys and send no vector: that costs the server most. Each sum is compared with the
plain sum of the clients' integers.

    all pairs    everybody masks with everybody (Bonawitz et al. 2017)
    SecAgg+      with as many neighbours as are enough where 5 % are corrupt and 20 % may be lost

The limit is what cannot be left out, measured in the same run without dure where dure is not the
only one that has it: keystreams of AES-256 in counter mode, additions, agreements of X25519 with
HKDF, and Shamir's shares. Flower's SecAgg+ runs in the Python that --flower names, with all pairs;
its limit is another one, since its masks are numbers of 64 bits from a Mersenne Twister.

    python benchmarks/privacy.py --flower PYTHON --result benchmarks/results/privacy.json

Progress goes to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from outcome import give, takes_result
from torch import Tensor

from dure.federated.privacy.secure_aggregation import shamir
from dure.federated.privacy.secure_aggregation.client import SecureSumClient
from dure.federated.privacy.secure_aggregation.cohort import MASK, SumContext, bounds
from dure.federated.privacy.secure_aggregation.quantisation import Quantisation
from dure.federated.privacy.secure_aggregation.server import SecureSumServer
from dure.federated.privacy.secure_aggregation.settings import (
    SecureAggregation,
    SecureAggregationPlus,
)
from dure.randomness.secret import Secret

JSON = dict[str, Any]
PEER = Path(__file__).parent / "privacy_peers" / "flower.py"
GRAPHS: dict[str, SecureAggregation] = {
    "all pairs": SecureAggregation(),
    "SecAgg+": SecureAggregationPlus(corrupt=0.05, drop_out=0.2),
}
GOALS = {"CPU seconds, of the limit, at 100 clients": 2.0, "bytes up, of plain 32-bit": 1.02}
BLOCK = 1 << 17
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Case:
    """A round of so many clients, of whom some are lost after they have shared their keys."""

    members: int
    graph: str
    lost: int

    def context(self, elements: int) -> SumContext:
        found = bounds(GRAPHS[self.graph], self.members)
        return SumContext(
            run="benchmark",
            round=1,
            attempt=0,
            group=0,
            model="0" * 64,
            length=elements,
            quantisation="range 1",
            members=tuple(range(self.members)),
            threshold=found.threshold,
            degree=found.degree,
            fewest=found.fewest,
        )


def cases() -> list[Case]:
    found = [Case(20, "all pairs", lost) for lost in (0, 5)]
    for graph in GRAPHS:
        found += [Case(100, graph, lost) for lost in (0, 5, 20)]
    return found


class Clock:
    """CPU seconds of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time() - self._started


# The least that it could cost


@dataclass(frozen=True)
class Least:
    """CPU seconds of what cannot be left out.

    mask: the keystream of a vector, added to it. vector: a vector that comes from elsewhere, added.
    agreement: X25519 and HKDF. keys: a key pair.
    """

    mask: float
    vector: float
    agreement: float
    keys: float


def best(work: Callable[[], object], repeats: int = 7) -> float:
    found = []
    for _ in range(repeats):
        clock = Clock()
        with clock:
            work()
        found.append(clock.seconds)
    return min(found)


def measured(elements: int) -> Least:
    zeros = bytes(BLOCK)
    room = memoryview(bytearray(BLOCK + 15))
    blocks = 4 * elements / BLOCK
    encryptor = Cipher(AES(os.urandom(32)), CTR(bytes(16))).encryptor()
    one = np.zeros(BLOCK // 4, dtype=np.int32)
    other = np.frombuffer(room, dtype="<i4", count=BLOCK // 4)
    times = 200

    def keystream() -> None:
        for _ in range(times):
            encryptor.update_into(zeros, room)

    def additions() -> None:
        for _ in range(times):
            np.add(one, other, out=one)

    total = np.zeros(elements, dtype=np.int32)
    # Several, since what comes from elsewhere is not in the cache.
    vectors = [np.ones(elements, dtype=np.int32) for _ in range(16)]
    private = X25519PrivateKey.generate()
    public = X25519PrivateKey.generate().public_key().public_bytes_raw()

    def sums() -> None:
        for vector in vectors:
            np.add(total, vector, out=total)

    def agreements() -> None:
        for _ in range(times):
            secret = private.exchange(X25519PublicKey.from_public_bytes(public))
            HKDF(SHA256(), 32, public + public, b"benchmark").derive(secret)

    def pairs() -> None:
        for _ in range(times):
            own = X25519PrivateKey.from_private_bytes(public)
            own.public_key().public_bytes_raw()

    return Least(
        mask=(best(keystream) + best(additions)) / times * blocks,
        vector=best(sums) / len(vectors),
        agreement=best(agreements) / times,
        keys=best(pairs) / times,
    )


def limits(case: Case, context: SumContext, least: Least) -> tuple[float, float]:
    """CPU seconds of a client, and of the server."""
    degree = context.degree
    threshold = context.threshold
    holders = degree + 1
    secrets = [bytes(32)] * 2
    split = best(lambda: shamir.split_many(secrets, holders, threshold, bytes(32)))
    pieces = dict(enumerate(shamir.split(bytes(32), holders, threshold, bytes(32))))
    # Each client of SecAgg+ has holders of its own, who answer or not.
    held = [
        {(at + shift) % holders: pieces[(at + shift) % holders] for at in range(threshold)}
        for shift in range(case.members)
    ]
    if context.complete:
        held = [pieces] * case.members
    join = best(lambda: shamir.join_many(held, threshold))
    client = (degree + 1) * least.mask + 2 * degree * least.agreement + 2 * least.keys + split
    survivors = case.members - case.lost
    # A lost client's neighbours are as likely lost as anybody else.
    with_lost = case.lost * degree * survivors / (case.members - 1)
    server = survivors * least.vector + (survivors + with_lost) * least.mask
    server += with_lost * least.agreement + case.lost * least.keys + join
    return client, server


# dure


def by_machines(case: Case, context: SumContext, values: Tensor) -> JSON:
    """A round, and what it costs."""
    quantisation = Quantisation(1.0, case.members)
    lost = set(range(case.members - case.lost, case.members))
    clocks = {number: Clock() for number in context.members}
    at_server = Clock()
    bytes_up = dict.fromkeys(context.members, 0)
    bytes_down = dict.fromkeys(context.members, 0)

    def vector_of(number: int) -> Callable[[], Tensor]:
        return lambda: quantisation.encode(values, number.to_bytes(32, "big"))[0]

    clients = {
        number: SecureSumClient(number, context, Secret.system(), vector_of(number))
        for number in context.members
    }
    server = SecureSumServer(context)
    while server.stage is not None:
        stage = server.stage
        with at_server:
            asked = server.ask()
        for number, body in asked.items():
            if stage >= MASK and number in lost:
                continue
            bytes_down[number] += len(body)
            with clocks[number]:
                answer, tensor = clients[number].answer(stage, body)
            bytes_up[number] += len(answer) + (tensor.nbytes if tensor is not None else 0)
            with at_server:
                taken = server.take(number, answer, [] if tensor is None else [tensor])
            assert taken, f"an answer of client {number} does not count"
            if tensor is not None:
                clients[number].forget_vector()
        with at_server:
            server.close_stage()
    with at_server:
        total, there = server.result()
    assert there == [number for number in context.members if number not in lost]
    plain = torch.zeros(context.length, dtype=torch.int32)
    for number in there:
        plain += vector_of(number)()
    assert torch.equal(total, plain), "the sum is not the sum"
    return {
        "client s": statistics.median(clocks[number].seconds for number in there),
        "server s": at_server.seconds,
        "bytes up": statistics.median(bytes_up[number] for number in there),
        "bytes down besides the model": statistics.median(bytes_down[number] for number in there),
    }


def of_case(case: Case, elements: int, least: Least, repeats: int) -> JSON:
    context = case.context(elements)
    values = torch.linspace(-0.9, 0.9, elements)
    client, server = limits(case, context, least)
    runs = [by_machines(case, context, values) for _ in range(repeats)]
    found: JSON = {
        "clients": case.members,
        "graph": case.graph,
        "neighbours": context.degree,
        "threshold": context.threshold,
        "lost": case.lost,
        **{name: min(run[name] for run in runs) for name in runs[0]},
        "client limit s": client,
        "server limit s": server,
    }
    found["client, of the limit"] = found["client s"] / client
    found["server, of the limit"] = found["server s"] / server
    found["bytes up, of plain 32-bit"] = found["bytes up"] / (4 * elements)
    show(
        f"{case.members:4} {case.graph:9} {case.lost:3} lost: client {found['client s']:.4f} s "
        f"({found['client, of the limit']:.2f} of the limit), server {found['server s']:.4f} s "
        f"({found['server, of the limit']:.2f}), bytes {found['bytes up, of plain 32-bit']:.4f}"
    )
    return found


# Flower


def by_flower(python: str, elements: int, lost: int) -> JSON:
    words = [python, str(PEER), "--elements", str(elements), "--lost", str(lost)]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"Flower's round failed: {done.stderr}")
    found: JSON = {"clients": 20, "lost": lost, **json.loads(done.stdout)}
    show(
        f"  20 Flower    {lost:3} lost: client {found['client s']:.4f} s, "
        f"server {found['server s']:.4f} s"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3, help="the best counts")
    parser.add_argument("--flower", metavar="PYTHON", help="a Python that has flwr")
    parser.add_argument("--quick", action="store_true", help="50,000 elements, once")
    takes_result(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    elements = 50_000 if asked.quick else asked.elements
    repeats = 1 if asked.quick else asked.repeats
    least = measured(elements)
    result: JSON = {
        "compared": "CPU seconds of one thread and bytes of a round of secure aggregation",
        "elements": elements,
        "repeats": repeats,
        "cores": os.cpu_count(),
        "load before": os.getloadavg()[0],
        "goals": GOALS,
        "parts of the limit, s": vars(least),
        "secure aggregation": [of_case(case, elements, least, repeats) for case in cases()],
        "skipped": {} if asked.flower else {"Flower": "--flower names no Python that has it"},
    }
    if asked.flower:
        result["Flower, all pairs"] = [by_flower(asked.flower, elements, lost) for lost in (0, 5)]
    give(result, asked.result)


if __name__ == "__main__":
    main()
