"""Trial runs of a separate head and tail before training, each by the side that has the part.

    head    on examples of its own, in batches of two sizes      ->  the form of its output
    tail    on made-up values of that form: ones for integers, such as lengths or indices, and
            small random numbers elsewhere

A part is tried in training mode, on a copy if the part can be copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from dure.contracts.lr_schedule import check_schedule
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.errors import described, first_line
from dure.machine.devices import CPU, device_of_model, to_device
from dure.parallel.mesh.check import sample
from dure.parallel.optimizer_sharding import check_parameter_wise
from dure.parallel.pipeline.model_location import place_of
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.split.optimizer_settings import check_settings
from dure.split.separate_models.form import OutputForm, dtype_of, flatten, form_of
from dure.tasks.modes import in_mode
from dure.tasks.parts import PLACES, ModelParts, parts_of
from dure.tensors.copies import copy_of
from dure.tensors.flat import check_no_shared_memory


class TrialOutputs(NamedTuple):
    """Outputs of a part for batches of two sizes.

    clones: whether the part's inputs must be cloned, because the part writes into them.
    """

    few: Any
    many: Any
    clones: bool


def try_head(head: nn.Module, train: Examples, examples: int) -> OutputForm:
    """Run the head on batches of `examples` (at least 2) and twice as many; return the form.

    Raises ValueError if the head fails or its output cannot be sent.
    """
    few = max(examples, 2)
    sizes = (few, 2 * few)
    device = device_of_model(head)
    with trial_copy(head) as tried:
        one, other = (
            _called(tried, to_device(sample(train, size), device), "the head", "its examples")
            for size in sizes
        )
        return form_of(one, other, sizes, "the head")


def form_of_targets(train: Examples) -> OutputForm:
    """Return the form of a batch's targets.

    Raises ValueError for targets that cannot be sent.
    """
    before = generators_state()
    try:
        one, two = (train.batch(torch.arange(count) % len(train))[1] for count in (1, 2))
    finally:
        restore_generators(before)
    return form_of(one, two, (1, 2), "the data's targets")


def try_on(module: nn.Module, form: OutputForm, before: str, who: str) -> TrialOutputs:
    """Run a part on made-up values of the form of the part before.

    before, who: names of the two parts in messages. Raises ValueError if the part fails on the
    values.
    """
    with trial_copy(module) as tried:
        few, clones = _on_made_up(tried, form, [one.few for one in form.tensors], before, who)
        many, _ = _on_made_up(tried, form, [one.many for one in form.tensors], before, who)
    return TrialOutputs(few, many, clones)


class SyntheticExamples:
    """Examples of a form, with made-up values and without targets."""

    def __init__(self, form: OutputForm) -> None:
        self._form = form

    def batch(self, indices: Tensor) -> tuple[Any, None]:
        """Return a batch with as many examples as there are indices."""
        leaves = [
            _made_up(one.dtype, self._form.shape(place, len(indices)), False)
            for place, one in enumerate(self._form.tensors)
        ]
        return self._form.whole(leaves), None


def _on_made_up(
    module: nn.Module, form: OutputForm, shapes: Sequence[tuple[int, ...]], before: str, who: str
) -> tuple[Any, bool]:
    device = device_of_model(module)
    leaves = [
        _made_up(one.dtype, shape, one.differentiable, device)
        for one, shape in zip(form.tensors, shapes, strict=True)
    ]
    versions = [one._version for one in leaves]
    try:
        outputs = module(form.whole(leaves))
        if [one._version for one in leaves] == versions:
            return outputs, False
    # In-place writes into a leaf that requires a gradient raise; retried below on clones.
    except Exception:
        pass
    clones = [one.clone() for one in leaves]
    what = f"what {before} gives, {form}"
    return _called(module, form.whole(clones), who, what), True


def _made_up(name: str, shape: tuple[int, ...], learns: bool, device: torch.device = CPU) -> Tensor:
    dtype = dtype_of(name)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.randn(shape).to(device, dtype).requires_grad_(learns)


def _called(module: nn.Module, inputs: Any, who: str, what: str) -> Any:
    try:
        return module(inputs)
    except Exception as error:
        place = place_of(error, module)
        said = first_line(error)
        raise ValueError(
            f"{who} rejects {what}: {type(error).__name__}: "
            f"{said}{f' (in {place})' if place else ''}"
        ) from error


@contextmanager
def trial_copy(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a copy of the module for trials, or the module itself, restored afterwards.

    Random numbers are the same in each trial, and the generators are restored afterwards.
    """
    twin = copy_of(module) or module
    before = generators_state()
    buffers = [(one, one.detach().clone()) for one in module.buffers()]
    try:
        seed_generators(0, "trial of a part", everything=True)
        with in_mode(twin, training=True), torch.enable_grad():
            yield twin
    finally:
        restore_generators(before)
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.data.copy_(value)


# Checks of parts without inputs


def check_parts(task: Task, model: ModelParts) -> None:
    """Raise ValueError for parts that cannot be trained, each by its own optimizer.

    task, model: of both sides, or of one side.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet: give the sizes of its layers")
    check_no_shared_memory(model)
    _check_untied(model)
    for side, own in parts_of(task):
        names = ("head", "end") if side == "head" else ("tail",)
        _check_optimizer(own, side, model.only(*names))


def _check_untied(model: ModelParts) -> None:
    """Raise ValueError for a tensor that both sides have."""
    owners: dict[int, tuple[str, bool]] = {}
    for place, part in model.there.items():
        at_server = PLACES[place] == "tail"
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            here = f"{PLACES[place]}.{name}"
            there, other = owners.setdefault(id(tensor), (here, at_server))
            if other != at_server:
                raise ValueError(
                    f"{there} and {here} are one tensor, but each side needs its own: create "
                    "separate ones in head and tail"
                )


def _check_optimizer(task: Task, side: str, model: ModelParts) -> None:
    every = list(model.parameters())
    if not every:
        return
    try:
        optimizer = task.optimizer(every)
    except Exception as error:
        raise ValueError(
            f"the optimizer of the {side} cannot be created with its {len(every)} parameters, "
            f"which are its only argument: {described(error)}"
        ) from error
    check_parameter_wise(optimizer)
    check_settings(optimizer)
    check_schedule(task.lr_schedule, optimizer)
    mine = {id(one) for one in every}
    given = {id(one) for group in optimizer.param_groups for one in group["params"]}
    if not given <= mine:
        raise ValueError(
            f"the optimizer of the {side} has parameters that do not belong to the {side}: create "
            "it with the parameters that it receives"
        )
    if any(one.requires_grad for one in every) and not any(
        id(one) in given for one in every if one.requires_grad
    ):
        raise ValueError(f"the optimizer of the {side} has none of its trainable parameters")


def notes_on_head(model: ModelParts, train: Examples) -> list[str]:
    """Return notes for the user about a head that trains, but perhaps not as intended."""
    assert model.head is not None
    notes = []
    if not any(one.requires_grad for one in model.head.parameters()):
        notes.append(
            "the head has no trainable parameter: it receives no gradient and does not change; "
            "the tail learns from its output"
        )
    inputs = to_device(sample(train, 2), device_of_model(model.head))
    with trial_copy(model.head) as tried:
        _, given = flatten(_called(tried, inputs, "the head", "its examples"), "the head")
    memory = {one.untyped_storage().data_ptr() for one in _tensors(inputs) if one.numel()}
    if any(one.untyped_storage().data_ptr() in memory for one in given if one.numel()):
        notes.append("the head passes a part of the examples on unchanged, so the server sees it")
    return notes


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
