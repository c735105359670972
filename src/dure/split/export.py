"""Parts of a model that split learning has trained, as modules of their own.

    head_of(run, task)(x)      the output of the head: a tensor, or several as a tuple
    tail_of(run, task)(z)      the model's output; in the U-shape, the output of the tail
    end_of(run, task)(z)       the model's output, in the U-shape

In sequence they compute the model's evaluation output, to the bit if torch computes the model's
layers as traced. A `state_dict` has the part's own weights and buffers, under the model's names,
and nothing of the other parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from dure.contracts.fresh_model import seeded_model
from dure.contracts.task import Task
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.trace import leaves_of
from dure.record.run import Run, load_run
from dure.split.batching import crossings
from dure.split.cutting import cut_at


def head_of(run: Run | str | Path, task: Task) -> ModelPart:
    """Return the head of a run, or of the run in a folder: maps examples to smashed data.

    run: the result of `dure.train`, or the folder of a run. task: the task of the training. With
    personal heads the head is their mean, as in the run's model. Raises ValueError for a run of
    another system, RunFolderError for a folder without an ended run.
    """
    return ModelPart(_cut(run, task), 0)


def tail_of(run: Run | str | Path, task: Task) -> ModelPart:
    """Return the server's part. run, task, and errors: as in `head_of`."""
    return ModelPart(_cut(run, task), 1)


def end_of(run: Run | str | Path, task: Task) -> ModelPart:
    """Return the end of the model, which stays with clients in the U-shape.

    run, task: as in `head_of`. Raises ValueError for a model that was cut once.
    """
    cut = _cut(run, task)
    if cut.stages < 3:
        raise ValueError("the model was cut once, and its end is the tail: use tail_of")
    return ModelPart(cut, 2)


def _cut(run: Run | str | Path, task: Task) -> CutModel:
    """Return the run's model, cut as in the training."""
    if not isinstance(run, Run):
        run = load_run(run, partial(seeded_model, task, 0))
    facts = run.summary.get("facts") or [{}]
    told = facts[0].get("split")
    if told is None:
        raise ValueError("this run was not trained by split learning: its model is not cut")
    # A copy, since traces refer to a model's own tensors.
    model = seeded_model(task, 0)
    model.load_state_dict(run.model.state_dict())
    return cut_at(task, model, told["at"], told["examples"])


class ModelPart(nn.Module):
    """Part of a cut model, in evaluation mode. number: of the stage; 0 is the head.

    The part accepts batches of any size.
    """

    def __init__(self, cut: CutModel, number: int) -> None:
        super().__init__()
        self._number = number
        self._last = number == cut.stages - 1
        # In a list, so that nn.Module does not register the whole model as a submodule.
        self._cuts = [cut]
        self._counts = _counted_by(cut, number) if number else (0, 1, 1)
        of = {**dict(cut.model.named_parameters()), **dict(cut.model.named_buffers())}
        for name in cut.names[number]:
            _put(self, name, of[name])
        self.eval()

    def forward(self, values: Any) -> Any:
        """Return the output of the part.

        values: examples, for the head; else the output of the part before.
        """
        cut = self._cuts[0]
        given = _leaves(values) if self._number else leaves_of(values)
        place, dim, per = self._counts
        examples = given[place].shape[dim] // per if self._number else given[0].shape[0]
        program = cut.program(
            self._number,
            examples,
            training=False,
            stream=RandomStream(0, carried=False),
            gradient_handler=None,
        )
        if self._number == 0:
            given = [given[index] for index in program.inputs]
            _check_shapes(given, program.shapes)
        found = program.module(*given)
        if self._last:
            return tree_unflatten(list(found), cut.structure(examples, False))
        return found[0] if len(found) == 1 else tuple(found)


def _check_shapes(given: Sequence[Any], shapes: Sequence[torch.Size | None]) -> None:
    """Raise ValueError for examples of another shape than in training."""
    for one, shape in zip(given, shapes, strict=False):
        if shape is not None and one.shape != shape:
            raise ValueError(
                f"examples have the shape {list(one.shape[1:])}, but the head was cut for "
                f"{list(shape[1:])}"
            )


def _leaves(values: Any) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else list(values)


def _counted_by(cut: CutModel, number: int) -> tuple[int, int, int]:
    """Return the value that counts examples, its dimension, and the size of an example there."""
    program = cut.program(
        number,
        cut.examples,
        training=False,
        stream=RandomStream(0, carried=False),
        gradient_handler=None,
    )
    for place, one in enumerate(crossings(cut, number - 1)):
        if one.dim is not None:
            return place, one.dim, program.received[place].shape[one.dim] // cut.examples
    raise ValueError("no value at the cut has a dimension of examples")


def _put(into: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a parameter or buffer under a dotted name."""
    *path, last = name.split(".")
    for each in path:
        if not hasattr(into, each):
            into.add_module(each, nn.Module())
        into = getattr(into, each)
    if isinstance(tensor, nn.Parameter):
        into.register_parameter(last, tensor)
    else:
        into.register_buffer(last, tensor)
