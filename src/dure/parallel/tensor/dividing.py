"""Division of a model from outside, by a plan; the model's code does not change.

    parallelize(model, plan, group)

Every pattern of the plan must match. Nothing changes before the whole plan has been checked.
Parameters that several modules share are divided once, and remain shared. Before the division rank
0 broadcasts the model; the meter does not count this transfer.

Source: Shoeybi et al. 2019, "Megatron-LM", whose layers replace a model's own layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dure.collectives.group import Group
from dure.parallel.tensor.adapted import with_adapters
from dure.parallel.tensor.changes import Tensors
from dure.parallel.tensor.divided import DividedLayer, DividedTensors, mark_parts, parts_of
from dure.parallel.tensor.functions import LengthError
from dure.parallel.tensor.opaque import opaque_layers
from dure.parallel.tensor.plan import Change, DivisionPlan, PlanEntry, Replacement, entries_of
from dure.parallel.tensor.plan_entry import DivisionContext
from dure.parallel.tensor.rng import RngTracker
from dure.parallel.tensor.tied import OwnParts, share_tied
from dure.parallel.weight_broadcast import share_weights


def parallelize(
    model: nn.Module,
    plan: DivisionPlan,
    process_group: Group | dist.ProcessGroup | None = None,
    *,
    overlap: bool | None = None,
) -> None:
    """Divide a model over the ranks of a group by a plan, in place.

    All ranks call this function, with models of equal shapes. All ranks first take rank 0's weights
    and buffers. Create optimizers afterwards, because parameters are replaced by their parts.

    Args:
        model: the model to divide.
        plan: patterns of module names with their plan entries.
        process_group: the ranks; None is all ranks.
        overlap: as in `ColumnParallel`.

    Raises:
        ValueError: a pattern matches nothing, a module does not fit its plan entry, the degree does
            not divide a module, or the model is divided already. The model is then unchanged.
    """
    group = Group.of(process_group)
    found = _found(model, plan)
    share_weights(model, group)
    _divide(model, found, DivisionContext(group, overlap, RngTracker(group, _device_of(model))))


def divide(model: nn.Module, plan: DivisionPlan, group: Group) -> None:
    """Divide a model like `parallelize`, without the broadcast: all ranks have equal models."""
    _divide(
        model,
        _found(model, plan),
        DivisionContext(group, None, RngTracker(group, _device_of(model))),
    )


def _divide(model: nn.Module, found: Sequence[tuple[str, PlanEntry]], at: DivisionContext) -> None:
    """Apply the plan to the modules that were found."""
    layers, changes = _made(model, found, at)
    for change in changes:
        change()
    # By all names: a module at several positions is replaced at each of them.
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in layers:
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, layers[id(module)].train(module.training))
    _leave_at_the_end(model, at.draws)


def check_plan(model: nn.Module, plan: DivisionPlan, degree: int) -> None:
    """Raise ValueError if `parallelize` would raise it for this number of ranks.

    Nothing changes, and no other rank is needed.
    """
    _made(model, _found(model, plan), _alone(model, degree))


def check_lengths(model: nn.Module, plan: DivisionPlan, degree: int, inputs: Any) -> None:
    """Raise LengthError if `inputs` have sequences that this number of ranks cannot divide.

    A copy of the model is divided, and runs on tensors without data; no other rank is needed. If
    the model cannot run on tensors without data, the lengths are not checked.
    """
    try:
        copied = copy.deepcopy(model)
        _divide(copied, _found(copied, plan), _alone(copied, degree))
        with torch.no_grad(), opaque_layers(copied), FakeTensorMode(allow_non_fake_inputs=True):
            copied(inputs)
    except LengthError:
        raise
    # No result: the model may need operations that tensors without data do not support.
    except Exception:
        return


def _alone(model: nn.Module, degree: int) -> DivisionContext:
    """Return the context of the first of `degree` ranks, without communication."""
    # A group of one rank with a larger size: parts are cut by the size, and nothing is sent.
    group = Group()
    group.size = degree
    return DivisionContext(group, False, RngTracker(group, _device_of(model)))


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _found(model: nn.Module, plan: DivisionPlan) -> list[tuple[str, PlanEntry]]:
    """Return the modules that match a plan's patterns, by name, with their entries."""
    if any(parts_of(module) is not None for module in model.modules()):
        raise ValueError(
            "this model is divided already: divide a new one, and load_whole a state into it"
        )
    found: list[tuple[str, PlanEntry]] = []
    for pattern, kinds in plan.items():
        found += _matches(model, pattern, kinds)
    return with_adapters(model, found)


def _made(
    model: nn.Module, found: Sequence[tuple[str, PlanEntry]], at: DivisionContext
) -> tuple[dict[int, DividedLayer], list[Callable[[], None]]]:
    """Return divided layers, by the id of the replaced layer, and changes of other modules."""
    layers: dict[int, DividedLayer] = {}
    said: dict[int, Replacement] = {}
    # By module, so that a module with several names is changed once.
    changes: dict[tuple[int, Change], Callable[[], None]] = {}
    parts: dict[int, OwnParts] = {}
    replaced = {
        id(model.get_submodule(name)) for name, kind in found if isinstance(kind, Replacement)
    }
    for name, kind in found:
        module = model.get_submodule(name)
        if isinstance(kind, Replacement):
            if name == "":
                raise ValueError(
                    "a plan divides layers inside a model, and cannot replace the model itself"
                )
            # A module may match several patterns, or have several names, if their entries agree.
            if said.setdefault(id(module), kind) != kind:
                raise ValueError(
                    f"the plan has two entries for {name}: {said[id(module)]} and {kind}"
                )
            if id(module) not in layers:
                layers[id(module)] = kind.make(name, module, at)
        elif id(module) not in replaced:
            if isinstance(kind, Tensors):
                _add(parts.setdefault(id(module), {}), kind.parts(name, module, at), name)
            else:
                changes.setdefault((id(module), kind), kind.change(name, module, at))
    for name, kind in found:
        module = model.get_submodule(name)
        # Further entries for a layer that is replaced apply to the layer that replaces it.
        if not isinstance(kind, Replacement) and id(module) in replaced:
            layer = layers[id(module)]
            if isinstance(kind, Tensors):
                kind.parts(name, layer, at)  # raises ValueError
            else:
                changes.setdefault((id(module), kind), kind.change(name, layer, at))
    names = share_tied(model, layers, parts)
    own = [
        _installing(module, parts[id(module)], at.group)
        for module in model.modules()
        if id(module) in parts
    ]
    return layers, [*names, *own, *changes.values()]


def _add(known: OwnParts, more: OwnParts, name: str) -> None:
    for own, (part, division) in more.items():
        _, before = known.setdefault(own, (part, division))
        if before != division:
            raise ValueError(f"the plan divides {name}.{own} in two ways: {before} and {division}")


def _installing(module: nn.Module, parts: OwnParts, group: Group) -> Callable[[], None]:
    """Return a function that replaces a module's tensors by their parts."""

    def install() -> None:
        for own, (part, _) in parts.items():
            # setattr preserves the kind: parameter, buffer or plain tensor
            setattr(module, own, part)
        mark_parts(
            module, DividedTensors({own: division for own, (_, division) in parts.items()}, group)
        )

    return install


def _matches(
    model: nn.Module, pattern: str, kinds: PlanEntry | Sequence[PlanEntry]
) -> list[tuple[str, PlanEntry]]:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if fits(name, pattern)]
    if not names:
        raise ValueError(f"the plan's {pattern!r} matches no module of this {type(model).__name__}")
    each = entries_of(kinds)
    for kind in each:
        if not isinstance(kind, PlanEntry):
            raise ValueError(
                f"the plan has {kind!r} for {pattern!r}, which is not one of the available kinds"
            )
    return list(product(names, each))


def fits(name: str, pattern: str) -> bool:
    """Return whether a module's name matches a pattern, segment by segment."""
    names = name.split(".")
    patterns = pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _leave_at_the_end(model: nn.Module, draws: RngTracker) -> None:
    """Make all ranks draw equal numbers after every forward pass, also after a failed pass."""

    def before(module: nn.Module, inputs: Any) -> None:
        # Drop the state of a failed pass.
        draws.forget()

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        draws.leave()

    model.register_forward_pre_hook(before)
    # after an error as well
    model.register_forward_hook(after, always_call=True)
