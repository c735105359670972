"""Training with two workers that do not wait for each other, by each contender.

    python trainers.py WAY MODEL END     END: server, worker 0, worker 1, or both

A worker is told a number of steps, and says seconds. All compute the same gradients by the same
code: a step is a worker's half of a joint batch, plain SGD. Ways:

    alone       every worker trains a model of its own: no communication
    torch RPC   a server's function adds the gradient and returns the weights
    Ray         an actor does so
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ends import tell, told
from exchanges import free_port
from torch import Tensor, nn
from torch.nn import functional as F

import dure

BATCH = 128
"""Examples of a joint batch."""
LR = 0.01


def mlp(width: int) -> nn.Module:
    """784-width-width-10; with 2,800 it has 10,068,810 parameters."""
    layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def task_of(model: str) -> dure.Task:
    """digits: the built-in task with its own model. 10 M: an MLP of ten million parameters."""
    optimizer = partial(torch.optim.SGD, lr=LR)
    if model == "digits":
        return dataclasses.replace(dure.load_task("digits"), test=None, optimizer=optimizer)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1280, 784, generator=generator)
    targets = torch.randint(0, 10, (1280,), generator=generator)
    return dure.Task(partial(mlp, 2800), F.cross_entropy, (inputs, targets), optimizer=optimizer)


class Steps:
    """The steps of a worker. exchange(gradient): the weights, flat."""

    def __init__(self, task: dure.Task, worker: int) -> None:
        from dure.contracts.fresh_model import seeded_model
        from dure.parameter_server.gradients import GradientComputation

        self.worker = worker
        model = seeded_model(task, 0).train()
        self.gradients = GradientComputation(task, model, 0, BATCH, bulk=False, skips=True)
        (self.weights,) = self.gradients.flat.buffers
        self.room = torch.empty_like(self.weights)
        self.batch = 0

    def seconds(self, steps: int, exchange: Callable[[Tensor], Tensor] | None) -> float:
        """Of so many steps; exchange None: this worker is alone."""
        from dure.parameter_server.scheduler import BatchPart

        started = time.perf_counter()
        for _ in range(steps):
            work = BatchPart(self.batch, self.worker, 2)
            self.batch += 1
            found = self.gradients.of(work, 0, "worker", out=[self.room])
            if exchange is None:
                self.weights.add_(self.room, alpha=-LR * found.weight)
            else:
                self.weights.copy_(exchange(self.room.mul_(found.weight)))
        return time.perf_counter() - started


def serve(steps: Steps, exchange: Callable[[Tensor], Tensor] | None) -> None:
    while (asked := told()) is not None:
        tell(steps.seconds(asked, exchange))


def alone(task: dure.Task, end: str) -> None:
    tell(None)
    serve(Steps(task, int(end[-1])), None)


# torch.distributed.rpc

_weights: Tensor | None = None
_lock = threading.Lock()


def update_by_rpc(gradient: Tensor) -> Tensor:
    """At the server."""
    assert _weights is not None
    with _lock:
        return _weights.add_(gradient, alpha=-LR).clone()


def by_rpc(task: dure.Task, end: str) -> None:
    global _weights
    from torch.distributed import rpc

    names = ["server", "worker 0", "worker 1"]
    _weights = Steps(task, 0).weights.clone()
    where = free_port("127.0.0.1") if end == "server" else None
    tell(where)
    where = where or told()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{where[0]}:{where[1]}")
    rpc.init_rpc(
        end.replace(" ", "-"), rank=names.index(end), world_size=3, rpc_backend_options=options
    )
    if end == "server":
        threading.Event().wait()
    serve(
        Steps(task, int(end[-1])),
        lambda gradient: rpc.rpc_sync("server", update_by_rpc, args=(gradient,)),
    )


# Ray


class Actor:
    """The server."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights.copy()

    def update(self, gradient: Any) -> Any:
        self.weights -= LR * gradient
        return self.weights


class RayWorker:
    def __init__(self, server: Any, model: str, worker: int) -> None:
        torch.set_num_threads(1)
        self.server = server
        self.steps = Steps(task_of(model), worker)

    def seconds(self, steps: int) -> float:
        return self.steps.seconds(steps, self.exchange)

    def exchange(self, gradient: Tensor) -> Tensor:
        import ray

        found: Any = ray.get(self.server.update.remote(gradient.numpy()))
        return torch.from_numpy(found)


def by_ray(model: str) -> None:
    import ray

    paths = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *sys.path])
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    server = ray.remote(Actor).remote(Steps(task_of(model), 0).weights.numpy())
    workers = [ray.remote(RayWorker).remote(server, model, number) for number in range(2)]
    tell(None)
    while (asked := told()) is not None:
        tell(max(ray.get([worker.seconds.remote(asked) for worker in workers])))


def main() -> None:
    torch.set_num_threads(1)
    way, model, end = sys.argv[1:4]
    if way == "Ray":
        by_ray(model)
    elif way == "alone":
        alone(task_of(model), end)
    else:
        by_rpc(task_of(model), end)
    os._exit(0)  # libraries that wait for the other end wait in vain


if __name__ == "__main__":
    main()
