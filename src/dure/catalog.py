"""Names of dure's own tasks, strategies and worlds, with a summary line for each.

No heavy module is imported here, so that `dure --help` and a mistyped name are answered at once,
without torch.
"""

from __future__ import annotations

from typing import NamedTuple


class StrategyEntry(NamedTuple):
    """Strategy: its module, its class in the module, and a summary line.

    forks: whether its ranks are forked processes, unless another world is named.
    """

    module: str
    kind: str
    summary: str
    forks: bool = False


class WorldEntry(NamedTuple):
    """World: its module, its class in the module, and a summary line.

    lives: kind of strategies that run in it. call: the constructor call, for errors.
    """

    module: str
    kind: str
    summary: str
    lives: str
    call: str


TASKS: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8x8 pixels; built in, no download (mlp, cnn, logistic)",
    "mnist": (
        "70,000 handwritten digits of 28x28 pixels, from IDX files (2nn, cnn, logistic, resnet)"
    ),
    "fashion-mnist": "70,000 garments of 28x28 pixels, from IDX files (2nn, cnn, logistic, resnet)",
    "heart": (
        "heart disease in 920 patients of four hospitals, from the UCI files (logistic regression)"
    ),
    "shakespeare": "the next character of Shakespeare's plays, or of any text (lstm, transformer)",
}
"""Built-in tasks: name to summary."""


# `forks` is here so that ranks can be prepared before the strategy itself is imported.
SYSTEMS: dict[str, StrategyEntry] = {
    "single-worker": StrategyEntry(
        "dure.parallel.local.single",
        "SingleWorker",
        "one worker: SGD; gradient descent with a full batch",
    ),
    "data-parallel": StrategyEntry(
        "dure.parallel.data.strategy",
        "DataParallel",
        "ranks divide each batch, gradients are summed",
        forks=True,
    ),
    "zero": StrategyEntry(
        "dure.parallel.zero.strategy",
        "ZeRO",
        "data parallel that divides what ranks would hold alike",
        forks=True,
    ),
    "pipeline": StrategyEntry(
        "dure.parallel.mesh.pipeline", "Pipeline", "ranks hold stages of the model", forks=True
    ),
    "tensor-parallel": StrategyEntry(
        "dure.parallel.mesh.tensor_parallel",
        "TensorParallel",
        "ranks divide each layer, and compute every example together",
        forks=True,
    ),
    "parallel": StrategyEntry(
        "dure.parallel.mesh.strategy",
        "Parallel",
        "data, pipeline and tensor parallelism on a mesh of ranks",
        forks=True,
    ),
    "parallel-sgd": StrategyEntry(
        "dure.averaging.parallel_sgd",
        "ParallelSGD",
        "ranks train apart, models are combined seldom",
        forks=True,
    ),
    "local-sgd": StrategyEntry(
        "dure.averaging.local_sgd",
        "LocalSGD",
        "ranks train apart, weights are averaged every few steps",
        forks=True,
    ),
    "diloco": StrategyEntry(
        "dure.averaging.diloco",
        "DiLoCo",
        "local SGD with long rounds and an outer optimizer",
        forks=True,
    ),
    "admm": StrategyEntry(
        "dure.averaging.admm",
        "ADMM",
        "ranks minimise apart, duals draw them to a consensus",
        forks=True,
    ),
    "layers-per-core": StrategyEntry(
        "dure.parallel.local.layers_per_core",
        "LayersPerCore",
        "a pipeline of threads, each with some of the layers",
    ),
    "parameter-server": StrategyEntry(
        "dure.parameter_server.strategy",
        "ParameterServer",
        "servers own the weights by ranges, workers push gradients and pull weights",
        forks=True,
    ),
    "downpour": StrategyEntry(
        "dure.parameter_server.downpour",
        "Downpour",
        "replicas with data of their own push to servers and fetch, each at its own pace",
        forks=True,
    ),
    "hogwild": StrategyEntry(
        "dure.parallel.local.hogwild",
        "Hogwild",
        "threads or processes update the same weights without locks",
    ),
    "split": StrategyEntry(
        "dure.split.in_turn",
        "SplitLearning",
        "clients have the head of the model, a server its tail; clients train in turn",
    ),
    "parallel-split": StrategyEntry(
        "dure.split.parallel",
        "ParallelSplit",
        "split learning in which all clients' batches are one batch of the server's",
    ),
    "split-fed": StrategyEntry(
        "dure.split.split_fed",
        "SplitFed",
        "split learning at the same time, heads (and tails) are averaged every round",
    ),
    "vertical-split": StrategyEntry(
        "dure.split.vertical",
        "VerticalSplit",
        "parties have different features of the same people, activations are joined",
    ),
    "fed-sgd": StrategyEntry(
        "dure.federated.algorithms.fed_sgd",
        "FedSGD",
        "clients send gradients of all their data, a server makes one step",
    ),
    "fed-avg": StrategyEntry(
        "dure.federated.algorithms.fed_avg",
        "FedAvg",
        "clients train locally, a server averages their updates",
    ),
    "fed-prox": StrategyEntry(
        "dure.federated.algorithms.fed_prox",
        "FedProx",
        "FedAvg whose clients are held near the global model, and may do less",
    ),
    "scaffold": StrategyEntry(
        "dure.federated.algorithms.scaffold",
        "Scaffold",
        "FedAvg with control variates against the clients' drift",
    ),
    "fed-avg-m": StrategyEntry(
        "dure.federated.algorithms.fed_opt", "FedAvgM", "FedAvg with momentum on the server"
    ),
    "fed-adagrad": StrategyEntry(
        "dure.federated.algorithms.fed_opt", "FedAdagrad", "FedAvg with Adagrad on the server"
    ),
    "fed-adam": StrategyEntry(
        "dure.federated.algorithms.fed_opt", "FedAdam", "FedAvg with Adam on the server"
    ),
    "fed-yogi": StrategyEntry(
        "dure.federated.algorithms.fed_opt", "FedYogi", "FedAvg with Yogi on the server"
    ),
    "fed-async": StrategyEntry(
        "dure.federated.algorithms.fed_async",
        "FedAsync",
        "no rounds: updates are mixed in one by one, the stale ones by less",
    ),
    "fed-buff": StrategyEntry(
        "dure.federated.algorithms.fed_buff",
        "FedBuff",
        "no rounds: a step for every so many updates, the stale ones count less",
    ),
    "byzantine": StrategyEntry(
        "dure.federated.algorithms.byzantine",
        "ByzantineGD",
        "gradient descent by the geometric median of means: withstands liars",
    ),
    "fed-per": StrategyEntry(
        "dure.federated.algorithms.fed_per",
        "FedPer",
        "FedAvg of the lower layers; the last ones are each client's own",
    ),
    "ditto": StrategyEntry(
        "dure.federated.algorithms.ditto",
        "Ditto",
        "FedAvg, and for every client a model of its own near the global one",
    ),
    "local-only": StrategyEntry(
        "dure.federated.algorithms.local_only",
        "LocalOnly",
        "every client trains alone, nothing travels: what taking part is compared with",
    ),
    "per-fed-avg": StrategyEntry(
        "dure.federated.algorithms.per_fed_avg",
        "PerFedAvg",
        "a global model that is good after a step on a client's own data",
    ),
}
"""Strategies by name."""


class Family(NamedTuple):
    """Branch of the family tree: the common property of its systems, and the systems.

    worlds: the worlds in which they run.
    """

    title: str
    systems: tuple[str, ...] = ()
    worlds: tuple[str, ...] = ()
    branches: tuple[Family, ...] = ()


_RANKS = ("processes", "torchrun")
_CLIENTS = ("simulated", "network")

FAMILIES: tuple[Family, ...] = (
    Family("one worker, with which all others are compared", ("single-worker",), ("processes",)),
    Family(
        "workers that make each step together",
        branches=(
            Family(
                "each computes its part of the batch",
                ("data-parallel",),
                (*_RANKS, "threads"),
            ),
            Family("and holds a part of what all would hold alike", ("zero",), _RANKS),
            Family("each holds a part of the model", ("pipeline", "tensor-parallel"), _RANKS),
            Family("each holds some of the layers", ("layers-per-core",), ("threads",)),
            Family("several of these at once", ("parallel",), _RANKS),
        ),
    ),
    Family(
        "workers that train apart, and combine their models now and then",
        ("parallel-sgd", "local-sgd", "diloco", "admm"),
        _RANKS,
    ),
    Family(
        "weights that all workers update, each when it is ready",
        branches=(
            Family(
                "servers own them",
                ("parameter-server", "downpour"),
                ("processes", "simulated"),
            ),
            Family("they lie in memory that all share", ("hogwild",), ("threads", "processes")),
        ),
    ),
    Family(
        "federated: clients keep their data, a server has the model",
        branches=(
            Family(
                "in rounds",
                ("fed-sgd", "fed-avg", "fed-prox", "scaffold"),
                _CLIENTS,
                (
                    Family(
                        "with an optimizer on the server",
                        ("fed-avg-m", "fed-adagrad", "fed-adam", "fed-yogi"),
                        _CLIENTS,
                    ),
                ),
            ),
            Family("without rounds", ("fed-async", "fed-buff"), _CLIENTS),
            Family("against clients that lie", ("byzantine",), _CLIENTS),
            Family(
                "with a model of each client's own", ("fed-per", "ditto", "per-fed-avg"), _CLIENTS
            ),
            Family(
                "each client alone, beside which federations are compared",
                ("local-only",),
                _CLIENTS,
            ),
        ),
    ),
    Family(
        "split: clients and a server have parts of the model",
        branches=(
            Family(
                "clients have examples of their own",
                ("split", "parallel-split", "split-fed"),
                _CLIENTS,
            ),
            Family("parties have features of the same people", ("vertical-split",), _CLIENTS),
        ),
    ),
)
"""All systems, each once, by what they divide."""

WORLDS: dict[str, WorldEntry] = {
    "processes": WorldEntry(
        "dure.worlds.processes.world",
        "Processes",
        "ranks as processes of this machine",
        lives="ranks",
        call="Processes(n)",
    ),
    "threads": WorldEntry(
        "dure.worlds.threads",
        "Threads",
        "worker threads of one process, on its cores or its GPUs",
        lives="threads",
        call="Threads(n)",
    ),
    "torchrun": WorldEntry(
        "dure.worlds.torchrun.world",
        "Torchrun",
        "the ranks that torchrun has started, on many machines",
        lives="ranks",
        call="Torchrun()",
    ),
    "simulated": WorldEntry(
        "dure.worlds.simulated",
        "Simulated",
        "a federation, or a parameter server, in one process under a virtual clock",
        lives="clients",
        call="Simulated()",
    ),
    "network": WorldEntry(
        "dure.worlds.network.world",
        "Network",
        "a federation whose clients come to this server over a network",
        lives="clients",
        call="Network()",
    ),
}
"""Worlds by name."""


def worlds_for(kind: str) -> str:
    """Return the worlds in which strategies of this kind run, for errors."""
    return f"{kind}: {' or '.join(world.call for world in WORLDS.values() if world.lives == kind)}"
