"""The names of what dure brings along, with one line on each.

Nothing heavy is imported here, so that `dure --help` and a mistyped name are answered at once, without torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

TASKS: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8x8 pixels; built in, no download (mlp, cnn, logistic)",
    "mnist": "70,000 handwritten digits of 28x28 pixels, from IDX files (2nn, cnn, logistic, resnet)",
    "fashion-mnist": "70,000 garments of 28x28 pixels, from IDX files (2nn, cnn, logistic, resnet)",
    "heart": "heart disease in 920 patients of four hospitals, from the UCI files (logistic regression)",
    "shakespeare": "the next character of Shakespeare's plays, or of any text (lstm, transformer)",
}
"""Built-in tasks: name to summary."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, if any is near, and the list."""
    known = list(known)
    near = difflib.get_close_matches(name.lower().replace("_", "-"), known, n=1)
    return (f", did you mean {near[0]!r}? There are: " if near else "; there are: ") + ", ".join(known)


SYSTEMS: dict[str, tuple[str, str, str]] = {
    "single-worker": (
        "dure.parallel.single",
        "SingleWorker",
        "one worker: SGD; gradient descent with a full batch",
    ),
    "data-parallel": ("dure.parallel.data", "DataParallel", "ranks divide each batch, gradients are summed"),
    "zero": ("dure.parallel.zero.strategy", "ZeRO", "data parallel that divides what ranks would hold alike"),
    "pipeline": (
        "dure.parallel.pipeline.strategy",
        "Pipeline",
        "ranks hold stages of the model",
    ),
    "tensor-parallel": (
        "dure.parallel.tensor.strategy",
        "TensorParallel",
        "ranks divide each layer, and compute every example together",
    ),
    "parallel": ("dure.parallel.combined", "Parallel", "data, pipeline and tensor parallelism on a mesh of ranks"),
    "parallel-sgd": ("dure.averaging.parallel_sgd", "ParallelSGD", "ranks train apart, models are combined once"),
    "local-sgd": ("dure.averaging.local_sgd", "LocalSGD", "ranks train apart, weights are averaged every few steps"),
    "diloco": ("dure.averaging.diloco", "DiLoCo", "local SGD with long rounds and an outer optimizer"),
    "admm": ("dure.averaging.admm", "ADMM", "ranks minimise apart, duals draw them to a consensus"),
    "layers-per-core": ("dure.parallel.layers", "LayersPerCore", "a pipeline of threads, each with some of the layers"),
    "hogwild": ("dure.parallel.hogwild", "Hogwild", "threads or processes update the same weights without locks"),
    "fed-avg": ("dure.federated.fed_avg", "FedAvg", "clients train locally, a server averages their updates"),
}
"""Strategies: name to (module, class, summary)."""

ONE_PROCESS = ("single-worker", "layers-per-core", "hogwild")
"""Those that are at home in the calling process: nothing is forked for them."""

WORLDS: dict[str, tuple[str, str, str]] = {
    "processes": ("dure.worlds.processes", "Processes", "ranks as processes of this machine"),
    "threads": ("dure.worlds.threads", "Threads", "worker threads of one process, on its cores or its GPUs"),
    "torchrun": ("dure.worlds.torchrun", "Torchrun", "the ranks that torchrun has started, on many machines"),
    "simulated": ("dure.worlds.simulated", "Simulated", "a federation in one process"),
}
"""Worlds: name to (module, class, summary)."""
