"""What an attack is: what it makes of a liar's data, and of what a liar sends.

Updates are lists of flat tensors, as `dure.tensors.flat` keeps parameters, and are differences
(weights after training less weights before). What honest clients sent is never changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dure.arguments import Told
from dure.randomness.seeds import generator
from dure.settings import write

Update = Sequence[Tensor]

Random = Callable[[int], torch.Generator]
"""The random numbers of the liar at a position."""


@dataclass(frozen=True)
class Attack(Told):
    """What all attacks have in common: a name, a text form, `poison` and `forge`.

    sees: "own" where a liar knows its own update only, "honest" where it knows all honest updates
        of the round.
    poisons: whether it is on data, so that `poison` changes them.
    triggers: whether it teaches the model a trigger, so that `triggered` and `turned` measure it.
    """

    name: ClassVar[str]
    sees: ClassVar[Literal["own", "honest"]] = "own"
    poisons: ClassVar[bool] = False
    triggers: ClassVar[bool] = False

    def poison(self, inputs: Any, targets: Any, classes: int | None) -> tuple[Any, Any]:
        """What a liar learns from instead of these examples; they themselves stay as they are.

        classes: how many there are, None or 0 where the targets are no labels. Attacks that are not
        on data return what they are given. Raises ValueError for data that the attack cannot be
        made on.
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
        """The updates as they are sent; `updates` itself if nobody lies.

        updates: what everybody would send honestly (or, after `poison`, has learned). liars: the
        positions in it of those who lie. What honest clients send is passed on as the same object.
        clients: whose updates they are; what a liar draws is a function of (seed, turn, client), by
        default of its position, and for a client that comes several times of which time it is.

        Raises ValueError for a position that is not one of `updates`.
        """
        if not liars:
            return updates
        if not all(0 <= liar < len(updates) for liar in liars):
            raise ValueError(
                f"the liars {sorted(liars)} are not positions among {len(updates)} updates"
            )

        def random(position: int) -> torch.Generator:
            if clients is None:
                return generator(seed, "attack", turn, position)
            client = clients[position]
            # Without rounds a client may have two updates in one model: its lies differ too.
            times = clients[:position].count(client)
            return generator(seed, "attack", turn, client, *([times] if times else []))

        # As to rules, a complex number is two real ones to attacks.
        real = [list(map(_real, update)) for update in updates]
        # Sorted: what an attack does must not depend on the order of a set.
        lies = {
            liar: [_as(like, part) for like, part in zip(updates[liar], sent, strict=True)]
            for liar, sent in self._lies(real, sorted(set(liars)), random).items()
        }
        return [lies.get(position, update) for position, update in enumerate(updates)]

    def triggered(self, inputs: Any) -> Any:
        """A copy of the inputs with the trigger on all."""
        raise NotImplementedError

    def turned(self, outputs: Tensor, targets: Tensor) -> tuple[int, int]:
        """(how many the model says are what the attack wants, of how many).

        outputs: the model's for `triggered` inputs. targets: the true ones.
        """
        raise NotImplementedError

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        """What each liar sends, by its position; complex tensors are pairs of real numbers.

        It sends what it would have sent honestly, unless an attack says otherwise.
        """
        return {liar: updates[liar] for liar in liars}

    def __str__(self) -> str:
        """The text that `parse_attack` reads."""
        return write(self)


@dataclass(frozen=True)
class NoAttack(Attack):
    """Everybody is honest."""

    name: ClassVar[str] = "none"


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as(like: Tensor, sent: Tensor) -> Tensor:
    """What is sent, complex again where `like` is."""
    return torch.view_as_complex(sent.contiguous()) if like.is_complex() else sent


def scaled(update: Update, by: float) -> list[Tensor]:
    """The update times a number."""
    return [tensor * by for tensor in update]


def check_positive(value: float, what: str) -> None:
    """Raises ValueError unless `value` is a positive number.

    what: the words for it, such as "gaussian: sigma".
    """
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{what} is a positive number, not {value}")
