"""grpc.aio with TLS that does the transfers of a round: one unary call a client and round.

A call brings an update, and is answered with the next model once all updates are there. The length
of messages is not limited. Arguments: see peer.py.
"""

from __future__ import annotations

import asyncio
import time

import grpc
import peer
from peer import Play

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
METHOD = "/dure.benchmark/round"


async def serve(play: Play) -> None:
    model = bytes(play.size)
    waiting: list[asyncio.Future[bytes]] = []
    at: list[float] = []
    over = asyncio.Event()

    async def round_of(update: bytes, context: object) -> bytes:
        waits: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        waiting.append(waits)
        if len(waiting) == play.clients:
            at.append(time.time())
            for one in waiting:
                one.set_result(model)
            waiting.clear()
            if len(at) == play.rounds + 1:
                over.set()
        return await waits

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            return grpc.unary_unary_rpc_method_handler(round_of)

    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((Handler(),))
    pair = (play.tls / "server.key").read_bytes(), (play.tls / "server.pem").read_bytes()
    server.add_secure_port(f"127.0.0.1:{play.port}", grpc.ssl_server_credentials([pair]))
    await server.start()
    await over.wait()
    # Once the last answers have got there.
    await server.stop(60)
    # The first call of each client brings nothing: it is no round.
    peer.say(at[1:])


async def take_part(play: Play) -> None:
    trusted = grpc.ssl_channel_credentials((play.tls / "authority.pem").read_bytes())
    there = f"127.0.0.1:{play.port}"
    async with grpc.aio.secure_channel(there, trusted, options=OPTIONS) as channel:
        call = channel.unary_unary(METHOD)
        model = b""
        for _ in range(play.rounds + 1):
            model = await call(model, wait_for_ready=True)


if __name__ == "__main__":
    peer.main(lambda play: asyncio.run(serve(play)), lambda play: asyncio.run(take_part(play)))
