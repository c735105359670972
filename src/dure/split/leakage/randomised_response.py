"""Randomised response: label differential privacy by labels that are randomised once.

Of K classes, with the privacy budget epsilon,

    the true label       with probability e^epsilon / (e^epsilon + K - 1)
    each of the others   with probability         1 / (e^epsilon + K - 1)

Each label is drawn once, before training, and used in every epoch: a new draw in each epoch would
reveal the label by the average, and spend the budget each time. Any observer of results that are
computed from the labels, and also the server with one cut, learns of each label at most a factor
e^epsilon. Inputs are not protected.

Source: S. Warner 1965; B. Ghazi et al., "Deep Learning with Label Differential Privacy", NeurIPS
2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dure.arguments import at_least
from dure.data.examples import Examples
from dure.randomness.seeds import generator
from dure.split.leakage.defence import Defence, class_labels, count_classes


@dataclass(frozen=True)
class RandomisedResponse(Defence):
    """Labels that are wrong with a known probability. epsilon: the budget; 0 reveals nothing."""

    name: ClassVar[str] = "randomised-response"
    guards: ClassVar[Literal["labels"]] = "labels"
    epsilon: float = field(default=1.0, metadata=at_least(0, finite=True))

    def check(self, examples: Examples, labels_stay: bool) -> None:
        if class_labels(examples) is None:
            raise ValueError(
                "randomised-response needs one class label per example, but the targets of the "
                "task have another form: leave it out"
            )

    def labels(self, labels: Tensor, classes: int, draws: torch.Generator) -> Tensor:
        if classes < 2:
            return labels
        true = 1 / (1 + (classes - 1) * math.exp(-self.epsilon))
        lies = torch.rand(len(labels), generator=draws, dtype=torch.float64) >= true
        # A uniform draw from the other classes.
        other = (labels + torch.randint(1, classes, labels.shape, generator=draws)) % classes
        # Negative labels mean "no label": the loss ignores them.
        return torch.where(lies & (labels >= 0), other, labels)


class Relabelled(Examples):
    """Examples of a dataset with other labels. labels: of shape (n,)."""

    def __init__(self, examples: Examples, labels: Tensor) -> None:
        self.examples = examples
        self.targets: Tensor = labels
        self.keys = examples.keys
        self.classes = examples.classes
        self.draws = examples.draws

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        inputs, _ = self.examples.batch(indices)
        return inputs, self.targets.index_select(0, indices)

    def labels(self) -> Tensor | None:
        return self.targets

    def to(self, dtype: torch.dtype) -> Examples:
        return Relabelled(self.examples.to(dtype), self.targets)


def relabelled(defence: Defence, examples: Examples, seed: int) -> Examples:
    """Return the examples with the defence's labels; the same examples if it keeps the labels.

    Raises ValueError if the defence changes labels and the examples have none.
    """
    if defence.guards != "labels":
        return examples
    labels = class_labels(examples)
    if labels is None:
        raise ValueError(f"{defence} needs one class label per example, but there are none")
    classes = count_classes(examples, labels)
    drawn = defence.labels(labels, classes, generator(seed, "randomised labels"))
    targets = getattr(examples, "targets", None)
    if not isinstance(targets, Tensor):
        return Relabelled(examples, drawn)
    written = drawn.to(targets.dtype).reshape(targets.shape)
    return Examples(examples.inputs, written, examples.keys, examples.classes)
