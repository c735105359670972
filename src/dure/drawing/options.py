"""Numbers of each picture, which are also the options of `dure draw SUBJECT`.

The module imports no torch: the command reads its help from here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineDrawing:
    """Numbers of a pipeline.

    Args:
        schedule: schedules, each in a row of pictures: naive, gpipe, 1f1b, interleaved,
            zero-bubble, zero-bubble-v.
        ranks: number of ranks.
        microbatches: micro-batches of a batch; naive sends them as a single one.
        stages_per_rank: stages of each rank, for interleaved alone; by default 2.
        forward: time of a forward of a micro-batch in the layers of a rank.
        backward: time of its backward.
        message: time until a message arrives.
    """

    schedule: tuple[str, ...] = ("gpipe",)
    ranks: int = 4
    microbatches: int = 8
    stages_per_rank: int | None = None
    forward: float = 1.0
    backward: float = 2.0
    message: float = 0.0


@dataclass(frozen=True)
class AllReduceDrawing:
    """Numbers of an all-reduce.

    Args:
        ranks: number of ranks.
        hosts: number of hosts, for hierarchical alone; by default 2.
    """

    ranks: int = 4
    hosts: int | None = None


@dataclass(frozen=True)
class ParameterServerDrawing:
    """Numbers of servers and workers.

    Args:
        staleness: steps by which a worker may be ahead of the slowest, each drawn as a run: 0 is
            synchronous, none is unbounded.
        workers: number of workers.
        servers: number of servers.
        steps: steps of the run.
        transfer: time of a message with all weights; a gradient takes 1.
        slow: number of slow workers.
        factor: slowness of the slow workers.
    """

    staleness: tuple[str, ...] = ("0", "none")
    workers: int = 3
    servers: int = 1
    steps: int = 4
    transfer: float = 0.2
    slow: int = 1
    factor: float = 2.0


@dataclass(frozen=True)
class DownpourDrawing:
    """Numbers of replicas and servers.

    Args:
        fetch_every: steps between fetches of the weights.
        push_every: steps between pushes of the summed gradients.
        replicas: number of replicas.
        servers: number of servers.
        steps: steps of each replica.
        transfer: time of a message with all weights; a gradient takes 1.
        slow: number of slow replicas.
        factor: slowness of the slow replicas.
    """

    fetch_every: int = 2
    push_every: int = 2
    replicas: int = 3
    servers: int = 1
    steps: int = 6
    transfer: float = 0.2
    slow: int = 1
    factor: float = 2.0


@dataclass(frozen=True)
class FedAvgDrawing:
    """Numbers of clients.

    Args:
        clients: number of clients.
        rounds: number of rounds.
        transfer: time of a download or an upload of the model; training takes 1.
        slow: number of stragglers.
        factor: slowness of the stragglers.
        deadline: time after which a round ends without the missing updates, drawn as a second run.
    """

    clients: int = 5
    rounds: int = 2
    transfer: float = 0.3
    slow: int = 1
    factor: float = 3.0
    deadline: float | None = None


@dataclass(frozen=True)
class SplitDrawing:
    """Numbers of clients.

    Args:
        clients: number of clients, or of parties.
        steps: steps of each client.
        transfer: time of a message with as many bytes as the model; a step of the whole model takes
            1 on a client.
    """

    clients: int = 3
    steps: int = 2
    transfer: float = 0.4


@dataclass(frozen=True)
class TensorDrawing:
    """Numbers of a chain of linear layers.

    Args:
        ranks: number of ranks.
        widths: features before the first and after each layer.
        examples: rows of the activations.
    """

    ranks: int = 2
    widths: tuple[int, ...] = (8, 16, 16, 8)
    examples: int = 4


@dataclass(frozen=True)
class ZeroDrawing:
    """Numbers of a model.

    Args:
        parameters: number of parameters.
        ranks: number of ranks.
        optimizer: adam, adamw, momentum or sgd.
    """

    parameters: int = 1_000_000
    ranks: int = 4
    optimizer: str = "adam"
