"""Check of a mesh's plan before training: the divided layers on a micro-batch.

Every tensor group runs the same examples, the first micro-batch of the run, before the model is cut
into stages or its parameters are divided. The result of `dure.parallel.tensor.proof` does not
depend on the other axes.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.fresh_model import seeded_model
from dure.contracts.learner import Proof
from dure.contracts.task import Loss, Task
from dure.data.examples import Examples
from dure.machine.devices import free_bytes, is_cpu, to_device
from dure.machine.memory import available_memory, trim_heap
from dure.memory.file_backed_init import lies_in_files
from dure.memory.mapped import WINDOW
from dure.parallel.mesh.mesh import Groups
from dure.parallel.tensor.plan import DivisionPlan
from dure.parallel.tensor.proof import prove_plan
from dure.parallel.weight_broadcast import share_weights
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.meter import reset_peak_memory
from dure.tasks.loss_shares import CountedLoss
from dure.tensors.copies import copy_of

PROVEN = "divided by its plan, the model gives the loss and the gradients of the undivided model"


def prove_layers(
    model: nn.Module,
    plan: DivisionPlan,
    task: Task,
    seed: int,
    *,
    group: Group,
    groups: Groups,
    examples: Examples,
    indices: Tensor,
    device: torch.device,
) -> Proof:
    """Check the plan on the examples of `indices`; all ranks of the mesh call it together.

    Afterwards a tensor group has its rank 0's weights, also if memory did not suffice for the
    check.

    Args:
        model: the undivided model.
        plan: the plan to check.
        task: source of the loss, and of a second model if the model cannot be copied.
        seed: seed of the second model.
        group: all ranks of the mesh.
        groups: the groups of this rank.
        examples: the training examples.
        indices: the examples to run on.
        device: the device of the model.

    Raises:
        PlanError: the divided model computes something else.
    """
    started = time.perf_counter()
    missing = _missing(model, group, groups.tensor.size, device)
    if missing is not None:
        share_weights(model, groups.tensor)
        return Proof(f"the plan was not tried: {missing}", time.perf_counter() - started)
    inputs, targets = _read(examples, indices, device)
    losses = CountedLoss(_own(task.loss), examples)
    at = group.step
    group.step = groups.tensor.step = "the proof of the plan"
    prove_plan(
        model,
        plan,
        inputs,
        lambda outputs: losses.mean(outputs, targets, len(indices)).loss,
        groups.tensor,
        evaluates=task.test is not None or task.validation is not None,
        make=lambda: seeded_model(task, seed).to(device).train(model.training),
        agreeing=group,
    )
    group.step = groups.tensor.step = at
    # The measurements of the run must not include the check.
    trim_heap()
    reset_peak_memory()
    return Proof(PROVEN, time.perf_counter() - started)


def _missing(model: nn.Module, group: Group, degree: int, device: torch.device) -> str | None:
    """Return why memory does not suffice; None if it suffices. The result is equal on all ranks."""
    here = next(ranks for ranks in group.hosts() if group.rank in ranks)
    available = available_memory() if is_cpu(device) else free_bytes(device)
    # Ranks of a host share its memory, and perhaps a device.
    free = float("inf") if available is None else available / len(here)
    rows = group.all_gather_values([float(needed_bytes(model, degree)), free], "the proof")
    for needed, left in rows:
        if needed > left:
            return (
                f"beside the undivided model it needs {needed / 1e9:.3g} GB on each rank, of which "
                f"{left / 1e9:.3g} GB are free"
            )
    return None


def needed_bytes(model: nn.Module, degree: int) -> int:
    """Return the bytes that a rank may need in addition to the undivided model.

    They are its parts of weights and gradients, the largest whole gradient, and another undivided
    model, in case it cannot be copied. For a model in files they are two of its largest parameters,
    because the rest is in files as well. Activations of a micro-batch are not included.
    """
    sizes = [parameter.nbytes for parameter in model.parameters()]
    if lies_in_files(model):
        return 2 * max(sizes) + WINDOW
    total = sum(sizes)
    return total + 2 * total // degree + max(sizes, default=0)


def _read(examples: Examples, indices: Tensor, device: torch.device) -> tuple[Any, Any]:
    # Reading may draw, for example for augmentation: all ranks read with the same seed, and the
    # generators of the run are restored.
    before = generators_state()
    torch.default_generator.manual_seed(0)
    content: tuple[Any, Any] = to_device(examples.batch(indices), device)
    restore_generators(before)
    return content


def _own(loss: Loss) -> Loss:
    """Return a copy of a loss that is a module and can be copied; otherwise the loss itself."""
    if isinstance(loss, nn.Module):
        return copy_of(loss) or loss
    return loss
