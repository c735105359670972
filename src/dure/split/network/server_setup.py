"""The server's part of the model, and the server's knowledge of the clients' parts.

a model that is cut     the server has all of its code, and traces it; clients train their parts
a separate tail         the server has no other part; clients send the form of their heads' output
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from dure.collectives.compression import NoCompression
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.fleet.virtual_network import nbytes
from dure.record.meter import Meter
from dure.split.batching import Batching
from dure.split.compressed import CutCompression, exchange_of
from dure.split.cutting import TracedDividedModel
from dure.split.facts import facts_of, leakage_of
from dure.split.head_checks import HeadChecks
from dure.split.leakage.randomised_response import relabelled
from dure.split.network.checks import MOST_EACH, UNKNOWN, ClientAgreement, CountBounds
from dure.split.network.control import Hello
from dure.split.network.cut_model import CutServerPart
from dure.split.network.separate_parts import SeparateServerPart
from dure.split.network.targets import (
    classes_of,
    leaves_of_examples,
    leaves_of_form,
)
from dure.split.plan import SplitPlan
from dure.split.separate_models.form import decoded, encoded
from dure.split.separate_models.sides import ServerPart
from dure.split.sides import Side
from dure.tasks.known_losses import cross_entropy_of
from dure.tasks.loss_shares import CountedLoss
from dure.tasks.parts import ModelParts, TailTask


@dataclass(frozen=True)
class ServerSetup:
    """The server's part of the model, and functions that depend on how the model is divided.

    Args:
        tails: the server's side.
        heads: a head like the clients', which is not trained; None if the server has no head.
        batching: concatenates clients' batches.
        targets: structure of a batch's targets for the loss; None if targets stay at clients.
        agreed: the agreement by which clients' messages are checked.
        exchange: makes the compression of values at the cuts; None without compression.
        form: of the output of the server's part, for clients that need it; else empty.
        divided: the divided model, if the server has the whole model; else None.
        facts: returns the facts of the run.
    """

    tails: Side
    heads: Side | None
    batching: Callable[[Sequence[int]], Batching]
    targets: TreeSpec | None
    agreed: ClientAgreement
    exchange: Callable[[], CutCompression] | None
    form: bytes
    divided: TracedDividedModel | None
    facts: Callable[[Sequence[Meter]], dict[str, Any]]


def setup_for_cut(
    task: Task,
    model: nn.Module,
    plan: SplitPlan,
    sample: Examples,
    largest: int,
    flops: float,
    seed: int,
) -> ServerSetup:
    """Return the `ServerSetup` of a model that is cut.

    Args:
        task: the task.
        model: the model.
        plan: the plan of the run.
        sample: some examples.
        largest: maximum number of examples of a client's batch.
        flops: FLOPs of a step.
        seed: the run's seed.
    """
    # The server has no examples, so the count of a batch comes from its targets.
    divided = TracedDividedModel(task, model, plan.at, largest, seed, CountedLoss(task.loss, None))
    labelled = relabelled(plan.defence, sample, seed)
    _, targets = labelled.batch(torch.arange(1))
    leaves, structure = tree_flatten(targets)
    trace = divided.cut.reference
    outputs = [
        trace.value(node).shape if isinstance(node, fx.Node) else None for node in trace.outputs
    ]
    found = leaves_of_examples(labelled, classes_of(task.loss, outputs))

    def facts(clients: Sequence[Meter]) -> dict[str, Any]:
        each = nbytes(leaves)
        return facts_of(
            plan, divided, clients, flops=flops, target_bytes=largest * each, measured={}
        )

    return ServerSetup(
        tails=divided.tails,
        heads=divided.heads,
        batching=divided.batching,
        targets=None if plan.rules.labels_stay else structure,
        agreed=ClientAgreement(
            CutServerPart(divided.cut, plan.compression),
            HeadChecks(divided.heads, plan.rules.forgets),
            None if plan.rules.labels_stay else found,
            _counting(task, labelled, leaves),
            plan.rules.returns,
            frozenset(f"test_{name}" for name in ("loss", *task.measures)),
        ),
        exchange=exchange_of(plan.compression, divided.cut),
        form=b"",
        divided=divided,
        facts=facts,
    )


def setup_for_tail(
    task: TailTask,
    model: ModelParts,
    plan: SplitPlan,
    hellos: Mapping[int, Hello],
    largest: int,
    seed: int,
) -> ServerSetup:
    """Return the `ServerSetup` of a separate tail.

    Args:
        task: the tail's task.
        model: the model, of which the server has the tail.
        plan: the plan of the run.
        hellos: first message of each client, by number.
        largest: maximum number of examples of a client's batch.
        seed: the run's seed.

    Raises:
        ValueError: heads differ, or do not fit the tail.
    """
    first = hellos[min(hellos)]
    for number, hello in hellos.items():
        if not hello.form:
            raise ValueError(
                f"client {number} has the task of a whole model, but the server has that of a "
                "tail: give the client the task of a head"
            )
        if (hello.form, hello.targets) != (first.form, first.targets):
            raise ValueError(
                f"the output of client {number}'s head differs in form from that of client "
                f"{min(hellos)}: {decoded(hello.form)} and {decoded(first.form)}"
            )
        if hello.digest != first.digest and not plan.rules.hands:
            raise ValueError(
                f"client {number} starts with another head than client {min(hellos)}, but heads "
                "that train at the same time need the same initial weights: check that the file "
                "and the version of torch are the same"
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

    return ServerSetup(
        tails=tails,
        heads=None,
        batching=part.batching,
        targets=None if targets is None else targets.structure,
        agreed=ClientAgreement(
            SeparateServerPart(part, targets),
            HeadChecks(None, plan.rules.forgets),
            None if targets is None else leaves_of_form(targets, None),
            UNKNOWN if targets is None else CountBounds(None, 1.0, known=False),
            plan.rules.returns,
            None if targets is None else frozenset(),
        ),
        exchange=None,
        form=b"" if part.leaving is None else encoded(part.leaving),
        divided=None,
        facts=facts,
    )


def _counting(task: Task, labelled: Examples, leaves: Sequence[Any]) -> CountBounds:
    """Return the bounds on the loss's count. leaves: of the targets of one example."""
    known = cross_entropy_of(task.loss)
    losses = CountedLoss(task.loss, labelled)
    if known is None or not leaves or not isinstance(leaves[0], Tensor):
        return CountBounds(None, MOST_EACH if losses.is_late else 1.0, known=not losses.is_late)
    heaviest = 1.0 if known.weight is None else max(1.0, float(known.weight.max()))
    return CountBounds(known.count, leaves[0].numel() * heaviest, known=not losses.is_late)
