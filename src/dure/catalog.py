"""The names of what dure brings along, with one line on each.

Nothing heavy is imported here, so that `dure --help` and a mistyped name are answered at once,
without torch.
"""

from __future__ import annotations

TASKS: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8x8 pixels; built in, no download (mlp, cnn, logistic)",
    "mnist": "70,000 handwritten digits of 28x28 pixels, from IDX files (2nn, cnn, logistic, resnet)",
    "fashion-mnist": "70,000 garments of 28x28 pixels, from IDX files (2nn, cnn, logistic, resnet)",
    "heart": "heart disease in 920 patients of four hospitals, from the UCI files (logistic regression)",
    "shakespeare": "the next character of Shakespeare's plays, or of any text (lstm, transformer)",
}
"""Built-in tasks: name to summary."""


SYSTEMS: dict[str, tuple[str, str, str]] = {
    "single-worker": (
        "dure.parallel.local.single",
        "SingleWorker",
        "one worker: SGD; gradient descent with a full batch",
    ),
    "data-parallel": (
        "dure.parallel.data.strategy",
        "DataParallel",
        "ranks divide each batch, gradients are summed",
    ),
    "zero": (
        "dure.parallel.zero.strategy",
        "ZeRO",
        "data parallel that divides what ranks would hold alike",
    ),
    "pipeline": (
        "dure.parallel.mesh.pipeline",
        "Pipeline",
        "ranks hold stages of the model",
    ),
    "tensor-parallel": (
        "dure.parallel.mesh.tensor_parallel",
        "TensorParallel",
        "ranks divide each layer, and compute every example together",
    ),
    "parallel": (
        "dure.parallel.mesh.strategy",
        "Parallel",
        "data, pipeline and tensor parallelism on a mesh of ranks",
    ),
    "parallel-sgd": (
        "dure.averaging.parallel_sgd",
        "ParallelSGD",
        "ranks train apart, models are combined once",
    ),
    "local-sgd": (
        "dure.averaging.local_sgd",
        "LocalSGD",
        "ranks train apart, weights are averaged every few steps",
    ),
    "diloco": (
        "dure.averaging.diloco",
        "DiLoCo",
        "local SGD with long rounds and an outer optimizer",
    ),
    "admm": ("dure.averaging.admm", "ADMM", "ranks minimise apart, duals draw them to a consensus"),
    "layers-per-core": (
        "dure.parallel.local.layers_per_core",
        "LayersPerCore",
        "a pipeline of threads, each with some of the layers",
    ),
    "hogwild": (
        "dure.parallel.local.hogwild",
        "Hogwild",
        "threads or processes update the same weights without locks",
    ),
    "fed-sgd": (
        "dure.federated.algorithms.fed_sgd",
        "FedSGD",
        "clients send gradients of all their data, a server makes one step",
    ),
    "fed-avg": (
        "dure.federated.algorithms.fed_avg",
        "FedAvg",
        "clients train locally, a server averages their updates",
    ),
    "fed-prox": (
        "dure.federated.algorithms.fed_prox",
        "FedProx",
        "FedAvg whose clients are held near the global model, and may do less",
    ),
    "scaffold": (
        "dure.federated.algorithms.scaffold",
        "Scaffold",
        "FedAvg with control variates against the clients' drift",
    ),
    "fed-avg-m": (
        "dure.federated.algorithms.fed_opt",
        "FedAvgM",
        "FedAvg with momentum on the server",
    ),
    "fed-adagrad": (
        "dure.federated.algorithms.fed_opt",
        "FedAdagrad",
        "FedAvg with Adagrad on the server",
    ),
    "fed-adam": ("dure.federated.algorithms.fed_opt", "FedAdam", "FedAvg with Adam on the server"),
    "fed-yogi": ("dure.federated.algorithms.fed_opt", "FedYogi", "FedAvg with Yogi on the server"),
    "fed-async": (
        "dure.federated.algorithms.fed_async",
        "FedAsync",
        "no rounds: updates are mixed in one by one, the stale ones by less",
    ),
    "fed-buff": (
        "dure.federated.algorithms.fed_buff",
        "FedBuff",
        "no rounds: a step for every so many updates, the stale ones count less",
    ),
    "byzantine": (
        "dure.federated.algorithms.byzantine",
        "ByzantineGD",
        "gradient descent by the geometric median of means: withstands liars",
    ),
    "fed-per": (
        "dure.federated.algorithms.fed_per",
        "FedPer",
        "FedAvg of the lower layers; the last ones are each client's own",
    ),
    "ditto": (
        "dure.federated.algorithms.ditto",
        "Ditto",
        "FedAvg, and for every client a model of its own near the global one",
    ),
    "per-fed-avg": (
        "dure.federated.algorithms.per_fed_avg",
        "PerFedAvg",
        "a global model that is good after a step on a client's own data",
    ),
}
"""Strategies: name to (module, class, summary)."""

ONE_PROCESS = ("single-worker", "layers-per-core", "hogwild")
"""Those that are at home in the calling process: nothing is forked for them."""

WORLDS: dict[str, tuple[str, str, str]] = {
    "processes": ("dure.worlds.processes.world", "Processes", "ranks as processes of this machine"),
    "threads": (
        "dure.worlds.threads",
        "Threads",
        "worker threads of one process, on its cores or its GPUs",
    ),
    "torchrun": (
        "dure.worlds.torchrun.world",
        "Torchrun",
        "the ranks that torchrun has started, on many machines",
    ),
    "simulated": ("dure.worlds.simulated", "Simulated", "a federation in one process"),
}
"""Worlds: name to (module, class, summary)."""
