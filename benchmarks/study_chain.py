"""A chain of linear layers divided by columns, by rows and alternately: what travels, how long.

Two chains of linear layers with GELUs between them: all as wide, and an MLP whose layers are wide
and narrow in turn. Ranks of one thread each make training steps on the same batch.
In every round each plan has some steps after a barrier, and another one begins. The time is that of
the slowest rank, in medians over the rounds; ratios are medians of the rounds' ratios.

    one thread    one process, undivided; the others wait
    columns       every layer by columns (as Y = W·X: row-wise)
    rows          every layer by rows (as Y = W·X: column-wise)
    alternating   by columns and by rows in turn

Collectives and bytes of one step are counted where they are sent, and compared with the formulas of
`dure.parallel.tensor.chain_plans`; a plan that sends something else ends the benchmark, and so does
one that learns other weights than one thread. By default in float32; with --exact in float64, to
1e-12.

    python benchmarks/study_chain.py --page docs/study-chain.md \\
        --result benchmarks/results/study_chain.json

Progress and tables go to standard error, the result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from outcome import give, takes_result
from pages import fill, table
from rounds import largest_difference, median_ratio, quartiles, seconds_per_step, turns
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.machine.cores import available_cores
from dure.parallel.tensor import parallelize, whole_state_dict
from dure.parallel.tensor.chain_plans import MAKERS, chain_plan

JSON = dict[str, Any]
ALONE = "one thread"
PLANS = tuple(MAKERS)
CHECKED = 5
"""Steps after which weights are compared."""


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Setting(NamedTuple):
    """widths: of the features before, between and after the layers. rows: examples of a batch."""

    widths: tuple[int, ...]
    rows: int


SETTINGS = {
    "all as wide": Setting((768,) * 7, 1024),
    "wide and narrow in turn": Setting((384, 1536, 384, 1536, 384, 1536, 384), 1024),
}
SMALL = {
    "all as wide": Setting((24,) * 4, 8),
    "wide and narrow in turn": Setting((12, 48, 12, 48, 12), 8),
}


def chain(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Contender:
    """A chain that trains, undivided or by a plan."""

    def __init__(self, name: str, setting: Setting, dtype: torch.dtype, group: Group) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(setting.rows, setting.widths[0], dtype=dtype)
        self.targets = torch.randn(setting.rows, setting.widths[-1], dtype=dtype)
        self.model = chain(setting.widths).to(dtype)
        self.alone = name == ALONE
        if not self.alone:
            parallelize(self.model, chain_plan(name, self.model), group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self) -> Tensor:
        self.optimizer.zero_grad()
        return F.mse_loss(self.model(self.inputs), self.targets)

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """All of them, on every rank."""
        model = self.model
        whole = model.state_dict() if self.alone else whole_state_dict(model)
        return {name: tensor.detach().clone() for name, tensor in whole.items()}


class Travels(NamedTuple):
    """What a rank sends on one way: collectives by name, and bytes."""

    collectives: dict[str, int]
    nbytes: int


def counted(contender: Contender, group: Group) -> tuple[Travels, Travels]:
    """Forward and backward of one step."""
    found = []
    names: Counter[str] = Counter()
    meter = group.meter
    noted = meter.inside

    def note(name: str, start: float, end: float) -> None:
        names[name] += 1
        noted(name, start, end)

    meter.inside = note  # type: ignore[method-assign]
    loss = contender.loss  # not yet called
    done: list[Tensor] = []
    for way in (lambda: done.append(loss()), lambda: done[0].backward()):
        names.clear()
        before = meter.counters.bytes_sent
        way()
        found.append(Travels(dict(names), meter.counters.bytes_sent - before))
    meter.inside = noted  # type: ignore[method-assign]
    return found[0], found[1]


def formula(plan: str, setting: Setting, degree: int, width: int) -> tuple[int, int]:
    """Bytes of a rank, forward and backward, of numbers of `width` bytes."""
    *inner, last = [setting.rows * features * width for features in setting.widths[1:]]
    if plan == "alternating":
        even = len(inner) % 2 == 1
        sums = sum([*inner, last][1::2])
        forward = 2 * sums + (0 if even else last)
        backward = 2 * sum(inner[1::2])
    else:
        forward = sum(inner) + (2 if plan == "rows" else 1) * last
        backward = sum(inner)
    return forward * (degree - 1) // degree, backward * (degree - 1) // degree


def contest(setting: Setting, asked: argparse.Namespace, context: RankContext) -> JSON:
    """What every rank does."""
    torch.set_num_threads(1)
    dtype = torch.float64 if asked.exact else torch.float32
    gloo = dist.new_group(backend="gloo")
    groups = {name: Group(dist.new_group(backend="dure")) for name in PLANS}
    names = [ALONE, *PLANS]
    contenders = {
        name: Contender(name, setting, dtype, groups.get(name, context.group)) for name in names
    }
    for contender in contenders.values():
        for _ in range(CHECKED):
            contender.step()
    weights = {name: contender.weights() for name, contender in contenders.items()}
    tolerance = 1e-12 if asked.exact else 1e-4
    rows: JSON = {}
    for name, contender in contenders.items():
        apart = largest_difference(weights[name], weights[ALONE])
        if not apart < tolerance:
            raise ValueError(f"{name} ends {apart:.1e} from the weights of one thread")
        rows[name] = {"largest_difference": apart, "parameters": held(contender.model)}
        if name == ALONE:
            continue
        forward, backward = counted(contender, groups[name])
        said = formula(name, setting, context.group.size, dtype.itemsize)
        if (forward.nbytes, backward.nbytes) != said:
            raise ValueError(f"{name} sends {forward} and {backward}, by the formula {said}")
        rows[name] |= {"forward": forward._asdict(), "backward": backward._asdict()}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(asked.rounds):
        for name in turns(names, number):
            takes_part = name != ALONE or dist.get_rank() == 0
            step = contenders[name].step
            samples[name].append(seconds_per_step(step, asked.steps, gloo, takes_part))
    for name in names:
        rows[name] |= quartiles(samples[name])
        rows[name]["speed"] = median_ratio(samples[ALONE], samples[name])
    return rows


def held(model: nn.Module) -> int:
    """Bytes of the parameters on this rank."""
    return sum(parameter.nbytes for parameter in model.parameters())


def words(travels: JSON) -> str:
    """2 all-gathers, as a table has it."""
    several = travels["collectives"].items()
    return ", ".join(f"{count} {name}" for name, count in sorted(several)) or "nothing"


def cells(rows: list[JSON]) -> str:
    head = ["chain, ranks, plan", "forward", "backward", "MB sent a step", "MB of weights a rank"]
    head += ["ms a step", "speed-up over one thread"]
    lines = []
    for row in rows:
        for name, one in row["plans"].items():
            sent = [one[way]["nbytes"] for way in ("forward", "backward") if way in one]
            lines.append(
                [
                    f"{row['chain']}, {row['ranks']}, {name}",
                    words(one["forward"]) if sent else "",
                    words(one["backward"]) if sent else "",
                    f"{sum(sent) / 1e6:.2f}",
                    f"{one['parameters'] / 1e6:.1f}",
                    f"{1e3 * one['median']:.1f}",
                    f"{one['speed']:.2f}",
                ]
            )
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=9, help="of all plans; at least 2")
    parser.add_argument("--steps", type=int, default=5, help="of a plan in a round")
    parser.add_argument("--exact", action="store_true", help="in float64, equal to 1e-12")
    parser.add_argument("--small", action="store_true", help="tiny chains, for a first try")
    parser.add_argument("--page", type=Path, help="the page whose table is filled")
    takes_result(parser)
    asked = parser.parse_args()
    rows: list[JSON] = []
    for title, setting in (SMALL if asked.small else SETTINGS).items():
        for ranks in asked.ranks:
            world = dure.Processes(ranks, backend="gloo", deadline=300)
            plans = world.run(partial(contest, setting, asked), lambda event: None)
            rows.append({"chain": title, **setting._asdict(), "ranks": ranks, "plans": plans})
    show(cells(rows))
    if asked.page is not None:
        fill(asked.page, {"chains": cells(rows)})
    head = {"benchmark": "study_chain", "cores": available_cores(), "exact": asked.exact}
    head |= {"rounds": asked.rounds, "steps": asked.steps, "torch": torch.__version__}
    give({**head, "rows": rows}, asked.result)


if __name__ == "__main__":
    main()
