"""Interface of attacks: poisoned data, and forged updates of malicious clients.

Updates are lists of flat tensors, as `dure.tensors.flat` stores parameters, and are differences
(weights after training minus weights before). Honest updates are never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dure.arguments import NamedSettings
from dure.randomness.seeds import generator
from dure.settings import write

Update = Sequence[Tensor]

Random = Callable[[int], torch.Generator]
"""(position of a malicious client) -> its random generator."""


@dataclass(frozen=True)
class Attack(NamedSettings):
    """Base class of attacks, with a name, a text form, `poison` and `forge`.

    sees: "own" if a malicious client knows its own update only, "honest" if it knows all honest
    updates of the round.
    poisons: whether the attack changes data, by `poison`.
    triggers: whether the attack teaches the model a trigger, which `triggered` and `turned`
    measure.
    """

    sees: ClassVar[Literal["own", "honest"]] = "own"
    poisons: ClassVar[bool] = False
    triggers: ClassVar[bool] = False

    def poison(self, inputs: Any, targets: Any, classes: int | None) -> tuple[Any, Any]:
        """Return the poisoned examples of a malicious client; the given examples stay unchanged.

        classes: number of classes, None or 0 if the targets are no labels. Attacks on updates
        return the given examples. Raises ValueError for data that the attack does not support.
        """
        return inputs, targets

    def forge(
        self,
        updates: Sequence[Update],
        liars: Collection[int],
        seed: int,
        turn: int,
        clients: Sequence[int] | None = None,
    ) -> Sequence[Update]:
        """Return the updates as they are sent; `updates` itself without malicious clients.

        Args:
            updates: honest updates of all clients (after `poison`, learned from poisoned data).
            liars: positions of the malicious clients in `updates`. Updates of honest clients are
                returned as the same objects.
            seed: of the run.
            turn: number of the round.
            clients: client of each update. The random numbers of a malicious client are a function
                of (seed, turn, client), by default of its position, and of the occurrence for a
                client with several updates.

        Raises:
            ValueError: a position is not in `updates`.
        """
        if not liars:
            return updates
        if not all(0 <= liar < len(updates) for liar in liars):
            raise ValueError(
                f"the malicious clients {sorted(liars)} are not positions among {len(updates)} "
                "updates"
            )

        def random(position: int) -> torch.Generator:
            if clients is None:
                return generator(seed, "attack", turn, position)
            client = clients[position]
            # Without rounds a client may have two updates in a model: its forgeries differ too.
            times = clients[:position].count(client)
            return generator(seed, "attack", turn, client, *([times] if times else []))

        # For attacks as for rules, a complex number is two real numbers.
        real = [list(map(_real, update)) for update in updates]
        # Sorted: the effect of an attack must not depend on the order of a set.
        lies = {
            liar: [_as(like, part) for like, part in zip(updates[liar], sent, strict=True)]
            for liar, sent in self._lies(real, sorted(set(liars)), random).items()
        }
        return [lies.get(position, update) for position, update in enumerate(updates)]

    def triggered(self, inputs: Any) -> Any:
        """Return a copy of the inputs with the trigger on all examples."""
        raise NotImplementedError

    def turned(self, outputs: Tensor, targets: Tensor) -> tuple[int, int]:
        """Return (number of outputs with the attack's target, number of counted examples).

        outputs: the model's for `triggered` inputs. targets: the true targets.
        """
        raise NotImplementedError

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        """Return the update that each malicious client sends, by position.

        Complex tensors come as pairs of real numbers. By default the updates are the honest ones.
        """
        return {liar: updates[liar] for liar in liars}

    def __str__(self) -> str:
        """Return the text that `parse_attack` reads."""
        return write(self)


@dataclass(frozen=True)
class NoAttack(Attack):
    """No attack: all clients are honest."""

    name: ClassVar[str] = "none"


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as(like: Tensor, sent: Tensor) -> Tensor:
    """Return the sent tensor, complex again if `like` is complex."""
    return torch.view_as_complex(sent.contiguous()) if like.is_complex() else sent


def scaled(update: Update, by: float) -> list[Tensor]:
    """Return the update times a number."""
    return [tensor * by for tensor in update]
