"""Tables of the parameter server: how many rows a second one server reads, changes and makes.

One request has 10,000 keys by default, drawn from a million. Measured are the state machine's parts
alone, without a network:

    known       rows that were changed before: pull, push (by optimizer), and the digest of a list
    first use   rows that nobody has changed: a pull makes their values, a push gives them memory
    raw         numpy: values[keys], and values[keys] -= gradient, which nothing can be faster than

    python benchmarks/parameter_server_tables.py > benchmarks/results/parameter_server_tables.json

Figures are millions of keys a second, medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from dure.parameter_server.digests import digest_of
from dure.parameter_server.first_rows import first_rows, key_of
from dure.parameter_server.tables import Table, TableRows, rule_of

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
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {
        "keys": options.keys,
        "threads": options.threads,
        "millions_of_keys_a_second": {
            str(dim): rates(dim, options.keys, options.rounds) for dim in options.dims
        },
    }
    json.dump(found, sys.stdout, indent=1)
    print()


def rates(dim: int, keys: int, rounds: int) -> dict[str, float]:
    """Millions of keys a second of each operation, for rows of `dim` float32."""
    found: dict[str, float] = {}

    def measure(name: str, prepare: Callable[[], Callable[[], Any]]) -> None:
        seconds = []
        for _ in range(rounds):
            act = prepare()
            started = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - started)
        found[name] = round(keys / statistics.median(seconds) / 1e6, 3)

    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(keys, dim, generator=generator)

    def some() -> Tensor:
        return torch.randperm(ROWS, generator=generator)[:keys].sort().values

    raw = numpy.zeros((ROWS, dim), dtype=numpy.float32)
    measure("raw pull", lambda: partial(raw.__getitem__, some().numpy()))
    measure("raw push", lambda: partial(_subtract, raw, some().numpy(), gradient.numpy()))
    known = served("sgd", dim)
    known.push(torch.arange(ROWS), torch.zeros(ROWS, dim))
    measure("known pull", lambda: partial(known.pull, some()))
    for name in RULES:
        rows = served(name, dim)
        rows.push(torch.arange(ROWS), torch.zeros(ROWS, dim))
        measure(f"known push {name}", lambda rows=rows: partial(rows.push, some(), gradient))
    measure("digest", lambda: partial(digest_of, some()))
    new = served("sgd", dim)
    measure("first use pull", lambda: partial(new.pull, some()))
    begins = iter(range(0, rounds * keys, keys))
    fresh = served("sgd", dim, rounds * keys)

    def first_push() -> Callable[[], Any]:
        begin = next(begins)
        return partial(fresh.push, torch.arange(begin, begin + keys), gradient)

    measure("first use push", first_push)
    return found


def served(rule: str, dim: int, rows: int = ROWS) -> TableRows:
    """A table of so many rows that nobody has changed, at one server."""
    kind, settings = RULES[rule]
    key = key_of(0, 0)

    def first(wanted: Tensor) -> Tensor:
        return torch.from_numpy(first_rows(key, wanted.numpy(), dim))

    rule_ = rule_of(kind, settings, "table")
    return TableRows(Table("table", rows, dim, torch.float32, rule_, first), 0, rows)


def _subtract(values: Any, rows: Any, gradient: Any) -> None:
    values[rows] -= 0.1 * gradient


if __name__ == "__main__":
    main()
