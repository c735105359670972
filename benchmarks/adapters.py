"""Merges of adapters in a federation of eight clients with ranks 4, 8 and 16: perplexity and bytes.

A transformer of two layers (width 64) is trained on a synthetic language, and then adapted by eight
clients to a second language, of which every client speaks a dialect. A language is a Markov chain
of 64 symbols: each symbol has a distribution over the next one, of a few likely symbols. A client's
distribution is 7/10 the second language and 3/10 its own. Test sequences are of all dialects alike.

    full        all weights are trained
    stack, svd  the best approximation, of rank 16, of the clients' mean update
    factors     the mean of A and the mean of B
    FFA         A is frozen, and B is averaged

Client i has rank 4, 8 or 16 in turn. Every system trains with every rate of --rates, with AdamW at
the clients, from the same first weights; it is shown at the rate with the least test loss. Bytes
are what the clients and the server have sent, with padded factors; "at their ranks" is what the
factors without padding would take. The seconds of a merge are of a square layer of --width.

    python benchmarks/adapters.py [--quick] [--page docs/adapters.md] --result result.json

Progress goes to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from outcome import give, takes_result
from pages import fill, table
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.adapter import lora_layers
from dure.federated.aggregate.low_rank import (
    LowRank,
    SingularTriples,
    mean_matrix,
    stacked,
    svd_of_matrix,
    svd_of_product,
)
from dure.tasks.models import Transformer

SYMBOLS, CONTEXT, WIDTH, LAYERS, HEADS = 64, 32, 64, 2, 4
CLIENTS = 8
RANKS = (4, 8, 16)
LAYER_NAMES = "query_key_value|projection|expand|contract"
ALPHA = 16.0

ADAPTERS: Mapping[str, dure.LoRA | None] = {
    "full fine-tuning": None,
    "stack": dure.LoRA(RANKS, LAYER_NAMES, ALPHA, merge="stack"),
    "svd": dure.LoRA(RANKS, LAYER_NAMES, ALPHA, merge="svd"),
    "factors": dure.LoRA(RANKS, LAYER_NAMES, ALPHA, merge="factors"),
    "FFA": dure.LoRA(RANKS, LAYER_NAMES, ALPHA, freeze_a=True),
}


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def language(generator: torch.Generator) -> Tensor:
    """Distributions of the next symbol, shape (SYMBOLS, SYMBOLS): rows with few likely symbols."""
    return torch.softmax(3 * torch.randn(SYMBOLS, SYMBOLS, generator=generator), dim=1)


def sequences(chain: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw sequences of CONTEXT + 1 symbols, shape (count, CONTEXT + 1)."""
    found = [torch.randint(SYMBOLS, (count,), generator=generator)]
    for _ in range(CONTEXT):
        found.append(torch.multinomial(chain[found[-1]], 1, generator=generator)[:, 0])
    return torch.stack(found, dim=1)


def examples(drawn: list[Tensor]) -> dure.Examples:
    """The examples of all clients, each with its client's name as the key."""
    together = torch.cat(drawn)
    keys = [f"client {client}" for client, own in enumerate(drawn) for _ in range(len(own))]
    return dure.Examples(together[:, :-1].contiguous(), together[:, 1:].contiguous(), keys=keys)


def copied(state: Mapping[str, Tensor]) -> nn.Module:
    """A model with the weights of the first language."""
    model = Transformer(SYMBOLS, CONTEXT, LAYERS, HEADS, WIDTH)
    model.load_state_dict(state)
    return model


def adamw(rate: float) -> Any:
    return partial(torch.optim.AdamW, lr=rate, weight_decay=0.0)


def tasks(asked: argparse.Namespace) -> dure.Task:
    """The task of the clients, whose model has learned the first language."""
    generator = torch.Generator().manual_seed(asked.seed)
    first, second = language(generator), language(generator)
    chains = [0.7 * second + 0.3 * language(generator) for _ in range(CLIENTS)]
    before = sequences(first, asked.examples * CLIENTS, generator)
    base = dure.Task(
        partial(Transformer, SYMBOLS, CONTEXT, LAYERS, HEADS, WIDTH),
        F.cross_entropy,
        train=(before[:, :-1].contiguous(), before[:, 1:].contiguous()),
        optimizer=adamw(3e-3),
        metrics={},
        name="first language",
    )
    learned = dure.train(
        base, dure.SingleWorker(batch_size=32), stop=dure.Stop(steps=asked.steps), seed=asked.seed
    )
    train = examples([sequences(chain, asked.examples, generator) for chain in chains])
    test = examples([sequences(chain, 32, generator) for chain in chains])
    state = learned.model.state_dict()
    return replace(
        base, model=partial(copied, state), train=train, test=test, name="second language"
    )


def at_their_ranks(model: nn.Module, adapter: dure.LoRA | None, rounds: int) -> int | None:
    """Bytes of the factors that clients and server would send without padding."""
    if adapter is None:
        return None
    sizes = [
        (0 if adapter.freeze_a else layer.in_features) + layer.out_features
        for _, layer in lora_layers(model)
    ]
    ranks = sum(map(adapter.rank_of, range(CLIENTS)))
    return 2 * 4 * rounds * ranks * sum(sizes)


def measured(asked: argparse.Namespace, task: dure.Task, name: str) -> dict[str, Any]:
    """One row: the run with the rate of the least test loss, and what the others came to."""
    adapter = ADAPTERS[name]
    strategy = dure.FedAvg(partition="natural-key", batch_size=16, local_epochs=1)
    trials: dict[float, dure.Run] = {}
    for rate in asked.rates:
        own = replace(task, adapter=adapter, optimizer=adamw(rate))
        try:
            trials[rate] = dure.train(
                own, strategy, stop=dure.Stop(rounds=asked.rounds), seed=asked.seed
            )
        except dure.errors.LossNotFiniteError as error:
            show(f"{name}, rate {rate:g}: {error}")
            continue
        found = trials[rate].summary
        show(f"{name}, rate {rate:g}: perplexity {math.exp(found['test_loss']):.2f}")
    rate = min(trials, key=lambda rate: float(trials[rate].summary["test_loss"]))
    run = trials[rate]
    points = run.history.evaluations
    trained = sum(one.numel() for one in run.model.parameters() if one.requires_grad)
    return {
        "system": name,
        "rate": rate,
        "trials": {f"{tried:g}": one.summary["test_loss"] for tried, one in trials.items()},
        "perplexity": math.exp(run.summary["test_loss"]),
        "trained": trained,
        "bytes": run.summary["bytes_sent"],
        "bytes_at_their_ranks": at_their_ranks(run.model, adapter, asked.rounds),
        "curve": {
            "bytes": [point.bytes_sent for point in points],
            "perplexity": [math.exp(point.metrics["test_loss"] or 0.0) for point in points],
        },
    }


def merge_seconds(width: int) -> dict[str, float]:
    """Least seconds of three merges of eight clients' factors, for each of the two ways."""
    generator = torch.Generator().manual_seed(0)

    def factors(rank: int) -> LowRank:
        b, a = torch.randn(2, width, rank, generator=generator, dtype=torch.float64)
        return LowRank(b, a.T)

    updates = [factors(RANKS[client % len(RANKS)]) for client in range(CLIENTS)]
    weights = [1.0] * CLIENTS
    ways: dict[str, Callable[[], SingularTriples]] = {
        "stack": lambda: svd_of_product(stacked(updates, weights)),
        "svd": lambda: svd_of_matrix(mean_matrix(updates, weights)),
    }
    found = {}
    for name, merge in ways.items():
        times = []
        for _ in range(3):
            began = time.perf_counter()
            merge()
            times.append(time.perf_counter() - began)
        found[name] = min(times)
    show(f"a merge of {width}x{width}: {found}")
    return found


def describe(rows: list[dict[str, Any]], page: Path) -> None:
    """The table of the page."""
    head = ["system", "best rate", "perplexity", "trained", "MB sent", "MB at their ranks"]
    cells = [
        [
            row["system"],
            f"{row['rate']:g}",
            f"{row['perplexity']:.2f}",
            f"{row['trained']:,}",
            f"{row['bytes'] / 1e6:,.1f}",
            ""
            if row["bytes_at_their_ranks"] is None
            else f"{row['bytes_at_their_ranks'] / 1e6:.1f}",
        ]
        for row in rows
    ]
    fill(page, {"adapters": table(head, cells)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--examples", type=int, default=128, help="sequences of a client")
    parser.add_argument("--steps", type=int, default=600, help="steps on the first language")
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-3, 1e-2, 3e-2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=2048, help="of the layer whose merge is timed")
    parser.add_argument("--quick", action="store_true", help="2 rounds, one rate, a small layer")
    parser.add_argument("--page", type=Path, default=None, help="the page whose table to fill")
    takes_result(parser)
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds, asked.examples, asked.steps, asked.rates = 2, 16, 20, [3e-3]
        asked.width = 64
    task = tasks(asked)
    rows = [measured(asked, task, name) for name in ADAPTERS]
    timed = merge_seconds(asked.width)
    setting = {
        "clients": CLIENTS,
        "ranks": RANKS,
        "rounds": asked.rounds,
        "width_of_the_timed_layer": asked.width,
        "merge_seconds": timed,
        "examples": asked.examples,
        "steps_before": asked.steps,
        "seed": asked.seed,
        "perplexity_before": rows[0]["curve"]["perplexity"][0],
    }
    give({"benchmark": "adapters", **setting, "rows": rows}, asked.result)
    if asked.page is not None:
        describe(rows, asked.page)


if __name__ == "__main__":
    main()
