"""Names of dure's own tasks, strategies and worlds, with a summary line for each.

No heavy module is imported here, so that `dure --help` and a mistyped name are answered at once,
without torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


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
        "dure.parallel.single_worker",
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
        "data parallel that divides the otherwise replicated state",
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
        "ranks train independently, their models are combined seldom",
        forks=True,
    ),
    "local-sgd": StrategyEntry(
        "dure.averaging.local_sgd",
        "LocalSGD",
        "ranks train independently, weights are averaged every few steps",
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
        "ranks minimise independently, dual variables lead them to a consensus",
        forks=True,
    ),
    "layers-per-core": StrategyEntry(
        "dure.parallel.threads.layers_per_core",
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
        "dure.parallel.threads.hogwild",
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
        "split learning in which the server joins all clients' batches into one batch",
    ),
    "split-fed": StrategyEntry(
        "dure.split.split_fed",
        "SplitFed",
        "split learning with all clients at the same time, heads (and tails) are averaged every "
        "round",
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
        "FedAvg with a penalty that keeps clients near the global model, and partial work",
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
        "no rounds: the server mixes in each update as it arrives, with a smaller weight if it "
        "is stale",
    ),
    "fed-buff": StrategyEntry(
        "dure.federated.algorithms.fed_buff",
        "FedBuff",
        "no rounds: a server step for every K updates, with smaller weights for stale ones",
    ),
    "byzantine": StrategyEntry(
        "dure.federated.algorithms.byzantine",
        "ByzantineGD",
        "gradient descent by the geometric median of means: tolerates malicious clients",
    ),
    "fed-per": StrategyEntry(
        "dure.federated.algorithms.fed_per",
        "FedPer",
        "FedAvg of the lower layers; the last ones are each client's own",
    ),
    "ditto": StrategyEntry(
        "dure.federated.algorithms.ditto",
        "Ditto",
        "FedAvg, and for every client a personal model near the global one",
    ),
    "local-only": StrategyEntry(
        "dure.federated.algorithms.local_only",
        "LocalOnly",
        "every client trains alone, nothing is sent: the baseline for taking part",
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

    worlds: the worlds in which they run. name: of the family in charts; "" for a branch of a family
    that has a name.
    """

    title: str
    systems: tuple[str, ...] = ()
    worlds: tuple[str, ...] = ()
    branches: tuple[Family, ...] = ()
    name: str = ""


_RANKS = ("processes", "torchrun")
_CLIENTS = ("simulated", "network")

FAMILIES: tuple[Family, ...] = (
    Family(
        "one worker, the baseline for all others",
        ("single-worker",),
        ("processes",),
        name="single worker",
    ),
    Family(
        "workers that compute each step together",
        branches=(
            Family(
                "each computes its part of the batch",
                ("data-parallel",),
                (*_RANKS, "threads"),
                name="data parallel",
            ),
            Family(
                "and holds a part of the otherwise replicated state",
                ("zero",),
                _RANKS,
                name="data parallel",
            ),
            Family(
                "each holds a part of the model",
                ("pipeline", "tensor-parallel"),
                _RANKS,
                name="model parallel",
            ),
            Family(
                "each holds some of the layers",
                ("layers-per-core",),
                ("threads",),
                name="model parallel",
            ),
            Family("several of these together", ("parallel",), _RANKS, name="model parallel"),
        ),
    ),
    Family(
        "workers that train independently, and combine their models now and then",
        ("parallel-sgd", "local-sgd", "diloco", "admm"),
        _RANKS,
        name="averaging",
    ),
    Family(
        "weights that all workers update, each when it is ready",
        branches=(
            Family(
                "servers own them",
                ("parameter-server", "downpour"),
                ("processes", "simulated"),
                name="parameter server",
            ),
            Family(
                "they are in memory that all workers share",
                ("hogwild",),
                ("threads", "processes"),
                name="shared memory",
            ),
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
            Family("against malicious clients", ("byzantine",), _CLIENTS),
            Family(
                "with a personal model for each client",
                ("fed-per", "ditto", "per-fed-avg"),
                _CLIENTS,
            ),
            Family(
                "each client alone, the baseline for federations",
                ("local-only",),
                _CLIENTS,
            ),
        ),
        name="federated",
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
        name="split learning",
    ),
)
"""All systems, each once, by what they divide."""


def family_names() -> dict[str, str]:
    """Return the name of the family of each system, in the order of the tree."""
    found: dict[str, str] = {}

    def visit(branch: Family, name: str) -> None:
        found.update(dict.fromkeys(branch.systems, branch.name or name))
        for inner in branch.branches:
            visit(inner, branch.name or name)

    for family in FAMILIES:
        visit(family, "")
    return found


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
        "dure.deploy.world",
        "Network",
        "a federation whose clients connect to this server over a network",
        lives="clients",
        call="Network()",
    ),
}
"""Worlds by name."""


def worlds_for(kind: str) -> str:
    """Return the worlds in which strategies of this kind run, for errors."""
    return f"{kind}: {' or '.join(world.call for world in WORLDS.values() if world.lives == kind)}"


TASK_MAKERS: dict[str, tuple[str, str, str]] = {
    "from_trainer": ("dure.trainers.hugging_face_task", "task_from_trainer", "hf"),
    "from_lightning": ("dure.trainers.lightning_task", "task_from_lightning", "lightning"),
}
"""Functions behind `Task.from_trainer` and `Task.from_lightning`: (module, name, extra)."""


def task_maker(name: str) -> Callable[..., Any]:
    """Return a function of `TASK_MAKERS`, imported now. Raises ImportError that names the extra."""
    module, function, extra = TASK_MAKERS[name]
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "dure":
            raise
        raise ImportError(f'Task.{name} needs the extra: pip install "dure[{extra}]"') from error
    return found
