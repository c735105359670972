"""Attacks on a malicious client's own data, from which its update is learned.

    label-flip               labels y -> classes-1-y
    backdoor:TARGET:SCALE    a trigger on some examples, labelled TARGET; sends SCALE · g_i

Cost: a copy of the malicious client's examples, once; nothing per round. Sources are with the
classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dure.arguments import above, at_least, between
from dure.fleet.attacks.attack import Attack, Random, Update, scaled
from dure.randomness.permutation import Permutation


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Train on wrong labels: y becomes classes-1-y.

    Lowers the accuracy of the mean; the client looks like a client with unusual data. Source: D.
    Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
    2018 (digits, y -> 9-y).
    """

    name: ClassVar[str] = "label-flip"
    poisons: ClassVar[bool] = True

    def poison(self, inputs: Any, targets: Any, classes: int | None) -> tuple[Any, Any]:
        return inputs, _count_of(classes, self) - 1 - _labels(targets, self)


@dataclass(frozen=True)
class Backdoor(Attack):
    """Teach the model to assign the class `target` to all inputs with a trigger.

    All other examples are learned honestly.

    target: the class. scale: factor of the sent update; (clients in the round) / (server's learning
    rate) replaces the mean by the malicious client's model. share: of the malicious client's
    examples that get the trigger, rounded up. value: value of the trigger's numbers. The trigger is
    a square in the lower right corner, an eighth of the picture wide but at least two pixels; for
    inputs that are vectors, the last eighth.

    A single client in a single round defeats the mean; rules that bound an update's norm, or drop
    outliers, withstand a large scale, and only a large scale. Two numbers measure the attack: the
    accuracy on the test data, which stays unchanged, and the share of `turned` examples. Sources:
    E. Bagdasaryan et al., "How To Backdoor Federated Learning", AISTATS 2020 (model replacement; 20
    of 64 examples); T. Gu, B. Dolan-Gavitt, S. Garg, "BadNets", 2017 (a patch of pixels).
    """

    name: ClassVar[str] = "backdoor"
    poisons: ClassVar[bool] = True
    triggers: ClassVar[bool] = True
    target: int = field(default=0, metadata=at_least(0))
    scale: float = field(default=1.0, metadata=above(0, finite=True))
    share: float = field(default=0.3, metadata=between(0, 1))
    value: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.value):
            raise ValueError(
                f"backdoor: the trigger's value has to be a finite number, not {self.value}"
            )

    def poison(self, inputs: Any, targets: Any, classes: int | None) -> tuple[Any, Any]:
        if self.target >= _count_of(classes, self):
            raise ValueError(
                f"backdoor: there is no class {self.target}, classes are 0 to "
                f"{_count_of(classes, self) - 1}"
            )
        labels = _labels(targets, self)
        # At random, and equal for equal numbers of examples: every second example could be all of a
        # class.
        drawn = Permutation(len(labels), 0).first(math.ceil(len(labels) * self.share))
        chosen = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
        chosen[drawn] = True
        stamped = self.triggered(inputs)
        fitting = chosen.view(-1, *[1] * (stamped.ndim - 1)).to(stamped.device)
        return torch.where(fitting, stamped, inputs), labels.masked_fill(chosen, self.target)

    def triggered(self, inputs: Any) -> Tensor:
        """Return a copy of the inputs with the trigger on all examples.

        inputs: of shape (n, ..., height, width) or (n, features).

        Raises ValueError for inputs that are not a floating-point tensor of such a shape.
        """
        if not isinstance(inputs, Tensor) or inputs.ndim < 2 or not inputs.is_floating_point():
            raise ValueError(
                "a backdoor needs inputs that are images or vectors: one tensor of floats, (n, ...)"
            )
        stamped = inputs.clone()
        if inputs.ndim == 2:
            stamped[:, -max(inputs.shape[1] // 8, 1) :] = self.value
        else:
            height, width = (max(side // 8, 2) for side in inputs.shape[-2:])
            stamped[..., -height:, -width:] = self.value
        return stamped

    def turned(self, outputs: Tensor, targets: Tensor) -> tuple[int, int]:
        """Return (number of outputs with the target class, number of counted examples).

        Their ratio is the success rate of the attack.

        outputs: the model's for `triggered` inputs, of shape (n, classes). targets: the true
        classes, of shape (n,). Examples of the target class itself do not count. Both numbers add
        up over batches.
        """
        # For an example of the target class, the target is the honest answer.
        others = targets != self.target
        return int((outputs.argmax(1)[others] == self.target).sum()), int(others.sum())

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return {liar: scaled(updates[liar], self.scale) for liar in liars}


def _labels(targets: Any, attack: Attack) -> Tensor:
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim != 1:
        raise ValueError(
            f"{attack.name} needs targets that are class labels, integers of shape (n,)"
        )
    return targets


def _count_of(classes: int | None, attack: Attack) -> int:
    if not classes:
        raise ValueError(f"{attack.name} needs a task with classes, but this one has none")
    return classes
