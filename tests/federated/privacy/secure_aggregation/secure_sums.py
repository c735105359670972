"""Servers and clients of secure sums in one process, for tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from dure.federated.privacy.secure_aggregation.client import SecureSumClient
from dure.federated.privacy.secure_aggregation.cohort import SumContext
from dure.federated.privacy.secure_aggregation.server import SecureSumServer
from dure.randomness.secret import Secret
from dure.wire.signatures import Key

LENGTH = 7

Wire = Callable[[int, int, bytes], "bytes | None"]
"""What the server's message of a stage to a client becomes on its way; None: it does not come."""


def context(n: int = 5, **others: Any) -> SumContext:
    """All pairs among clients 10, 13, ... of whom four fifths and one have to stay."""
    given: dict[str, Any] = {
        "run": "run",
        "round": 3,
        "attempt": 0,
        "group": 0,
        "model": "a" * 64,
        "length": LENGTH,
        "quantisation": "range 1, 22 bits",
        "members": tuple(10 + 3 * at for at in range(n)),
        "threshold": 2 * n // 3 + 1,
        "degree": n - 1,
    }
    return SumContext(**{**given, **others})


def identity(client: int) -> Key:
    return Key(Ed25519PrivateKey.from_private_bytes(client.to_bytes(32, "big")))


def roster(clients: Collection[int]) -> dict[int, str]:
    return {client: identity(client).public for client in clients}


def vector(client: int, length: int = LENGTH) -> Tensor:
    """Any int32, from all of them."""
    generator = torch.Generator().manual_seed(client)
    low, high = -(2**31), 2**31
    return torch.randint(low, high, (length,), generator=generator, dtype=torch.int64).int()


def total(clients: Collection[int], length: int = LENGTH) -> Tensor:
    """The sum modulo 2^32, by integers that do not overflow."""
    whole = sum((vector(client, length).long() for client in clients), torch.zeros(length).long())
    return ((whole + 2**31) % 2**32 - 2**31).int()


def client(number: int, of: SumContext, *, signed: bool = False, **others: Any) -> SecureSumClient:
    given: dict[str, Any] = {
        "secret": Secret.simulated(number),
        "vector": lambda: vector(number, of.length),
        "identity": identity(number) if signed else None,
        "roster": roster(of.members) if signed else None,
    }
    return SecureSumClient(number, of, **{**given, **others})


def clients(of: SumContext, *, signed: bool = False, **others: Any) -> dict[int, SecureSumClient]:
    return {number: client(number, of, signed=signed, **others) for number in of.members}


def server(of: SumContext, *, signed: bool = False) -> SecureSumServer:
    return SecureSumServer(of, roster(of.members) if signed else None)


def run_stage(
    server: SecureSumServer,
    clients: Mapping[int, SecureSumClient],
    lost: Collection[int] = (),
    tampered: Callable[[int, bytes], bytes] = lambda _, body: body,
) -> dict[int, tuple[bytes, Sequence[Tensor]]]:
    """One stage. lost: who does not answer. tampered: what becomes of the server's messages."""
    stage = server.stage
    assert stage is not None
    answers: dict[int, tuple[bytes, Sequence[Tensor]]] = {}
    for number, body in server.ask().items():
        if number in lost:
            continue
        answer, tensor = clients[number].answer(stage, tampered(number, body))
        answers[number] = (answer, [] if tensor is None else [tensor])
        server.take(number, *answers[number])
    server.close_stage()
    return answers


def run_all(
    server: SecureSumServer,
    clients: Mapping[int, SecureSumClient],
    lost: Mapping[int, Collection[int]] | None = None,
) -> tuple[Tensor, list[int]]:
    """The sum. lost: by stage, who does not answer it."""
    while server.stage is not None:
        run_stage(server, clients, (lost or {}).get(server.stage, ()))
    return server.result()


def run_until(
    stage: int,
    server: SecureSumServer,
    clients: Mapping[int, SecureSumClient],
    lost: Mapping[int, Collection[int]] | None = None,
) -> None:
    """Up to a stage, which is the next to be asked for."""
    while server.stage != stage:
        assert server.stage is not None
        run_stage(server, clients, (lost or {}).get(server.stage, ()))
