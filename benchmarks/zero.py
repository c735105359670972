"""ZeRO of dure and what torch has: seconds of a step, and bytes that a rank holds.

Two ranks of one thread each train the same model on the same batches. One process trains on the
joint batch with one thread. In every round each contender has some steps after a barrier, and
another contender begins. The time is that of the slowest rank. Times are medians over the rounds;
ratios are medians of the rounds' ratios. All that exchange learn the same: the weights after some
steps are compared with those of one process.

    one thread                  one process, the joint batch
    no exchange                 the ranks train apart, undivided: only a system that divides the
                                optimizer's work can be faster
    ZeRO 1, ZeRO 2, ZeRO 3      dure's, over dure's shared memory
    ZeRO 3, gloo                the same over gloo
    FSDP2, gloo; FSDP2, dure    torch's fully_shard of every layer and the model, over both
    ZeRO-1, gloo; ZeRO-1, dure  torch's ZeroRedundancyOptimizer with its DistributedDataParallel,
                                over both

Memory is measured in worlds of their own: the bytes of the parameters, gradients and optimizer
state that a rank holds when backward has ended, compared with the formula; and by how much the
process grew at its peak (Linux: VmHWM).

    python benchmarks/zero.py --result benchmarks/results/zero.json

Progress and a table go to standard error, the result as JSON to standard output. docs/zero.md has
the figures.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from outcome import give, takes_result
from rounds import largest_difference, quartiles, seconds_per_step, turns
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext
from dure.machine.cores import available_cores
from dure.parallel.zero import ZeroRedundancy
from dure.parallel.zero.partition_layout import memory
from dure.record.meter import peak_memory, reset_peak_memory

JSON = dict[str, Any]


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# What is trained.


def mlp(width: int) -> nn.Module:
    """784-width-width-10; with 2,800 it has 10,068,810 parameters."""
    layers = [
        nn.Linear(784, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    ]
    return nn.Sequential(*layers)


class Transformer(nn.Module):
    """A language model of four layers; with width 256 it has 3,701,248 parameters."""

    def __init__(self, width: int, words: int = 1024, length: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden)
        result: Tensor = self.out(self.norm(hidden)).transpose(1, 2)
        return result


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 784, generator=generator), torch.randint(
        0, 10, (count,), generator=generator
    )


def texts(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1024, (count, 65), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], int]] = {
    "mlp": (partial(mlp, 2800), images, 64),
    "transformer": (partial(Transformer, 256), texts, 16),
}
"""The model, its data, and the joint batch."""

SMALL = {"mlp": (partial(mlp, 100), images, 8), "transformer": (partial(Transformer, 32), texts, 2)}
"""For a first try."""

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}


# Who competes.


class Plain:
    """A model that trains alone. parts: how many ranks share the joint batch."""

    def __init__(
        self, model: tuple[Any, Any, int], optimizer: Any, group: Any, parts: int = 1
    ) -> None:
        make, data, batch = model
        torch.manual_seed(0)
        inputs, targets = data(batch)
        self.inputs, self.targets = (
            each.chunk(parts)[dist.get_rank() % parts] for each in (inputs, targets)
        )
        self.divide(make(), optimizer, group)

    def divide(self, model: nn.Module, optimizer: Any, group: Any) -> None:
        self.model = model
        self.optimizer = optimizer(model.parameters())

    def backward(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.inputs), self.targets).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """All of them, on every rank."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def held(self) -> JSON:
        """Bytes of parameters, gradients and optimizer state on this rank."""
        state = tensors_of(self.optimizer.state.values())
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return {
            "parameters": nbytes(parameters),
            "gradients": nbytes(gradients),
            "optimizer": nbytes(state),
        }


class Ours(Plain):
    def __init__(self, stage: Any, *arguments: Any) -> None:
        self.stage = stage
        super().__init__(*arguments)

    def divide(self, model: nn.Module, optimizer: Any, group: Any) -> None:
        super().divide(model, optimizer, group)
        self.zero = ZeroRedundancy(self.model, self.optimizer, self.stage, group)

    def weights(self) -> dict[str, Tensor]:
        return self.zero.state_dict(everywhere=True)

    def held(self) -> JSON:
        per_element = (
            sum(t.numel() > 1 for t in next(iter(self.optimizer.state.values()), {}).values()) * 4
        )
        formula = memory(self.zero.blocks, self.stage, per_element)
        return {**self.zero.memory()._asdict(), "formula": formula._asdict()}


class Fsdp2(Plain):
    def divide(self, model: nn.Module, optimizer: Any, group: Any) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        warnings.filterwarnings(
            "ignore", ".*returned a view tensor"
        )  # which nothing changes in place here
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dist.get_backend(group),))
        for layer in model.modules():
            if isinstance(
                layer,
                (nn.Linear if isinstance(model, nn.Sequential) else nn.TransformerEncoderLayer),
            ):
                fully_shard(layer, mesh=mesh)
        super().divide(fully_shard(model, mesh=mesh), optimizer, group)

    def weights(self) -> dict[str, Tensor]:
        return {
            name: tensor.full_tensor().detach().clone()
            for name, tensor in self.model.state_dict().items()
        }


class TorchZero(Plain):
    def divide(self, model: nn.Module, optimizer: Any, group: Any) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.model = nn.parallel.DistributedDataParallel(model, process_group=group)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=optimizer.func,
            process_group=group,
            **optimizer.keywords,
        )

    def weights(self) -> dict[str, Tensor]:
        return {
            name: tensor.detach().clone() for name, tensor in self.model.module.state_dict().items()
        }

    def held(self) -> JSON:
        state = tensors_of(self.optimizer.optim.state.values())
        return {**super().held(), "optimizer": nbytes(state)}


def tensors_of(states: Iterable[dict[str, Any]]) -> list[Tensor]:
    """The tensors that an optimizer keeps for its parameters."""
    values = chain.from_iterable(state.values() for state in states)
    return [value for value in values if isinstance(value, Tensor)]


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind these tensors, each piece once; of what is distributed, the part
    that is here."""
    own = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own}.values())


class Contender(NamedTuple):
    """What makes it; the backend of its group; whether rank 0 trains on the joint batch, and the
    others wait."""

    make: Callable[..., Plain]
    backend: str | None = None
    alone: bool = False


ONE = "one thread"
APART = "no exchange"
CONTENDERS = {
    ONE: Contender(Plain, alone=True),
    APART: Contender(Plain),
    "ZeRO 1": Contender(partial(Ours, 1), "dure"),
    "ZeRO 2": Contender(partial(Ours, 2), "dure"),
    "ZeRO 3": Contender(partial(Ours, 3), "dure"),
    "ZeRO 3, gloo": Contender(partial(Ours, 3), "gloo"),
    "FSDP2, gloo": Contender(Fsdp2, "gloo"),
    "FSDP2, dure": Contender(Fsdp2, "dure"),
    "ZeRO-1, gloo": Contender(TorchZero, "gloo"),
    "ZeRO-1, dure": Contender(TorchZero, "dure"),
}

TOLERANCE = 1e-4
"""How far weights may be from one process's after three steps, each of which moves them by some
1e-3 or more."""


# How long a step takes.


def contest(
    names: list[str], model: Any, optimizer: Any, rounds: int, steps: int, context: RankContext
) -> JSON:
    """What every rank does: seconds of a step, a number a round, for each contender."""
    torch.set_num_threads(1)
    groups = {backend: dist.new_group(backend=backend) for backend in ("gloo", "dure")}
    contenders = {}
    for name in names:
        make, backend, alone = CONTENDERS[name]
        contenders[name] = make(model, optimizer, groups.get(backend), 1 if alone else 2)
    for contender in contenders.values():
        for _ in range(3):
            contender.step()
    expected = contenders[ONE].weights()
    differences = {
        name: largest_difference(contender.weights(), expected)
        for name, contender in contenders.items()
    }
    wrong = {
        name: value
        for name, value in differences.items()
        if not (value < TOLERANCE or name == APART)
    }
    assert not wrong, f"these end with other weights than one process: {wrong}"
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in turns(names, number):
            trains = not CONTENDERS[name].alone or dist.get_rank() == 0
            samples[name].append(
                seconds_per_step(contenders[name].step, steps, groups["gloo"], trains)
            )
    return {
        name: {**quartiles(samples[name]), "largest_difference": differences[name]}
        for name in names
    }


# What a rank holds.


def weigh(name: str, model: Any, optimizer: Any, context: RankContext) -> JSON:
    """What every rank does: a few steps of one contender. Returns rank 0's bytes."""
    torch.set_num_threads(1)
    make, backend, alone = CONTENDERS[name]
    group = dist.new_group(backend=backend or "gloo")
    warm = nn.Linear(8, 8)
    warm(torch.ones(2, 8)).sum().backward()
    gc.collect()
    reset_peak_memory()
    before = peak_memory()
    contender = make(model, optimizer, group, 1 if alone else 2)
    for _ in range(3):
        contender.step()
    contender.backward()
    held = contender.held()
    return {**held, "process_grew_by": peak_memory() - before}


# What comes of it.


def ratios(rows: JSON) -> JSON:
    """What the requirements speak of, as medians of the rounds' ratios."""

    def ratio(one: str, other: str) -> float:
        pairs = zip(rows[one]["samples"], rows[other]["samples"], strict=True)
        return statistics.median(a / b for a, b in pairs)

    ours = [name for name in rows if name in ("ZeRO 1", "ZeRO 2", "ZeRO 3")]
    compared = {f"{ONE} over {name}": ratio(ONE, name) for name in ours}
    peers = [("FSDP2, gloo", "ZeRO 3"), ("FSDP2, dure", "ZeRO 3"), ("FSDP2, gloo", "ZeRO 3, gloo")]
    limits = [("ZeRO 3", APART), ("FSDP2, gloo", APART)]
    for one, other in (*peers, ("ZeRO-1, gloo", "ZeRO 1"), ("ZeRO-1, dure", "ZeRO 1"), *limits):
        if one in rows and other in rows:
            compared[f"{one} over {other}"] = ratio(one, other)
    return compared


def table(title: str, rows: JSON, compared: JSON) -> None:
    for name, row in rows.items():
        kinds = [
            kind
            for kind in ("parameters", "gradients", "optimizer", "buffers")
            if kind in row["memory"]
        ]
        held = "  ".join(f"{kind} {row['memory'][kind] / 1e6:.1f}" for kind in kinds)
        grew = f"the process grew by {row['memory']['process_grew_by'] / 1e6:.0f} MB"
        show(f"{title:<18} {name:<14} {1e3 * row['median']:7.1f} ms  MB: {held}; {grew}")
    for what, value in compared.items():
        show(f"{title:<18} {what:<30} {value:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS)
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS)
    )
    parser.add_argument("--rounds", type=int, default=9, help="of all contenders; at least 2")
    parser.add_argument("--steps", type=int, default=8, help="of a contender in a round")
    parser.add_argument("--small", action="store_true", help="tiny models, for a first try")
    takes_result(parser)
    asked = parser.parse_args()
    names = list(dict.fromkeys([ONE, *asked.contenders]))
    world = dure.Processes(2, backend="gloo")
    rows = []
    for name in asked.models:
        model = (SMALL if asked.small else MODELS)[name]
        parameters = sum(parameter.numel() for parameter in model[0]().parameters())
        for kind in asked.optimizers:
            program = partial(contest, names, model, OPTIMIZERS[kind], asked.rounds, asked.steps)
            measured = world.run(program, lambda event: None)
            for contender, row in measured.items():
                row["memory"] = world.run(
                    partial(weigh, contender, model, OPTIMIZERS[kind]), lambda event: None
                )
            compared = ratios(measured)
            table(f"{name}, {kind}", measured, compared)
            about = {"model": name, "optimizer": kind, "parameters": parameters}
            rows.append({**about, "contenders": measured, "compared": compared})
    head = {
        "benchmark": "zero",
        "ranks": 2,
        "cores": available_cores(),
        "rounds": asked.rounds,
        "steps": asked.steps,
    }
    give({**head, "torch": torch.__version__, "rows": rows}, asked.result)


if __name__ == "__main__":
    main()
