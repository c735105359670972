"""Tables of the parameter server: how many rows a second one server reads, changes and makes.

One request has 10,000 keys by default, drawn from a million. Measured are the state machine's parts
alone, without a network:

    known       rows that were changed before: pull, push (by optimizer), and the digest of a list
    first use   rows that nobody has changed: a pull makes their values, a push gives them memory
    raw         numpy: values[keys], and values[keys] -= gradient, which nothing can be faster than

    python benchmarks/parameter_server_tables.py \\
        --result benchmarks/results/parameter_server_tables.json

Figures are millions of keys a second, medians of the rounds. On one thread seconds are those of CPU
time, so that what else runs on the machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import torch
from outcome import give, takes_result
from torch import Tensor

from dure.parameter_server.digests import digest_of
from dure.parameter_server.first_rows import first_rows, key_of
from dure.parameter_server.tables import EmbeddingTable, TableRows, rule_of

ROWS = 1_000_000
RULES: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.0, "eps": 1e-10, "initial_accumulator_value": 0.0},
    ),
    "adam": (torch.optim.SparseAdam, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keys", type=int, default=10_000, help="of one request")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--dims", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--threads", type=int, default=1)
    takes_result(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {
        "keys": options.keys,
        "threads": options.threads,
        "millions_of_keys_a_second": {
            str(dim): rates(dim, options.keys, options.rounds) for dim in options.dims
        },
    }
    give(found, options.result, indent=1)


def rates(dim: int, keys: int, rounds: int) -> dict[str, float]:
    """Millions of keys a second of each operation, for rows of `dim` float32."""
    found: dict[str, float] = {}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def measure(name: str, act: Callable[[Tensor], Any], requests: list[Tensor]) -> None:
        seconds = []
        for request in requests:
            started = clock()
            act(request)
            seconds.append(clock() - started)
        found[name] = round(keys / statistics.median(seconds) / 1e6, 3)

    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(keys, dim, generator=generator)
    # Drawn before anything is timed, since to draw them empties the caches.
    some = [torch.randperm(ROWS, generator=generator)[:keys].sort().values for _ in range(rounds)]
    raw = numpy.ones((ROWS, dim), dtype=numpy.float32)
    measure("raw pull", lambda request: raw[request.numpy()], some)
    measure("raw push", lambda request: _subtract(raw, request.numpy(), gradient.numpy()), some)
    measure("digest", digest_of, some)
    for name in RULES:
        known = served(name, dim)
        known.push(torch.arange(ROWS), torch.zeros(ROWS, dim))
        if name == "sgd":
            measure("known pull", known.pull, some)
        measure(f"known push {name}", partial(_push, known, gradient), some)
    measure("first use pull", served("sgd", dim).pull, some)
    fresh = served("sgd", dim, rounds * keys)
    every = torch.arange(rounds * keys).split(keys)
    measure("first use push", partial(_push, fresh, gradient), list(every))
    return found


def _push(rows: TableRows, gradient: Tensor, request: Tensor) -> None:
    rows.push(request, gradient)


def served(rule: str, dim: int, rows: int = ROWS) -> TableRows:
    """A table of so many rows that nobody has changed, at one server."""
    kind, settings = RULES[rule]
    key = key_of(0, 0)

    def first(wanted: Tensor) -> Tensor:
        return torch.from_numpy(first_rows(key, wanted.numpy(), dim))

    rule_ = rule_of(kind, settings, "table")
    return TableRows(EmbeddingTable("table", rows, dim, torch.float32, rule_, first), 0, rows)


def _subtract(values: Any, rows: Any, gradient: Any) -> None:
    values[rows] -= 0.1 * gradient


if __name__ == "__main__":
    main()
