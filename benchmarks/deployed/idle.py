"""Thousands of idle clients in one process: sockets with TLS, no torch.

They check in at `--rate` a second, each on a connection of its own, and wait by long poll. Once all
are there, some check in again on new connections, while the others wait. Lines of JSON on standard
output: seconds of each check-in, from the first byte of the connection to the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import ssl
import time
import urllib.parse
from pathlib import Path
from typing import Any

from light import VERSION, Signer


class Connection:
    """HTTP/1.1 on one socket, as far as the server's small answers need it."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext) -> None:
        self.host, self.port, self.context = host, port, context
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(
            self.host, self.port, ssl=self.context, limit=1 << 14
        )

    def close(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()

    async def post(
        self, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        assert self.reader is not None
        assert self.writer is not None
        lines = [f"POST {path} HTTP/1.1", f"host: {self.host}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        found = {}
        for line in head[1:]:
            name, _, value = line.partition(":")
            found[name.lower()] = value.strip()
        size = int(found.get("content-length", 0))
        return int(head[0].split()[1]), found, await self.reader.readexactly(size)


class Idle:
    """A client that only waits."""

    def __init__(self, name: str, make: Any) -> None:
        self.name = name
        self.make = make
        self.signer = Signer()
        self.connection: Connection = make()

    async def ask(self, path: str, said: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(said).encode()
        digest = hashlib.sha256(body).hexdigest()
        for _ in range(2):
            signed = self.signer.headers("POST", path, digest)
            status, headers, answer = await self.connection.post(path, body, signed)
            if status != 401:
                break
            self.signer.renew(headers["dure-nonce"])
        if status != 200:
            raise RuntimeError(f"{status} {answer[:300]!r}")
        found: dict[str, Any] = json.loads(answer)
        return found

    async def check_in(self) -> float:
        """On a new connection; seconds."""
        began = time.perf_counter()
        self.connection = self.make()
        await self.connection.open()
        await self.ask("/v1/check-in", {"version": VERSION, "name": self.name, "examples": 10})
        return time.perf_counter() - began

    async def wait(self) -> None:
        """By long poll, for ever."""
        while True:
            await self.ask("/v1/next", {})


class Crowd:
    def __init__(self, asked: argparse.Namespace) -> None:
        said = urllib.parse.urlsplit(asked.url)
        context = ssl.create_default_context(cafile=asked.tls / "authority.pem")
        make = lambda: Connection(said.hostname or "", said.port or 443, context)  # noqa: E731
        self.clients = [Idle(f"c{asked.first + n}", make) for n in range(asked.count)]
        self.rate = asked.rate
        self.waiting: dict[Idle, asyncio.Task[None]] = {}
        self.broken: list[str] = []

    async def arrive(self) -> list[float]:
        """All of them, at the rate, whether or not those before were answered."""
        began = time.perf_counter()
        tasks = []
        for number, client in enumerate(self.clients):
            await asyncio.sleep(max(0.0, began + number / self.rate - time.perf_counter()))
            tasks.append(asyncio.create_task(self.comes(client)))
        return await asyncio.gather(*tasks)

    async def comes(self, client: Idle) -> float:
        seconds = await client.check_in()
        self.waits(client)
        return seconds

    def waits(self, client: Idle) -> None:
        task = asyncio.create_task(client.wait())
        self.waiting[client] = task
        task.add_done_callback(self.ended)

    def ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.broken.append(repr(task.exception()))

    async def come_again(self, seconds: float, rate: float) -> list[float]:
        """Some leave their connection, and check in on a new one."""
        draws = random.Random(0)
        took = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            client = draws.choice(self.clients)
            self.waiting.pop(client).cancel()
            client.connection.close()
            took.append(await client.check_in())
            self.waits(client)
            await asyncio.sleep(1 / rate)
        return took


async def stand(asked: argparse.Namespace) -> None:
    crowd = Crowd(asked)
    arrived = await crowd.arrive()
    print(json.dumps({"arrived": arrived}), flush=True)
    again = await crowd.come_again(asked.seconds, 10.0)
    print(json.dumps({"again": again, "broken": crowd.broken[:5]}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--tls", type=Path, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    asyncio.run(stand(parser.parse_args()))


if __name__ == "__main__":
    main()
