"""Bare sockets with TLS that do the transfers of a round: the floor of what any protocol takes.

server    sends each client the model, takes as many bytes back, and begins anew once all came
client    takes a model, and sends it back

Arguments: see peer.py.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time

import peer
from peer import Play

PIECE = 1 << 18


def receive(sock: ssl.SSLSocket, memory: memoryview) -> None:
    at = 0
    while at < len(memory):
        count = sock.recv_into(memory[at : at + PIECE])
        if not count:
            raise ConnectionError("the other side has gone")
        at += count


def serve(play: Play) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(play.tls / "server.pem", play.tls / "server.key")
    listening = socket.create_server(("127.0.0.1", play.port))
    together = threading.Barrier(play.clients)
    at: list[float] = []
    model = memoryview(bytearray(play.size))

    def one(sock: ssl.SSLSocket, first: bool) -> None:
        memory = memoryview(bytearray(play.size))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(play.rounds):
            sock.sendall(model)
            receive(sock, memory)
            together.wait()
            if first:
                at.append(time.time())

    threads = []
    for number in range(play.clients):
        sock = context.wrap_socket(listening.accept()[0], server_side=True)
        threads.append(threading.Thread(target=one, args=(sock, number == 0)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peer.say(at)


def connected(port: int) -> socket.socket:
    """Once the server listens, which it does within 30 s."""
    until = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def take_part(play: Play) -> None:
    context = ssl.create_default_context(cafile=play.tls / "authority.pem")
    sock = context.wrap_socket(connected(play.port), server_hostname="127.0.0.1")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(play.size))
    for _ in range(play.rounds):
        receive(sock, memory)
        sock.sendall(memory)


if __name__ == "__main__":
    peer.main(serve, take_part)
