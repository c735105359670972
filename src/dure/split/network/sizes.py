"""Maximum size of a message of split learning, by which both sides limit received messages.

    values at the cuts     bytes an example, times the largest batch in training or evaluation;
                           times `SLACK`, since examples of evaluation may be larger
    a head                 its weights and buffers, and `STATES` times the weights for the state
                           of an optimizer
    anything else          `MARGIN`

The limit is enforced before a byte of a message is stored (`dure.deploy.frame_limits`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor, fx, nn

from dure.parallel.pipeline.cut import CutModel
from dure.split.batching import values_at
from dure.split.network.control import Hello
from dure.split.separate_models.form import OutputForm
from dure.split.sides import Side

MARGIN = 1 << 20
SLACK = 4
VARIES = 16
"""Allowed ratio of a value's size to the size in the trial, as for texts of varying length."""

STATES = 16

UNKNOWN_HEAD = 1 << 30
"""Assumed bytes of a head of unstated size: clients of earlier versions."""


def largest_message(crossing: float, head: int) -> int:
    """Return the maximum bytes of a message.

    crossing: bytes of the values at the cuts. head: bytes of a head's weights and buffers.
    """
    return MARGIN + math.ceil(max(crossing, (1 + STATES) * head))


def crossing_of_cut(cut: CutModel, examples: int, targets: int = 0) -> float:
    """Return the maximum bytes of the values at the cuts of a model for `examples` examples.

    targets: bytes of an example's targets, if they are sent.
    """
    trace = cut.reference
    cuts = [
        sum(value.nbytes for value in values_at(cut, boundary, cut.examples))
        for boundary in range(cut.stages - 1)
    ]
    # In evaluation the server may answer with the model's output.
    ends = [node.meta.get("val") for node in trace.outputs if isinstance(node, fx.Node)]
    cuts.append(sum(one.nbytes for one in ends if isinstance(one, Tensor)))
    return SLACK * examples * (max(cuts) / cut.examples + targets)


def crossing_of_forms(forms: Iterable[OutputForm | None], examples: int) -> float:
    """Return the maximum bytes of the values of separate parts; as `crossing_of_cut`."""
    return VARIES * sum(form.nbytes(examples)[0] for form in forms if form is not None)


def head_bytes(side: Side) -> int:
    """Return the bytes of the weights and buffers of a side."""
    return _bytes(side.parameters.values()) + _bytes(side.buffers())


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights and buffers of a model."""
    return _bytes(model.parameters()) + _bytes(model.buffers())


def stated_head_bytes(hellos: Mapping[int, Hello]) -> int:
    """Return the bytes of a head, as all clients state. Raises ValueError if they differ."""
    first = min(hellos)
    for number, hello in hellos.items():
        if hello.head != hellos[first].head:
            raise ValueError(
                f"the head of client {number} has {hello.head:,} bytes, but that of client "
                f"{first} has {hellos[first].head:,}: give all clients the same head"
            )
    return hellos[first].head or UNKNOWN_HEAD // (1 + STATES)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)
