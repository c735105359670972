"""The layers of a mesh are tried before they train: the plan that divides them, on one micro-batch.

Every tensor group tries the same examples, the first micro-batch of the run, before the model is
cut into stages or its parameters are divided: what `dure.parallel.tensor.proof` says of a plan does
not depend on the other axes.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.strategy import Proof, seeded_model
from dure.contracts.task import Loss, Task
from dure.data.examples import Examples
from dure.machine.devices import to_device
from dure.machine.memory import available_memory, give_back
from dure.memory.mapped import WINDOW
from dure.memory.undivided import lies_in_files
from dure.parallel.first_weights import share_weights
from dure.parallel.mesh.mesh import Groups
from dure.parallel.tensor.plan import Plan
from dure.parallel.tensor.proof import prove_plan
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.meter import reset_peak_memory
from dure.tasks.loss_shares import CountedLoss
from dure.tensors.copies import copy_of

PROVEN = "divided by its plan, the model gives the loss and the gradients of the undivided model"


def prove_layers(
    model: nn.Module,
    plan: Plan,
    task: Task,
    seed: int,
    *,
    group: Group,
    groups: Groups,
    examples: Examples,
    indices: Tensor,
    device: torch.device,
) -> Proof:
    """Tries the plan on the examples of `indices`; all ranks of the mesh call it together.

    Rank 0's weights are afterwards those of its tensor group, also where nothing could be tried.

    group: all ranks. Raises PlanError where the divided model computes something else.
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
    # The run is measured as if nothing had been tried.
    give_back()
    reset_peak_memory()
    return Proof(PROVEN, time.perf_counter() - started)


def _missing(model: nn.Module, group: Group, degree: int, device: torch.device) -> str | None:
    """Why there is not enough memory, if so: the same on all ranks."""
    here = next(ranks for ranks in group.hosts() if group.rank in ranks)
    if device.type == "cuda":
        free: float = torch.cuda.mem_get_info(device)[0]
    else:
        available = available_memory()
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
    """What a rank may need beside the undivided model.

    Its parts of weights and gradients, the largest whole gradient, and another undivided model,
    where it cannot be copied; of a model in files two of its largest parameters alone, for the rest
    lies in files as well. Activations come on top; they are those of one micro-batch.
    """
    sizes = [parameter.nbytes for parameter in model.parameters()]
    if lies_in_files(model):
        return 2 * max(sizes) + WINDOW
    total = sum(sizes)
    return total + 2 * total // degree + max(sizes, default=0)


def _read(examples: Examples, indices: Tensor, device: torch.device) -> tuple[Any, Any]:
    # Reading may draw, such as for augmentation: all ranks read alike, and the run feels nothing.
    before = generators_state()
    torch.default_generator.manual_seed(0)
    content: tuple[Any, Any] = to_device(examples.batch(indices), device)
    restore_generators(before)
    return content


def _own(loss: Loss) -> Loss:
    """The loss, with a state of its own where it is a module that can be copied."""
    if isinstance(loss, nn.Module):
        return copy_of(loss) or loss
    return loss
