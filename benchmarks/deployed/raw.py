"""Bare sockets with TLS that do the transfers of a round: the floor of what any protocol takes.

server    sends each client the model, takes as many bytes back, and begins anew once all came
client    takes a model, and sends it back
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import ssl
import threading
import time
from pathlib import Path

PIECE = 1 << 18


def receive(sock: ssl.SSLSocket, memory: memoryview) -> None:
    at = 0
    while at < len(memory):
        count = sock.recv_into(memory[at : at + PIECE])
        if not count:
            raise ConnectionError("the other side has gone")
        at += count


def serve(size: int, clients: int, rounds: int, port: int, tls: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls / "server.pem", tls / "server.key")
    listening = socket.create_server(("127.0.0.1", port))
    together = threading.Barrier(clients)
    at: list[float] = []
    model = memoryview(bytearray(size))

    def one(sock: ssl.SSLSocket, first: bool) -> None:
        memory = memoryview(bytearray(size))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(rounds):
            sock.sendall(model)
            receive(sock, memory)
            together.wait()
            if first:
                at.append(time.perf_counter())

    threads = []
    for number in range(clients):
        sock = context.wrap_socket(listening.accept()[0], server_side=True)
        threads.append(threading.Thread(target=one, args=(sock, number == 0)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"rounds": [b - a for a, b in itertools.pairwise(at)]}), flush=True)


def take_part(size: int, rounds: int, port: int, tls: Path) -> None:
    context = ssl.create_default_context(cafile=tls / "authority.pem")
    until = time.monotonic() + 30
    while True:
        try:
            plain = socket.create_connection(("127.0.0.1", port))
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    sock = context.wrap_socket(plain, server_hostname="127.0.0.1")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(size))
    for _ in range(rounds):
        receive(sock, memory)
        sock.sendall(memory)


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
        serve(asked.bytes, asked.clients, asked.rounds, asked.port, asked.tls)
    else:
        take_part(asked.bytes, asked.rounds, asked.port, asked.tls)


if __name__ == "__main__":
    main()
