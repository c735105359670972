"""Poisoning by malicious clients: of their examples (data), and of their updates (model)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from dure.data.datasets import DatasetExamples
from dure.data.examples import Examples
from dure.fleet.attacks import Attack
from dure.fleet.malicious import Attackers
from dure.protocol.messages import Update


def poisoned(
    examples: Examples, parts: Sequence[Tensor], liars: Collection[int], attack: Attack
) -> tuple[Examples, list[Tensor]]:
    """Return (examples with poisoned copies at the end, parts of all clients).

    The parts of malicious clients refer to the poisoned copies. Raises ValueError for examples that
    the attack cannot poison.
    """
    classes = check_poison(examples, attack)
    inputs = [examples.inputs]
    targets = [examples.targets]
    new = list(parts)
    end = len(examples)
    for client in liars:
        # Copies at the end, with the indices of malicious clients: honest clients' indices stay
        # valid.
        own_inputs, own_targets = attack.poison(*examples.batch(parts[client]), classes)
        inputs.append(own_inputs)
        targets.append(own_targets)
        new[client] = torch.arange(end, end + len(parts[client]))
        end += len(parts[client])
    return Examples(torch.cat(inputs), torch.cat(targets), None, examples.classes), new


def check_poison(examples: Examples, attack: Attack) -> int:
    """Return the number of classes of the examples, 0 without classes.

    Raises ValueError for examples that are not plain tensors, or that the attack cannot poison.
    """
    if isinstance(examples, DatasetExamples) or not (
        isinstance(examples.inputs, Tensor) and isinstance(examples.targets, Tensor)
    ):
        raise ValueError(
            f"{attack} can change only examples of two tensors, inputs and targets; this task's "
            "examples have another form"
        )
    labels = examples.labels()
    classes = 0
    if examples.classes:
        classes = len(examples.classes)
    elif labels is not None:
        classes = int(labels.max()) + 1
    attack.poison(*examples.batch(torch.tensor([0])), classes)
    return classes


def forged(updates: list[Update], attackers: Attackers) -> list[Update]:
    """Return the updates as they are sent, with forged updates of malicious clients.

    An omniscient attacker knows the honest updates that are combined with its own.
    """
    # A client without an update has nothing to forge, and no attacker knows its update.
    there = [update for update in updates if update.failure is None]
    lying = [
        position
        for position, update in enumerate(there)
        if update.client in attackers.of(update.round)
    ]
    if not lying:
        return updates
    # Without rounds the combined updates may start from several models.
    turn = max(update.round for update in there)
    clients = [update.client for update in there]
    # Extras of an algorithm (SCAFFOLD's controls) are forged with the update, and split off below.
    honest = [[*update.delta, *update.extra] for update in there]
    sent = iter(attackers.attack.forge(honest, lying, attackers.seed, turn, clients=clients))
    return [
        update if update.failure is not None else _with(update, next(sent)) for update in updates
    ]


def _with(update: Update, sent: Sequence[Tensor]) -> Update:
    """Return the update with other tensors: deltas, then extras."""
    deltas = len(update.delta)
    return replace(update, delta=sent[:deltas], extra=sent[deltas:])
