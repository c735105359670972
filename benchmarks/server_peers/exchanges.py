"""One push and one pull, by each contender: a gradient goes to a server, and weights come back.

    python exchanges.py WAY server ADDRESS     one end
    python exchanges.py WAY worker             the other, which measures

A worker is told (elements, times) and says seconds of an exchange. The raw ways move the bytes and
do nothing else: their servers add nothing up. Elements are float32.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from ends import tell, told
from torch import Tensor, nn

SIZES = {"4 KB": 1_000, "40 MB": 10_000_000}
MOST = max(SIZES.values())
LR = 1e-3
_COUNT = struct.Struct("<I")

Exchange = Callable[[Tensor], Tensor]
"""exchange(gradient): the weights."""


def measure(exchange: Exchange) -> None:
    """Measures what it is told until nothing is said any more."""
    gradients = {count: torch.full((count,), 1e-3) for count in SIZES.values()}
    while (asked := told()) is not None:
        count, times = asked
        gradient = gradients[count]
        for _ in range(3):
            exchange(gradient)
        started = time.perf_counter()
        for _ in range(times):
            exchange(gradient)
        tell((time.perf_counter() - started) / times)


# Raw limits.


def _bytes(tensor: Tensor) -> memoryview:
    inside: Any = tensor.view(torch.uint8).numpy()
    return memoryview(inside)


def _fill(there: socket.socket, room: memoryview) -> None:
    while len(room):
        count = there.recv_into(room)
        if not count:
            sys.exit()
        room = room[count:]


def _listener(way: str, address: str) -> tuple[socket.socket, Any]:
    if way != "raw TCP":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")  # a name of the kernel's own
        listener.listen()
        return listener, listener.getsockname().decode("latin-1")
    listener = socket.create_server((address, 0))
    return listener, listener.getsockname()


def _connected(way: str, address: Any) -> socket.socket:
    if way != "raw TCP":
        there = socket.socket(socket.AF_UNIX)
        there.connect(address.encode("latin-1"))
        return there
    there = socket.create_connection(tuple(address))
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return there


def raw_server(way: str, address: str) -> None:
    listener, where = _listener(way, address)
    tell(where)
    told()
    there, _ = listener.accept()
    if way == "raw TCP":
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    values, room = torch.zeros(MOST), torch.zeros(MOST)
    count = bytearray(_COUNT.size)
    while True:
        _fill(there, memoryview(count))
        (elements,) = _COUNT.unpack(count)
        _fill(there, _bytes(room[:elements]))
        there.sendall(_bytes(values[:elements]))


def raw_worker(way: str) -> None:
    tell(None)
    there = _connected(way, told())
    weights = torch.zeros(MOST)

    def exchange(gradient: Tensor) -> Tensor:
        data = _bytes(gradient)
        count = there.sendmsg([_COUNT.pack(len(gradient)), data])
        there.sendall(data[count - _COUNT.size :])
        room = weights[: len(gradient)]
        _fill(there, _bytes(room))
        return room

    measure(exchange)


def _memory(descriptor_of: str) -> Tensor:
    """Shared memory for a gradient and for weights."""
    from dure.collectives.shared_memory.pool import SharedMapping

    pid, number = map(int, descriptor_of.split())
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    return SharedMapping(descriptor, 8 * MOST).tensor().view(torch.float32)


def shared_server(way: str, address: str) -> None:
    listener, where = _listener(way, address)
    descriptor = os.memfd_create("raw")
    os.ftruncate(descriptor, 8 * MOST)
    memory = f"{os.getpid()} {descriptor}"
    both = _memory(memory)
    tell((where, memory))
    told()
    there, _ = listener.accept()
    values = torch.zeros(MOST)
    count = bytearray(_COUNT.size)
    while True:
        _fill(there, memoryview(count))
        (elements,) = _COUNT.unpack(count)
        both[MOST : MOST + elements].copy_(values[:elements])
        there.send(count)


def shared_worker(way: str) -> None:
    tell(None)
    where, memory = told()
    there = _connected(way, where)
    both = _memory(memory)
    answer = bytearray(_COUNT.size)

    def exchange(gradient: Tensor) -> Tensor:
        both[: len(gradient)].copy_(gradient)
        there.send(_COUNT.pack(len(gradient)))
        _fill(there, memoryview(answer))
        return both[MOST : MOST + len(gradient)]

    measure(exchange)


def sum_itself(way: str) -> None:
    """No exchange: what a server of plain SGD computes."""
    tell(None)
    told()
    weights = torch.zeros(MOST)
    measure(lambda gradient: weights[: len(gradient)].add_(gradient, alpha=-LR))


# dure: the state machines of server and worker, over their ports.


def _layout() -> Any:
    from dure.parameter_server.manager import first_layout

    return first_layout([0] * len(SIZES), 1, [[0]])


def _port(name: str, address: str) -> tuple[Any, dict[str, Any]]:
    """A port, and the cards of both ends."""
    import msgspec

    from dure.parameter_server.processes.endpoint import Endpoint
    from dure.parameter_server.processes.memory import RankInfo, own_card

    port = Endpoint(name, b"of this benchmark", 16 * MOST, address)
    mine = own_card(name, port.address)
    tell(msgspec.to_builtins(mine))
    other = msgspec.convert(told(), RankInfo)
    return port, {mine.name: mine, other.name: other}


def _spin(port: Any, cards: dict[str, Any]) -> None:
    """As the meeting of a job's ranks does."""
    from dure.machine.cores import available_cores
    from dure.parameter_server.processes.meeting import SPIN

    here = [name for name in cards if port.memory.shares(name)]
    port.spin = SPIN if len(here) <= available_cores() else 0.0


def dure_server(way: str, address: str) -> None:
    from dure.collectives.group import Group
    from dure.contracts.world import RankContext
    from dure.parameter_server.keys import KeyRange
    from dure.parameter_server.messages import MANAGER, Snapshot
    from dure.parameter_server.optimizer import OptimizerRecipe
    from dure.parameter_server.processes.serving import serve
    from dure.parameter_server.server import ShardServer
    from dure.parameter_server.shard import Shard, Terms

    parameters = [nn.Parameter(torch.empty(count)) for count in SIZES.values()]
    recipe = OptimizerRecipe.of(torch.optim.SGD(parameters, lr=LR), [[one] for one in parameters])
    terms = Terms(recipe, staleness=None)
    server = ShardServer(0, _layout(), terms, beat=None)
    for number, count in enumerate(SIZES.values()):
        first = Shard(number, KeyRange(number, 0, count), torch.zeros(count), terms).state()
        server.receive(MANAGER, Snapshot(number, 0, 0, first), 0.0)
    port, cards = _port("server 0", address)
    port.meet(cards, [])
    _spin(port, cards)
    serve(server, port, RankContext(Group()))


class Dure:
    """A worker's end of dure for a vector of so many elements."""

    def __init__(self, port: Any, shard: int, count: int) -> None:
        from dure.parameter_server.keys import KeyRange
        from dure.parameter_server.processes.buffers import GradientBuffers, WeightBuffers
        from dure.parameter_server.worker import WorkerProtocol
        from dure.tensors.flat import FlatParameters

        self.port = port
        self.model = nn.ParameterList([torch.zeros(count)])
        flat = FlatParameters(self.model)
        self.slots = WeightBuffers(flat, [KeyRange(0, 0, count)])
        self.outbox = GradientBuffers(flat.buffers)
        self.side = WorkerProtocol(
            0,
            _layout(),
            [(shard, 0, count)],
            beat=None,
            into=lambda: self.slots.ask(0),
        )

    def exchange(self, gradient: Tensor) -> Tensor:
        room = gradient
        # Between hosts it leaves from where it is, since nobody changes it.
        if self.port.memory.shares("server 0"):
            (room,) = self.outbox.room(self.side)
            room.copy_(gradient)
        now = time.monotonic()
        said = self.side.push([room], 1.0, now)
        for to, message in [*said, *self.side.pull(now, self.side.clock)]:
            self.slots.said(to, message)
            self.port.say(to, message)
        while not self.side.arrived:
            for sender, heard in self.port.hear(1.0):
                self.slots.heard(sender, heard)
                self.side.receive(sender, heard, time.monotonic())
        self.slots.take(0, self.side.take())
        return self.model[0].detach()


def dure_worker(way: str) -> None:
    address = os.environ.get("OWN_ADDRESS", "127.0.0.1")
    port, cards = _port("worker 0", address)
    port.meet(cards, ["server 0"])
    _spin(port, cards)
    ends = {n: Dure(port, shard, n) for shard, n in enumerate(SIZES.values())}
    measure(lambda gradient: ends[len(gradient)].exchange(gradient))


# torch.distributed.rpc

_weights: Tensor | None = None
_lock = threading.Lock()


def exchange_by_rpc(gradient: Tensor) -> Tensor:
    """At the server."""
    global _weights
    if _weights is None:
        _weights = torch.zeros(MOST)
    with _lock:
        return _weights[: len(gradient)].add_(gradient, alpha=-LR).clone()


def rpc_end(name: str, rank: int, where: tuple[str, int]) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{where[0]}:{where[1]}", rpc_timeout=600
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def free_port(address: str) -> tuple[str, int]:
    with socket.create_server((address, 0)) as there:
        host, port = there.getsockname()[:2]
        return host, port


def rpc_server(way: str, address: str) -> None:
    where = free_port(address)
    tell(where)
    told()
    rpc_end("server", 0, where)
    threading.Event().wait()


def rpc_worker(way: str) -> None:
    from torch.distributed import rpc

    tell(None)
    rpc_end("worker", 1, told())
    measure(lambda gradient: rpc.rpc_sync("server", exchange_by_rpc, args=(gradient,)))


# Ray


def ray_worker(way: str) -> None:
    import ray

    tell(None)
    told()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")

    class Server:
        def __init__(self) -> None:
            self.weights = torch.zeros(MOST).numpy()

        def exchange(self, gradient: Any) -> Any:
            weights = self.weights[: len(gradient)]
            weights -= LR * gradient
            return weights

    server = ray.remote(Server).remote()

    def exchange(gradient: Tensor) -> Tensor:
        found: Any = ray.get(server.exchange.remote(gradient.numpy()))
        return torch.from_numpy(found)

    measure(exchange)


SERVERS: dict[str, Callable[[str, str], None]] = {
    "raw shared memory": shared_server,
    "raw TCP": raw_server,
    "unix socket": raw_server,
    "dure": dure_server,
    "torch RPC": rpc_server,
}
WORKERS: dict[str, Callable[[str], None]] = {
    "raw shared memory": shared_worker,
    "raw TCP": raw_worker,
    "unix socket": raw_worker,
    "sum itself": sum_itself,
    "dure": dure_worker,
    "torch RPC": rpc_worker,
    "Ray": ray_worker,
}


def main() -> None:
    torch.set_num_threads(1)
    way, end = sys.argv[1:3]
    if end == "server":
        SERVERS[way](way, sys.argv[3])
    else:
        WORKERS[way](way)
    os._exit(0)  # libraries that wait for the other end wait in vain


if __name__ == "__main__":
    main()
