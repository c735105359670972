"""grpc.aio with TLS that does the transfers of a round: one unary call a client and round.

A call brings an update, and is answered with the next model once all updates are there. The length
of messages is not limited. Arguments as those of raw.py.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from pathlib import Path

import grpc

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
METHOD = "/dure.benchmark/round"


async def serve(size: int, clients: int, rounds: int, port: int, tls: Path) -> None:
    model = bytes(size)
    waiting: list[asyncio.Future[bytes]] = []
    at: list[float] = []
    over = asyncio.Event()

    async def round_of(update: bytes, context: object) -> bytes:
        waits: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        waiting.append(waits)
        if len(waiting) == clients:
            at.append(time.perf_counter())
            for one in waiting:
                one.set_result(model)
            waiting.clear()
            if len(at) == rounds + 1:
                over.set()
        return await waits

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            return grpc.unary_unary_rpc_method_handler(round_of)

    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((Handler(),))
    pair = (tls / "server.key").read_bytes(), (tls / "server.pem").read_bytes()
    server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair]))
    await server.start()
    await over.wait()
    await asyncio.sleep(0.2)
    await server.stop(1)
    # The first call of each client brings nothing: it is no round.
    rounds_at = at[1:]
    times = [b - a for a, b in itertools.pairwise(rounds_at)]
    print(json.dumps({"rounds": times}), flush=True)


async def take_part(rounds: int, port: int, tls: Path) -> None:
    trusted = grpc.ssl_channel_credentials((tls / "authority.pem").read_bytes())
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted, options=OPTIONS) as channel:
        call = channel.unary_unary(METHOD)
        model = b""
        for _ in range(rounds + 1):
            model = await call(model, wait_for_ready=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["server", "client"])
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tls", type=Path, required=True)
    asked = parser.parse_args()
    if asked.role == "server":
        asyncio.run(serve(asked.bytes, asked.clients, asked.rounds, asked.port, asked.tls))
    else:
        asyncio.run(take_part(asked.rounds, asked.port, asked.tls))


if __name__ == "__main__":
    main()
