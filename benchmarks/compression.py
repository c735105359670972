"""Compression measured: the cost of encoding and decoding, bytes, errors of sums, and of training.

There are three tables. All contenders of a table are measured in one run, with one thread a rank:

    codecs      encode and decode the gradient of an MLP on the built-in digits; GB/s are its
                float32 numbers over the thread's CPU time
    sums        that gradient, of another batch on each rank, all-reduced by every compression and
                by torch's own hooks (fp16_compress, bf16_compress, PowerSGD of rank 2) on the same
                groups: gloo, and backend dure
    training    a small MLP on the digits, each batch divided over the ranks: loss, accuracy and
                bytes at the end

Rounds are interleaved: in each round every contender has one call after a barrier. Its time is that
of the slowest rank, and the median over the rounds counts. dure's bytes are those of the meter,
which are checked against the formula. torch's bytes cannot be seen: they are 2(N-1)/N of its
messages, which are half of the numbers' bytes, or the factors that dure's PowerSGD of rank 2 sends
too. `off` is ‖sum - exact‖ / ‖exact‖ of the first call that compresses. `off_on_average` is that of
the mean of 20 calls from there on with the same gradients, which shows what error feedback and
random rounding do.

    python benchmarks/compression.py --result benchmarks/results/compression.json

Progress and tables go to standard error, the result as JSON to standard output. --tables RESULT
prints the tables of an earlier result, which docs/compression.md has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from outcome import give, takes_result
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import dure
from dure.collectives import Group
from dure.collectives.compression import NoCompression, PowerSGD, parse
from dure.collectives.compression.bucket import CompressionBucket, one_piece
from dure.contracts.fresh_model import seeded_model
from dure.contracts.world import RankContext
from dure.machine.cores import available_cores
from dure.randomness.seeds import shuffled
from dure.tasks.models import TwoNN
from dure.tensors.flat import views_of

BATCH = 64
CALLS = 20
TEXTS = [
    "none",
    "cast:bfloat16",
    "cast:float16",
    "top-k:0.01",
    "top-k:0.001",
    "qsgd:1",
    "qsgd:7",
    "qsgd:127",
]
TEXTS += ["one-bit", "sign", "power-sgd:1", "power-sgd:2", "power-sgd:4"]

JSON = dict[str, Any]
Sum = Callable[[list[Tensor]], None]


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def task_of(width: int) -> dure.Task:
    return dataclasses.replace(
        dure.load_task("digits"), model=partial(TwoNN, features=64, width=width)
    )


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def gradient(width: int, rank: int) -> list[Tensor]:
    """The gradient of the rank's batch, as views of one flat buffer, as DDP has them."""
    task = task_of(width)
    model = seeded_model(task, 0)
    mine = shuffled(len(task.train), 0, 0)[rank * BATCH : (rank + 1) * BATCH]
    task.loss(model(task.train.inputs[mine]), task.train.targets[mine]).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = joined([each for each in gradients if each is not None])
    return views_of(flat, list(model.parameters()))


def seconds(call: Callable[[], object], repeats: int) -> float:
    """CPU seconds of this thread, the median of several calls after one that is not timed."""
    call()
    samples = []
    for _ in range(repeats):
        started = time.thread_time()
        call()
        samples.append(time.thread_time() - started)
    return statistics.median(samples)


def codecs(width: int, repeats: int) -> list[JSON]:
    """Encoding and decoding in this process, on one thread; for PowerSGD, which has no codec, a
    call of one rank."""
    torch.set_num_threads(1)
    like = gradient(width, 0)
    vector = joined(like)
    rows = []
    for text in TEXTS:
        compression = parse(text)
        row: JSON = {"compression": text, "numbers": vector.numel()}
        if not isinstance(compression, PowerSGD):
            codec = compression.codec(CompressionBucket(like))
            payload = torch.empty(codec.nbytes, dtype=torch.uint8)
            into = torch.zeros_like(vector)
            encode = seconds(partial(codec.encode, vector, payload, 0, (0,)), repeats)
            decode = seconds(partial(codec.add, payload, into, 1), repeats)
            row |= {"bytes": codec.nbytes, "encode_gb_s": 4e-9 * len(vector) / encode}
            row |= {"decode_gb_s": 4e-9 * len(vector) / decode}
        compressor = compression.compressor(like, 0)
        tensors = views_of(vector.clone(), like)
        row["call_gb_s"] = (
            4e-9 * len(vector) / seconds(partial(compressor.all_reduce, tensors, Group()), repeats)
        )
        rows.append(row)
        show(
            "  ".join(
                f"{key} {value:.2f}" if isinstance(value, float) else str(value)
                for key, value in row.items()
            )
        )
    return rows


class TorchBucket:
    """What torch's hooks ask of a bucket of DDP, whose class cannot be made from outside."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def buffer(self) -> Tensor:
        whole = one_piece(self.tensors)
        assert whole is not None
        return whole

    def gradients(self) -> list[Tensor]:
        return self.tensors

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def torch_hooks(group: dist.ProcessGroup) -> dict[str, Callable[[TorchBucket], Any]]:
    settings = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 2}
    state = powerSGD_hook.PowerSGDState(group, **settings)
    return {
        "torch fp16_compress": partial(default_hooks.fp16_compress_hook, group),
        "torch bf16_compress": partial(default_hooks.bf16_compress_hook, group),
        "torch powerSGD rank 2": partial(powerSGD_hook.powerSGD_hook, state),
    }


def by_torch(hook: Callable[[Any], Any], tensors: list[Tensor]) -> None:
    """A hook of torch, which leaves the mean in the tensors."""
    whole = hook(TorchBucket(tensors)).wait()
    if whole.data_ptr() != tensors[0].data_ptr():
        for tensor, piece in zip(tensors, views_of(whole, tensors), strict=True):
            tensor.copy_(piece)


def torch_bytes(name: str, like: list[Tensor], size: int) -> int:
    """2(N-1)/N of the messages."""
    if "powerSGD" in name:
        return PowerSGD(2).bytes_sent(like, size, 0, "native")
    return NoCompression().bytes_sent(like, size, 0, "native") // 2


def slowest(value: float) -> float:
    """The largest of all ranks' values, on every rank."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def contenders(
    like: list[Tensor], backend: str, group: dist.ProcessGroup
) -> dict[str, tuple[Sum, Group | None]]:
    """Who sums tensors in place, and the group whose meter counts it; torch's hooks have none, and
    leave the mean."""
    found: dict[str, tuple[Sum, Group | None]] = {}
    for text in TEXTS:
        counted = Group(group)
        compressor = parse(text).compressor(like, 0)
        found[f"{backend}: {text}"] = (
            partial(compressor.all_reduce, group=counted, algorithm="native"),
            counted,
        )
    for name, hook in torch_hooks(group).items():
        found[f"{backend}: {name}"] = partial(by_torch, hook), None
    return found


def sums(width: int, rounds: int, context: RankContext) -> list[JSON]:
    """What every rank does. The world is of gloo, and so are its barriers."""
    torch.set_num_threads(1)
    size = context.group.size
    mine = gradient(width, context.group.rank)
    exact = joined(mine).double()
    dist.all_reduce(exact)
    everybody = {}
    for backend in ("gloo", "dure"):
        everybody |= contenders(mine, backend, dist.new_group(backend=backend))
    rows: dict[str, JSON] = {}
    flat = torch.empty_like(joined(mine))
    tensors = views_of(flat, mine)
    for name, (call, group) in everybody.items():
        arrived = torch.zeros_like(exact)
        begins = 2 if "powerSGD" in name else 0  # torch's first two calls compress nothing
        for number in range(begins + CALLS):
            flat.copy_(joined(mine))
            call(tensors)
            if group is None:
                flat.mul_(size)
            if number == begins:
                off = float((flat - exact).norm() / exact.norm())
            if number >= begins:
                arrived += flat
        sent = torch_bytes(name, mine, size)
        if group is not None:
            counters = group.meter.counters
            compression = parse(name.partition(": ")[2])
            sent = compression.bytes_sent(mine, size, context.group.rank, "native")
            assert counters.bytes_sent == CALLS * sent, name
        average = float((arrived / CALLS - exact).norm() / exact.norm())
        rows[name] = {
            "contender": name,
            "bytes": sent,
            "off": off,
            "off_on_average": average,
            "samples": [],
        }
    for number in range(rounds):
        for name, (call, _) in list(everybody.items())[:: 1 if number % 2 else -1]:
            flat.copy_(joined(mine))
            dist.barrier()
            started = time.perf_counter()
            call(tensors)
            rows[name]["samples"].append(slowest(time.perf_counter() - started))
    for row in rows.values():
        row["seconds"] = statistics.median(row["samples"])
        if context.group.rank == 0:
            context.report({"unit": "row", "step": 0, **row})
    return list(rows.values())


def training(epochs: int, context: RankContext) -> list[JSON]:
    """A small MLP trained through every compression: the gradient of the joint batch, from the
    ranks' parts."""
    torch.set_num_threads(1)
    task = task_of(200)
    rows = []
    assert task.test is not None
    for text in TEXTS:
        model = seeded_model(task, 0).train()
        group = Group(dist.group.WORLD)
        parameters = list(model.parameters())
        optimizer = task.optimizer(parameters)
        compressor = parse(text).compressor(parameters, 0)
        for epoch in range(epochs):
            for batch in shuffled(len(task.train), 0, epoch).split(BATCH):
                mine = batch.tensor_split(group.size)[group.rank]
                optimizer.zero_grad()
                loss = task.loss(model(task.train.inputs[mine]), task.train.targets[mine])
                (loss * (len(mine) / len(batch))).backward()
                compressor.all_reduce(
                    [parameter.grad for parameter in parameters if parameter.grad is not None],
                    group,
                )
                optimizer.step()
        with torch.no_grad():
            scores = model.eval()(task.test.inputs)
            targets = task.test.targets
            trained = float(task.loss(model(task.train.inputs), task.train.targets))
        row: JSON = {
            "compression": text,
            "train_loss": trained,
            "test_loss": float(task.loss(scores, targets)),
        }
        row |= {"test_accuracy": float((scores.argmax(1) == targets).float().mean())}
        row |= {"bytes": group.meter.counters.bytes_sent}
        rows.append(row)
        if context.group.rank == 0:
            context.report({"unit": "row", "step": 0, **row})
    return rows


def line(row: JSON) -> str:
    if "contender" in row:
        about = f"{row['seconds'] * 1e3:8.2f} ms {row['bytes']:>12,} B  off {row['off']:.1e}"
        return f"{row['contender']:<28} {about}, on average {row['off_on_average']:.1e}"
    about = (
        f"loss {row['train_loss']:.4f}, of the test {row['test_loss']:.4f}, "
        f"accuracy {row['test_accuracy']:.4f}"
    )
    return f"{row['compression']:<14} {about}  {row['bytes']:>12,} B"


def speed(gb_s: float) -> str:
    return f"{gb_s:.1f} GB/s" if gb_s < 50 else "over 50 GB/s"


def tables(result: JSON) -> str:
    """The page's tables, in Markdown."""
    text = [
        "| compression | bytes | smaller | encode | decode |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["codecs"]:
        if "bytes" in row:
            smaller = f"{4 * row['numbers'] / row['bytes']:.1f}x"
            speeds = " | ".join(speed(row[way]) for way in ("encode_gb_s", "decode_gb_s"))
            text.append(f"| `{row['compression']}` | {row['bytes']:,} | {smaller} | {speeds} |")
    text += ["", "| sum by | bytes a rank sends | over gloo | over dure | off | on average |"]
    text += ["| --- | --- | --- | --- | --- | --- |"]
    rows = {row["contender"]: row for row in result["sums"]}
    for contender, row in rows.items():
        backend, _, name = contender.partition(": ")
        if backend == "gloo":
            times = " | ".join(
                f"{rows[f'{each}: {name}']['seconds'] * 1e3:.0f} ms" for each in ("gloo", "dure")
            )
            shown = name if name.startswith("torch") else f"`{name}`"
            text.append(
                f"| {shown} | {row['bytes']:,} | {times} | {row['off']:.1e} | "
                f"{row['off_on_average']:.1e} |"
            )
    text += [
        "",
        "| compression | training loss | test accuracy | bytes a rank sends |",
        "| --- | --- | --- | --- |",
    ]
    for row in result["training"]:
        about = f"{row['train_loss']:.4f} | {100 * row['test_accuracy']:.1f} % | {row['bytes']:,}"
        text.append(f"| `{row['compression']}` | {about} |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--width",
        type=int,
        default=3100,
        help="of the MLP's two hidden layers; 3100: 9.8 M numbers",
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument(
        "--tables", type=Path, help="print the tables of this result and measure nothing"
    )
    takes_result(parser)
    asked = parser.parse_args()
    if asked.tables is not None:
        print(tables(json.loads(asked.tables.read_text())))
        return
    result: JSON = {
        "benchmark": "compression",
        "task": "digits",
        "batch": BATCH,
        "threads_per_rank": 1,
    }
    result |= {
        "ranks": asked.ranks,
        "cores": available_cores(),
        "rounds": asked.rounds,
        "torch": torch.__version__,
    }
    show("encode and decode, one thread")
    result["codecs"] = codecs(asked.width, asked.rounds)
    world = dure.Processes(asked.ranks, backend="gloo")
    show(f"sums over {asked.ranks} ranks")
    result["sums"] = world.run(
        partial(sums, asked.width, asked.rounds), lambda event: show(line(event))
    )
    show(f"training on {asked.ranks} ranks, {asked.epochs} epochs")
    result["training"] = world.run(partial(training, asked.epochs), lambda event: show(line(event)))
    give(result, asked.result)


if __name__ == "__main__":
    main()
