"""What a server has of the model, and what it hears of the rest.

a model that is cut     the server has all of its code, and traces it; clients train their parts
a tail of its own       the server has no more; the clients say what leaves their heads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

from dure.collectives.compression import NoCompression
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.fleet.virtual import nbytes
from dure.record.meter import Meter
from dure.split.apart.form import decoded, encoded
from dure.split.apart.sides import ServerPart
from dure.split.batching import Batching
from dure.split.compressed import Exchange, exchange_of
from dure.split.cutting import Cut
from dure.split.facts import facts_of, leakage_of
from dure.split.leakage.randomised_response import relabelled
from dure.split.network.checks import AtServer, Heads
from dure.split.network.control import Hello
from dure.split.network.cut_model import CutAtServer
from dure.split.network.parts import PartAtServer
from dure.split.plan import Plan
from dure.split.sides import Side
from dure.tasks.loss_shares import CountedLoss
from dure.tasks.parts import ModelParts, TailTask


@dataclass(frozen=True)
class Ends:
    """tails: the server's side. heads: one like the clients', which is not trained; None where the
    server has no head. targets: how the leaves of a batch's make up what the loss is called with.
    exchange: in what way values cross. form: of what the server's part gives, for clients that have
    to know it. divided: where the server has the whole model.
    """

    tails: Side
    heads: Side | None
    batching: Callable[[Sequence[int]], Batching]
    targets: TreeSpec | None
    at_server: AtServer
    like: Heads
    exchange: Callable[[], Exchange] | None
    form: bytes
    divided: Cut | None
    facts: Callable[[Sequence[Meter]], dict[str, Any]]


def ends_of_cut(
    task: Task,
    model: nn.Module,
    plan: Plan,
    sample: Examples,
    largest: int,
    flops: float,
    seed: int,
) -> Ends:
    """Of a model that is cut. sample: some examples; largest: of a client's batch."""
    # Its examples are elsewhere: each batch tells what it counts.
    divided = Cut(task, model, plan.at, largest, seed, CountedLoss(task.loss, None))
    _, targets = relabelled(plan.defence, sample, seed).batch(torch.arange(1))
    leaves, structure = tree_flatten(targets)

    def facts(clients: Sequence[Meter]) -> dict[str, Any]:
        each = nbytes(leaves)
        return facts_of(
            plan, divided, clients, flops=flops, target_bytes=largest * each, measured={}
        )

    return Ends(
        tails=divided.tails,
        heads=divided.heads,
        batching=divided.batching,
        targets=None if plan.rules.labels_stay else structure,
        at_server=CutAtServer(divided.cut, plan.compression),
        like=Heads(divided.heads),
        exchange=exchange_of(plan.compression, divided.cut),
        form=b"",
        divided=divided,
        facts=facts,
    )


def ends_of_tail(
    task: TailTask,
    model: ModelParts,
    plan: Plan,
    hellos: Mapping[int, Hello],
    largest: int,
    seed: int,
) -> Ends:
    """Of a tail of its own. Raises ValueError for heads that differ, or do not fit it."""
    first = hellos[min(hellos)]
    for number, hello in hellos.items():
        if not hello.form:
            raise ValueError(
                f"client {number} has the task of a whole model, and the server that of a tail: "
                f"give the client the task of a head"
            )
        if (hello.form, hello.targets) != (first.form, first.targets):
            raise ValueError(
                f"what leaves the head of client {number} has another form than that of client "
                f"{min(hellos)}: {decoded(hello.form)}, and {decoded(first.form)}"
            )
        if hello.digest != first.digest and not plan.rules.hands:
            raise ValueError(
                f"client {number} begins with another head than client {min(hellos)}, and heads "
                f"that train at the same time begin alike: is it the same file, and torch?"
            )
    part = ServerPart(task, model, decoded(first.form), seed)
    tails = part.side()
    targets = decoded(first.targets) if first.targets else None
    values, gradients = part.arriving.nbytes(largest)

    def facts(clients: Sequence[Meter]) -> dict[str, Any]:
        split = {
            "at": list(plan.at),
            "tail_weights": sum(one.numel() for one in tails.parameters.values()),
            "smashed_bytes": values,
            "gradient_bytes": gradients,
            "examples": largest,
            "messages_sent": [one.counters.messages_sent for one in clients],
            "compression": str(NoCompression()),
        }
        return {"split": split, "leakage": leakage_of(plan, {})}

    return Ends(
        tails=tails,
        heads=None,
        batching=part.batching,
        targets=None if targets is None else targets.structure,
        at_server=PartAtServer(part, targets),
        like=Heads(None),
        exchange=None,
        form=b"" if part.leaving is None else encoded(part.leaving),
        divided=None,
        facts=facts,
    )
