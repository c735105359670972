"""Steps of split learning with one client, by each contender.

    python steps.py WAY MODEL server     one end
    python steps.py WAY MODEL client     the other, which measures

A client is told how many steps to make, and says seconds of a step. All but dure's state machines
are written by hand for one model: they know its shapes, and check nothing.

    undivided    the whole model in one process
    transfers    what crosses the cut, there and back, over TCP; nothing is computed
    raw socket   head and tail, and what crosses the cut by sendmsg and recv_into
    grpc         head and tail, and a unary call a step
    torch RPC    dist_autograd goes backward through both, with its DistributedOptimizer
    machines     dure's client and server, their messages as frames over TCP: no gate, no journal
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "server_peers"))

from cut_models import BATCH, CUT, HALVES, STEPS, Whole, examples, optimizer
from ends import tell, told
from exchanges import free_port

Exchange = Callable[[Tensor, Tensor], Tensor]
"""exchange(values, targets): the gradients of the values."""


def measure(steps: Callable[[int], object]) -> None:
    """Makes as many steps as it is told, until nothing is said any more."""
    while (count := told()) is not None:
        started = time.perf_counter()
        steps(count)
        tell((time.perf_counter() - started) / count)


class Batches:
    """One after another, from the first on."""

    def __init__(self, model: str) -> None:
        self.inputs, self.targets = examples(model)
        self.next = 0

    def read(self) -> tuple[Tensor, Tensor]:
        indices = torch.arange(self.next, self.next + BATCH)
        self.next = (self.next + BATCH) % len(self.inputs)
        return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)


def undivided(model: str) -> None:
    whole = Whole(model)
    own = optimizer(list(whole.parameters()))
    batches = Batches(model)

    def steps(count: int) -> None:
        for _ in range(count):
            inputs, targets = batches.read()
            loss = nn.functional.cross_entropy(whole(inputs), targets)
            loss.backward()
            own.step()
            own.zero_grad()
            loss.item()

    tell(None)
    measure(steps)


class Head:
    """The client's half."""

    def __init__(self, model: str) -> None:
        self.module = HALVES[model][0]()
        self.optimizer = optimizer(list(self.module.parameters()))
        self.batches = Batches(model)

    def step(self, exchange: Exchange) -> None:
        inputs, targets = self.batches.read()
        values = self.module(inputs)
        values.backward(exchange(values.detach(), targets))
        self.optimizer.step()
        self.optimizer.zero_grad()


class Tail:
    """The server's half."""

    def __init__(self, model: str) -> None:
        self.module = HALVES[model][1]()
        self.optimizer = optimizer(list(self.module.parameters()))

    def step(self, values: Tensor, targets: Tensor) -> Tensor:
        """The gradients of the values."""
        values.requires_grad_()
        loss = nn.functional.cross_entropy(self.module(values), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()
        found = values.grad
        assert found is not None
        return found


def at_the_cut(model: str) -> tuple[Tensor, Tensor]:
    """Values and targets of a batch, as the shapes that cross the cut."""
    inputs, targets = Batches(model).read()
    with torch.no_grad():
        return HALVES[model][0]()(inputs), targets


# TCP


def piece(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in its memory."""
    inside: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(inside)


def send(there: socket.socket, pieces: Iterable[memoryview | bytes | bytearray]) -> None:
    """All of them, with as few calls as the kernel lets."""
    left = [memoryview(one).cast("B") for one in pieces]
    while left:
        count = there.sendmsg(left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]


def fill(there: socket.socket, *rooms: memoryview) -> None:
    """Each of them, with what comes. Leaves where nothing comes any more."""
    for room in rooms:
        while len(room):
            count = there.recv_into(room)
            if not count:
                os._exit(0)
            room = room[count:]


def accepted() -> socket.socket:
    """At the server: the client, which is told where to come to."""
    listener = socket.create_server(("127.0.0.1", 0))
    tell(listener.getsockname())
    told()
    there, _ = listener.accept()
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return there


def connected() -> socket.socket:
    """At the client."""
    tell(None)
    there = socket.create_connection(tuple(told()))
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return there


def by_socket(there: socket.socket, like: Tensor) -> Exchange:
    """The gradients come to where the last ones were."""
    back = torch.empty_like(like)

    def exchange(values: Tensor, targets: Tensor) -> Tensor:
        send(there, [piece(values), piece(targets)])
        fill(there, piece(back))
        return back

    return exchange


def transfers_client(model: str) -> None:
    values, targets = at_the_cut(model)
    exchange = by_socket(connected(), values)
    measure(lambda count: [exchange(values, targets) for _ in range(count)])


def transfers_server(model: str) -> None:
    values, targets = at_the_cut(model)
    back = torch.zeros_like(values)
    there = accepted()
    while True:
        fill(there, piece(values), piece(targets))
        send(there, [piece(back)])


def socket_client(model: str) -> None:
    head = Head(model)
    exchange = by_socket(connected(), at_the_cut(model)[0])
    measure(lambda count: [head.step(exchange) for _ in range(count)])


def socket_server(model: str) -> None:
    tail = Tail(model)
    values, targets = at_the_cut(model)
    there = accepted()
    while True:
        fill(there, piece(values), piece(targets))
        send(there, [piece(tail.step(values.detach(), targets))])


# grpc

METHOD = "/split/step"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def grpc_client(model: str) -> None:
    import grpc

    head = Head(model)
    tell(None)
    with grpc.insecure_channel(f"127.0.0.1:{told()}", options=OPTIONS) as channel:
        call = channel.unary_unary(METHOD)

        def exchange(values: Tensor, targets: Tensor) -> Tensor:
            back = call(b"".join([piece(values), piece(targets)]), wait_for_ready=True)
            return torch.frombuffer(bytearray(back), dtype=values.dtype).view(values.shape)

        measure(lambda count: [head.step(exchange) for _ in range(count)])


def grpc_server(model: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    tail = Tail(model)
    like, classes = at_the_cut(model)

    def step(said: bytes, context: object) -> bytes:
        content = bytearray(said)
        values = torch.frombuffer(content, dtype=like.dtype, count=like.numel()).view(like.shape)
        targets = torch.frombuffer(content, dtype=classes.dtype, offset=like.nbytes)
        return bytes(piece(tail.step(values, targets)))

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(step)

    server = grpc.server(ThreadPoolExecutor(1), options=OPTIONS)
    server.add_generic_rpc_handlers((Handler(),))
    tell(server.add_insecure_port("127.0.0.1:0"))
    told()
    server.start()
    server.wait_for_termination()


# torch.distributed.rpc

_tail: nn.Module | None = None


def loss_by_rpc(values: Tensor, targets: Tensor) -> Tensor:
    """At the server."""
    assert _tail is not None
    return nn.functional.cross_entropy(_tail(values), targets)


def parameters_by_rpc() -> list[Any]:
    """At the server."""
    from torch.distributed import rpc

    assert _tail is not None
    return [rpc.RRef(one) for one in _tail.parameters()]


def _join_rpc(name: str, rank: int, where: tuple[str, int]) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{where[0]}:{where[1]}", rpc_timeout=600, num_worker_threads=2
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def rpc_client(model: str) -> None:
    from torch.distributed import autograd, rpc
    from torch.distributed.optim import DistributedOptimizer

    head = HALVES[model][0]()
    batches = Batches(model)
    tell(None)
    _join_rpc("client", 1, told())
    weights = [rpc.RRef(one) for one in head.parameters()]
    weights += rpc.rpc_sync("server", parameters_by_rpc)
    both = DistributedOptimizer(torch.optim.SGD, weights, lr=0.01)

    def steps(count: int) -> None:
        for _ in range(count):
            inputs, targets = batches.read()
            with autograd.context() as context:
                loss = rpc.rpc_sync("server", loss_by_rpc, args=(head(inputs), targets))
                autograd.backward(context, [loss])
                both.step(context)

    measure(steps)


def rpc_server(model: str) -> None:
    global _tail
    _tail = HALVES[model][1]()
    where = free_port("127.0.0.1")
    tell(where)
    told()
    _join_rpc("server", 0, where)
    threading.Event().wait()


# dure's state machines


def _halves(model: str) -> tuple[Any, Any]:
    """What dure makes clients and servers of, and the client's part of the data."""
    import cut_models

    import dure
    from dure.contracts.fresh_model import seeded_model
    from dure.data.client_part import divide
    from dure.split.builders import SplitBuilder
    from dure.split.simulated import divided

    task = getattr(cut_models, model)()
    plan = dure.SplitLearning(cut=(CUT,), clients=1, batch_size=BATCH).plan
    cut = divided(task, seeded_model(task, 0).train(), task.train, plan.at, BATCH, 0)
    parts = divide(plan.partition, 1, task.train, BATCH, 0, joins=False)
    return SplitBuilder(cut, plan, task.train, 0), parts[0]


def _say(there: socket.socket, message: Any) -> None:
    from dure.split.network.frames import encode

    pieces = encode(message)
    send(there, [sum(map(len, pieces)).to_bytes(8, "little"), *pieces])


def _hear(there: socket.socket) -> Any:
    from dure.split.network.frames import decode

    length = bytearray(8)
    fill(there, memoryview(length))
    content = bytearray(int.from_bytes(length, "little"))
    fill(there, memoryview(content))
    return decode(content)


def machines_client(model: str) -> None:
    from dure.split.messages import SERVER, Ended

    halves, part = _halves(model)
    client = halves.client(0, halves.divided.heads.own(), part)
    there = connected()

    def turn(count: int) -> None:
        """A turn of the client's, which has so many steps as there are batches."""
        assert count == STEPS[model]
        over = False
        while not over:
            for _, message in client.receive(SERVER, _hear(there), 0.0):
                _say(there, message)
                over = isinstance(message, Ended)

    measure(turn)


def machines_server(model: str) -> None:
    from dure.split.messages import client
    from dure.split.orders import Amounts

    halves, part = _halves(model)
    amounts = Amounts([STEPS[model]], [len(part.indices)])
    server = halves.server(amounts, None)
    there = accepted()
    for number in range(1 << 30):
        said = server.begin(number)
        while True:
            for _, message in said:
                _say(there, message)
            if server.order.over:
                break
            said = server.receive(client(0), _hear(there), 0.0)


CLIENTS: dict[str, Callable[[str], None]] = {
    "undivided": undivided,
    "transfers": transfers_client,
    "raw socket": socket_client,
    "grpc": grpc_client,
    "torch RPC": rpc_client,
    "machines": machines_client,
}
SERVERS: dict[str, Callable[[str], None]] = {
    "transfers": transfers_server,
    "raw socket": socket_server,
    "grpc": grpc_server,
    "torch RPC": rpc_server,
    "machines": machines_server,
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    way, model, end = sys.argv[1:4]
    (SERVERS if end == "server" else CLIENTS)[way](model)
    os._exit(0)  # libraries that wait for the other end wait in vain


if __name__ == "__main__":
    main()
