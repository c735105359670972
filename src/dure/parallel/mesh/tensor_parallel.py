"""Tensor parallelism: a mesh with a single axis, on which ranks divide the matrices of every layer.

    MLP        Y = GELU(X A) B     A by columns, B by rows: an all-reduce of Y forward, an
                                   all-reduce of ∂X backward
    attention  its heads           the same: query, key and value by columns, the projection by rows

So a transformer's layer sums 2 b s h numbers forward and 2 b s h backward over the ranks, for b
sequences of length s and width h. With a ring or the backend's own all-reduce a rank sends 2(N-1)/N
of each. For this reason tensor neighbours share a host.

All ranks see every example and store 1/N of each divided layer; training follows that of a single
worker.

Source: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from dure.contracts.learner import Learner, Proof
from dure.contracts.strategy import RunTraits, Traits
from dure.contracts.task import Task
from dure.contracts.world import RankContext, World
from dure.data.sampling import JOINT_SAMPLING
from dure.memory.offload.offload_setting import Offload, parse_offload
from dure.memory.recompute_setting import Recompute, as_recompute
from dure.parallel.learner_offloading import NO_OFFLOAD
from dure.parallel.learner_recomputation import (
    NO_RECOMPUTE,
    RecomputeRequest,
    check_recompute,
    prove_recompute,
)
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.single_axis import SingleAxisMesh
from dure.parallel.mesh.strategy import TRAINS_WITH, Parallel, ParallelLearner
from dure.parallel.tensor.written_plan import TensorPlan
from dure.settings import parse_fields


@dataclass(frozen=True)
class TensorParallel(SingleAxisMesh):
    """Tensor parallelism: ranks divide the layers of the model.

    Args:
        batch_size: examples of a step; None is all the data.
        sequence: between divided layers ranks hold shards of the sequence (reduce-scatter and
            all-gather in place of all-reduce).
        plan: division of the layers (docs/tensor-parallel.md): ready (dure's own), hf (Hugging
            Face's), rows, columns or alternating (of chains of linear layers), or your own plan.
        offload: tensors in files while they are not needed, such as optimizer,activations: of
            optimizer and activations.
        offload_folder: folder of these files, on a disk; by default the first usual folder on a
            disk.
        recompute: modules that are recomputed for backward and store their inputs alone, such as
            layers.*; or all, those with which a step takes the least memory; none by default.
        memory: limit of a worker's step, such as 2GB: its parts of weights, gradients and
            optimizer's state, and the activations of the undivided model. As few modules as
            possible are recomputed.
    """

    batch_size: int | None = 64
    sequence: bool = False
    plan: TensorPlan = TensorPlan()  # noqa: RUF009
    offload: Offload = NO_OFFLOAD
    offload_folder: str | None = None
    recompute: Recompute = NO_RECOMPUTE
    memory: str | None = None

    name: ClassVar[str] = "tensor-parallel"
    traits: ClassVar[Traits] = Traits(
        kind="ranks",
        unit="step",
        trains_with=TRAINS_WITH,
        samples=JOINT_SAMPLING,
        moves=frozenset({"sequence", "plan", "offload", "offload_folder", "recompute", "memory"}),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", TensorPlan(self.plan))
        object.__setattr__(self, "recompute", as_recompute(self.recompute))
        parse_fields(self, {"offload": parse_offload})

    @property
    def label(self) -> str:
        return "tensor parallel" + (", sequence" if self.sequence else "") + self.plan.label

    @property
    def run_traits(self) -> RunTraits:
        return RunTraits(spares_memory=bool(self.offload))

    def on(self, workers: int | None) -> Parallel:
        return Parallel(
            mesh=Mesh(tensor=workers or 1),
            batch_size=self.batch_size,
            microbatches=1,
            schedule="naive",
            sequence=self.sequence,
            offload=self.offload,
            offload_folder=self.offload_folder,
            plan=self.plan,
            recompute=bool(self.recompute),
            memory=self.memory,
        )

    def _again(self, task: Task, workers: int | None) -> RecomputeRequest:
        return self.on(workers).again(task)._replace(recompute=self.recompute)

    def check(self, task: Task, world: World) -> None:
        check_recompute(self.recompute, self.memory, self.name)
        super().check(task, world)

    def prove(self, task: Task, model: nn.Module, world: World) -> Proof | None:
        """Check the requested recomputation; the ranks check the divided layers."""
        self.check_model(task, model, world)
        return prove_recompute(self._again(task, world.workers), task, model)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        workers = context.group.size
        return ParallelLearner(task, context, seed, self.on(workers), self._again(task, workers))
