"""A router that forgets: passes TCP connections on, and breaks them all at each signal USR1."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import sys

PIECE = 1 << 16


async def relay(host: str, port: int, to: int) -> None:
    writers: set[asyncio.StreamWriter] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while some := await reader.read(PIECE):
                writer.write(some)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
            writers.discard(writer)

    async def comes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", to)
        writers.update((writer, back))
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    def break_all() -> None:
        for writer in list(writers):
            # At once, whatever was under way.
            made: socket.socket = writer.get_extra_info("socket")
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, break_all)
    server = await asyncio.start_server(comes, host, port, limit=PIECE)
    print('{"ready": true}', flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(relay(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
