"""What data parallelism costs and gains: dure, torch, one process, and no exchange.

Two ranks of one thread each train the same model on the same batches with dure's and with torch's
DistributedDataParallel. One process trains on the joint batch with one thread and with two. In
every round each contender has some steps after a barrier, and another contender begins. The time is
that of the slowest rank. Times are medians over the rounds; ratios are medians of the rounds'
ratios.

    one thread, two threads     one process, the joint batch
    torch, gloo                 torch's DistributedDataParallel over gloo, its default buckets
    torch, dure                 the same over dure's shared memory
    dure                        dure's DistributedDataParallel over dure's shared memory
    dure, unhidden              the same, with all-reduces when backward is done
    no exchange                 the ranks train apart: nothing can be faster

With --link the two ranks live on two hosts: network namespaces that are joined by a cable of that
rate (this needs root and iproute2). The share that is hidden is (unhidden - contender) / (unhidden
- no exchange): the share of the cost of an unhidden exchange that is saved. The table also has what
dure's own meter says.

    torch, 25 MB; torch, 1 MB   over gloo; bucket_cap_mb, the default and a better one
    dure                        over dure's backend, buckets of 1 MB
    dure, ring                  the ring of dure.collectives in place of the backend's all-reduce
    dure, ZeRO 2                gradients are scattered during backward, parameters are gathered
                                during the next forward

    python benchmarks/data_parallel.py --result benchmarks/results/data_parallel.json
    python benchmarks/data_parallel.py --link 1gbit \\
        --result benchmarks/results/data_parallel_link.json
    python benchmarks/data_parallel.py --link 1gbit --batch 32 \\
        --result benchmarks/results/data_parallel_link_32.json

Progress and a table go to standard error, the result as JSON to standard output.
docs/data-parallel.md has the figures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from outcome import give, takes_result
from rounds import quartiles, turns
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext
from dure.machine.cores import available_cores
from dure.parallel import DistributedDataParallel, ZeroRedundancy
from dure.tasks.models import Transformer

JSON = dict[str, Any]


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# What is trained.


def mlp(width: int) -> nn.Module:
    """784-width-width-10; with 2,800 it has 10,067,410 parameters."""
    layers = [
        nn.Linear(784, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    ]
    return nn.Sequential(*layers)


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 784, generator=generator), torch.randint(
        0, 10, (count,), generator=generator
    )


def texts(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    characters = torch.randint(0, 65, (count, 65), generator=generator)
    return characters[:, :-1], characters[:, 1:]


def transformer(width: int) -> nn.Module:
    """Four layers over 64 of 65 characters; with width 280 it has 3,832,640 parameters: 15.3 MB."""
    return Transformer(65, context=64, layers=4, heads=4, width=width)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], int]] = {
    "mlp": (partial(mlp, 2800), images, 112),
    "transformer": (partial(transformer, 280), texts, 16),
}
"""The model, its data, and the joint batch."""

SMALL = {"mlp": (partial(mlp, 100), images, 8), "transformer": (partial(transformer, 32), texts, 2)}
"""For a first try."""


class Training:
    """A model in training, on one rank. parts: how many ranks share the joint batch. zero: a group
    that divides it."""

    def __init__(
        self,
        model: tuple[Any, Any, int],
        wrap: Callable[[nn.Module], nn.Module],
        parts: int,
        zero: Any,
    ) -> None:
        make, data, batch = model
        torch.manual_seed(0)
        self.model = wrap(make())
        inputs, targets = data(batch)
        self.inputs, self.targets = (
            each.chunk(parts)[dist.get_rank() % parts] for each in (inputs, targets)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.zero = (
            None
            if zero is None
            else ZeroRedundancy(self.model, self.optimizer, 2, zero, overlap_gather=True)
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.inputs), self.targets).backward()
        self.optimizer.step()

    def settle(self) -> None:
        """Waits for what is still on its way."""
        if self.zero is not None:
            self.zero.settle()


# Who competes.


def torch_ddp(group: Any, megabytes: float | None = None) -> Callable[[nn.Module], nn.Module]:
    return partial(
        nn.parallel.DistributedDataParallel, process_group=group, bucket_cap_mb=megabytes
    )


def dure_ddp(group: Any, **options: Any) -> Callable[[nn.Module], nn.Module]:
    return partial(DistributedDataParallel, process_group=group, **options)


class Contender:
    """One way to train. alone: rank 0 has the joint batch, with so many threads, and the others
    wait."""

    def __init__(
        self,
        model: Any,
        wrap: Callable[[nn.Module], nn.Module] = lambda m: m,
        alone: int = 0,
        zero: Any = None,
    ) -> None:
        self.alone = alone
        self.training = Training(model, wrap, 1 if alone else dist.get_world_size(), zero)

    def seconds_per_step(self, steps: int, group: Any) -> float:
        """Of the slowest rank. group: one whose ranks sleep while they wait."""
        takes_part = not self.alone or dist.get_rank() == 0
        before = torch.get_num_threads()
        torch.set_num_threads(self.alone or before)
        if takes_part:
            self.training.step()  # what others have pushed out of the caches comes back
            self.training.settle()
        dist.barrier(group)
        started = time.perf_counter()
        for _ in range(steps if takes_part else 0):
            self.training.step()
        self.training.settle()
        seconds = torch.tensor((time.perf_counter() - started) / steps, dtype=torch.float64)
        torch.set_num_threads(before)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
        return seconds.item()


def on_one_machine(model: Any, gloo: Any, shared: Any) -> dict[str, Contender]:
    return {
        "one thread": Contender(model, alone=1),
        "two threads": Contender(model, alone=2),
        "torch, gloo": Contender(model, torch_ddp(gloo)),
        "torch, dure": Contender(model, torch_ddp(shared)),
        "dure": Contender(model, dure_ddp(shared)),
        "dure, unhidden": Contender(model, dure_ddp(shared, overlap="after")),
        "no exchange": Contender(model),
    }


def over_a_link(model: Any, gloo: Any, shared: Any) -> dict[str, Contender]:
    return {
        "torch, 25 MB": Contender(model, torch_ddp(gloo)),
        "torch, 1 MB": Contender(model, torch_ddp(gloo, 1)),
        "dure": Contender(model, dure_ddp(shared)),
        "dure, ring": Contender(model, dure_ddp(shared, all_reduce="ring")),
        "dure, ZeRO 2": Contender(model, zero=shared),
        "dure, unhidden": Contender(model, dure_ddp(shared, overlap="after")),
        "no exchange": Contender(model),
    }


def contest(
    makers: Callable[[Any, Any, Any], dict[str, Contender]],
    model: Any,
    rounds: int,
    steps: int,
    gloo: Any,
    shared: Any,
) -> JSON:
    """Seconds of a step, a number a round, for each contender; and what dure's meter says is
    hidden."""
    contenders = makers(model, gloo, shared)
    for contender in contenders.values():
        contender.seconds_per_step(12, gloo)  # learns the order of gradients, and sizes of buckets
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        for name in turns(names, number):
            samples[name].append(contenders[name].seconds_per_step(steps, gloo))
    rows: JSON = {name: quartiles(values) for name, values in samples.items()}
    for name, contender in contenders.items():
        wrapped = contender.training.model
        if isinstance(wrapped, DistributedDataParallel):
            rows[name]["metered_hidden_share"] = wrapped.hidden_share
            rows[name]["way"] = wrapped.reducer.way
            rows[name]["elements_of_messages"] = wrapped.reducer.lengths()
    return rows


# Where.


def locally(models: Any, rounds: int, steps: int, context: RankContext) -> JSON:
    torch.set_num_threads(1)
    gloo = dist.new_group(backend="gloo")
    shared = dist.new_group(backend="dure")
    return {
        name: contest(on_one_machine, model, rounds, steps, gloo, shared)
        for name, model in models.items()
    }


def apart(
    models: Any,
    rounds: int,
    steps: int,
    hosts: Any,
    addresses: Any,
    cable: str,
    context: RankContext,
) -> JSON:
    """As `locally`, each rank on a host of its own."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    size = dist.get_world_size()
    told: list[Any] = [None]
    patience = timedelta(seconds=60)
    if rank == 0:
        hosts.enter(0)
        store = dist.TCPStore(addresses[0], 0, size, True, timeout=patience, wait_for_workers=False)
        told = [store.port]
    dist.broadcast_object_list(told, 0)
    if rank != 0:
        hosts.enter(1)
        store = dist.TCPStore(addresses[0], told[0], size, False, timeout=patience)
    dist.destroy_process_group()
    dist.init_process_group("dure", store=store, rank=rank, world_size=size, timeout=patience)
    os.environ["GLOO_SOCKET_IFNAME"] = cable
    gloo = dist.new_group(backend="gloo")
    result = {
        name: contest(over_a_link, model, rounds, steps, gloo, dist.group.WORLD)
        for name, model in models.items()
    }
    dist.destroy_process_group()
    return result


def two_hosts(rate: str) -> tuple[AbstractContextManager[Any], Any, str]:
    """The emulated hosts of the tests, their addresses, and the name of the cable."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import two_hosts as emulation

    cloudpickle.register_pickle_by_value(emulation)
    return emulation.two_hosts(rate), emulation.ADDRESSES, emulation.CABLE


# What comes of it.


def ratios(rows: JSON, rate: str | None) -> JSON:
    """What the requirements speak of, as medians of the rounds' ratios."""

    def ratio(one: str, other: str) -> float:
        pairs = zip(rows[one]["samples"], rows[other]["samples"], strict=True)
        return statistics.median(a / b for a, b in pairs)

    if rate is None:
        return {
            "torch_gloo_over_dure": ratio("torch, gloo", "dure"),
            "dure_over_no_exchange": ratio("dure", "no exchange"),
            "one_thread_over_dure": ratio("one thread", "dure"),
            "torch_dure_over_no_exchange": ratio("torch, dure", "no exchange"),
        }

    def hidden(name: str) -> float:
        rounds = zip(
            *(rows[which]["samples"] for which in ("dure, unhidden", name, "no exchange")),
            strict=True,
        )
        return statistics.median(
            (unhidden - own) / (unhidden - none) for unhidden, own, none in rounds
        )

    return {name: hidden(name) for name in rows if name not in ("dure, unhidden", "no exchange")}


def table(name: str, rows: JSON, compared: JSON) -> None:
    for contender, row in rows.items():
        metered = row.get("metered_hidden_share")
        more = "" if metered is None else f"  {row['way']}, meter: {metered:4.0%} hidden"
        show(f"{name:<12} {contender:<16} {1e3 * row['median']:7.1f} ms{more}")
    for what, value in compared.items():
        show(f"{name:<12} {what.replace('_', ' '):<28} {value:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15, help="of all contenders; at least 2")
    parser.add_argument("--steps", type=int, default=8, help="of a contender in a round")
    parser.add_argument(
        "--link", metavar="RATE", help="two hosts and a cable of this rate, as 1gbit"
    )
    parser.add_argument(
        "--batch",
        type=int,
        help="the joint batch; by default 112 of the MLP, 16 of the transformer",
    )
    parser.add_argument("--small", action="store_true", help="tiny models, for a first try")
    takes_result(parser)
    asked = parser.parse_args()
    known = SMALL if asked.small else MODELS
    names = asked.models or (["transformer"] if asked.link else list(MODELS))
    models = {name: (*known[name][:2], asked.batch or known[name][2]) for name in names}
    world = dure.Processes(2, backend="gloo")
    about: JSON = {
        "benchmark": "data_parallel",
        "ranks": 2,
        "cores": available_cores(),
        "rounds": asked.rounds,
    }
    about |= {
        "steps": asked.steps,
        "torch": torch.__version__,
        "link": asked.link,
        "batch": asked.batch,
    }
    hosts, addresses, cable = (
        (nullcontext(), None, "") if asked.link is None else two_hosts(asked.link)
    )
    try:
        with hosts as pair:
            if asked.link is None:
                result = world.run(
                    partial(locally, models, asked.rounds, asked.steps), lambda event: None
                )
            else:
                program = partial(apart, models, asked.rounds, asked.steps, pair, addresses, cable)
                result = world.run(program, lambda event: None)
    except RuntimeError as error:
        if asked.link is None or isinstance(error, dure.errors.DureError):
            raise
        show(f"skipped: {error}")
        give({**about, "skipped": str(error)}, asked.result)
        return
    rows = []
    for name, measured in result.items():
        compared = ratios(measured, asked.link)
        table(name, measured, compared)
        parameters = sum(parameter.numel() for parameter in models[name][0]().parameters())
        rows.append(
            {"model": name, "parameters": parameters, "contenders": measured, "compared": compared}
        )
    give({**about, "rows": rows}, asked.result)


if __name__ == "__main__":
    main()
