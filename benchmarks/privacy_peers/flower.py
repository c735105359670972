"""A round of Flower's SecAgg+ without a network: its client's code, and what its workflow computes.

The client is `secaggplus_mod`, stage by stage; the server does what `SecAggPlusWorkflow` does with
the answers, by the same functions in the same order, as that is bound to Flower's grid. All clients
are each other's neighbours. The lost ones have shared their keys and send no vector.

Prints JSON: CPU seconds of a client (median) and of the server, and bytes of a vector.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from typing import Any

import numpy as np
from flwr.common import bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    get_parameters_shape,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

mod = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
MODULUS = 1 << 32
SETTINGS = {
    Key.CLIPPING_RANGE: 8.0,
    Key.TARGET_RANGE: 1 << 22,
    Key.MOD_RANGE: MODULUS,
    Key.MAX_WEIGHT: 1000.0,
}


class Clients:
    """All clients, with the CPU seconds that each has needed."""

    def __init__(self, members: int, elements: int) -> None:
        self.states = {number: mod.SecAggPlusState() for number in range(members)}
        self.seconds = dict.fromkeys(self.states, 0.0)
        values = np.random.default_rng(0).uniform(-1, 1, elements).astype(np.float32)
        self.update = ndarrays_to_parameters([values])

    def do(self, number: int, stage: Any, *asked: Any) -> dict[str, Any]:
        started = time.process_time()
        answer: dict[str, Any] = stage(self.states[number], *asked)
        self.seconds[number] += time.process_time() - started
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=20)
    parser.add_argument("--threshold", type=int, default=14)
    parser.add_argument("--lost", type=int, default=0)
    parser.add_argument("--elements", type=int, default=1_000_000)
    asked = parser.parse_args()
    clients = Clients(asked.members, asked.elements)
    settings = {
        **SETTINGS,
        Key.SAMPLE_NUMBER: asked.members,
        Key.SHARE_NUMBER: asked.members,
        Key.THRESHOLD: asked.threshold,
    }
    public = {}
    for number, state in clients.states.items():
        state.nid = number
        keys = clients.do(number, mod._setup, settings)
        public[number] = (keys[Key.PUBLIC_KEY_1], keys[Key.PUBLIC_KEY_2])
    boxes: dict[int, list[tuple[int, bytes]]] = {number: [] for number in public}
    told = {str(number): keys for number, keys in public.items()}
    for number in public:
        shared = clients.do(number, mod._share_keys, told)
        for to, box in zip(shared[Key.DESTINATION_LIST], shared[Key.CIPHERTEXT_LIST], strict=True):
            boxes[to].append((number, box))
    active = set(range(asked.lost, asked.members))
    vectors = []
    for number in sorted(active):
        forwarded = {
            Key.SOURCE_LIST: [sender for sender, _ in boxes[number]],
            Key.CIPHERTEXT_LIST: [box for _, box in boxes[number]],
        }
        masked = clients.do(number, mod._collect_masked_vectors, forwarded, 500, clients.update)
        vectors.append(masked[Key.MASKED_PARAMETERS])
    dead = set(public) - active
    lists = {Key.ACTIVE_NODE_ID_LIST: sorted(active), Key.DEAD_NODE_ID_LIST: sorted(dead)}
    shares = [clients.do(number, mod._unmask, lists) for number in sorted(active)]
    started = time.process_time()
    total = unmasked(vectors, shares, active, public)
    server = time.process_time() - started
    # The first number is the sum of the weights: half of the range from each client.
    assert int(total[0][0]) == len(active) << 21, "the masks have not cancelled"
    print(
        json.dumps(
            {
                "client s": statistics.median(clients.seconds[number] for number in active),
                "server s": server,
                "bytes of a vector": sum(map(len, vectors[0])),
            }
        )
    )


def unmasked(
    vectors: list[list[bytes]],
    answers: list[dict[str, Any]],
    active: set[int],
    public: dict[int, tuple[bytes, bytes]],
) -> list[Any]:
    """What the workflow's last two stages compute."""
    total: list[Any] = []
    for vector in vectors:
        arrays = [bytes_to_ndarray(one) for one in vector]
        total = parameters_addition(total, arrays) if total else arrays
    total = parameters_mod(total, MODULUS)
    shares: dict[int, list[bytes]] = {number: [] for number in public}
    for answer in answers:
        for owner, share in zip(answer[Key.NODE_ID_LIST], answer[Key.SHARE_LIST], strict=True):
            shares[owner].append(share)
    for owner, several in shares.items():
        secret = combine_shares(several)
        shapes = get_parameters_shape(total)
        if owner in active:
            total = parameters_subtraction(total, pseudo_rand_gen(secret, MODULUS, shapes))
            continue
        for other in sorted(active):
            key = generate_shared_key(
                bytes_to_private_key(secret), bytes_to_public_key(public[other][0])
            )
            mask = pseudo_rand_gen(key, MODULUS, shapes)
            combine = parameters_addition if owner > other else parameters_subtraction
            total = combine(total, mask)
    return parameters_mod(total, MODULUS)


if __name__ == "__main__":
    main()
