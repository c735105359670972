"""Tensor parallelism: the mesh of one axis on which ranks divide the matrices of every layer.

    MLP        Y = GELU(X A) B     A by columns, B by rows: one all-reduce of Y forward, one of ∂X
                                   backward
    attention  its heads           the same: query, key and value by columns, the projection by rows

So a layer of a transformer sums 2 b s h numbers forward and 2 b s h backward over the ranks, for b
sequences of length s and width h; by a ring or the backend's own all-reduce a rank sends 2(N-1)/N
of each. That is why tensor neighbours share a host.

All ranks see every example, hold 1/N of each divided layer, and walk the path of one worker.

Source: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from dure.contracts.strategy import Kind, Learner, Place, Strategy
from dure.contracts.task import Task
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.strategy import Parallel, ParallelLearner
from dure.parallel.tensor.written_plan import TensorPlan


@dataclass(frozen=True)
class TensorParallel(Strategy):
    """Ranks divide the layers of the model.

    Args:
        batch_size: examples of a step; None is all the data.
        sequence: between divided layers ranks hold shards of the sequence (reduce-scatter and
            all-gather in place of all-reduce).
        clip_norm: the largest norm that a step's gradient may have; by default any.
        plan: which layers are divided, and how (docs/tensor-parallel.md): ready (the model's own),
            rows, columns or alternating (of a chain of linear layers), or a plan of your own.
    """

    batch_size: int | None = 64
    sequence: bool = False
    clip_norm: float | None = None
    plan: TensorPlan = TensorPlan()  # noqa: RUF009

    name: ClassVar[str] = "tensor-parallel"
    kind: ClassVar[Kind] = "ranks"
    unit: ClassVar[str] = "step"
    moves: ClassVar[frozenset[str]] = frozenset({"sequence", "plan"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", TensorPlan(self.plan))

    @property
    def label(self) -> str:
        return "tensor parallel" + (", sequence" if self.sequence else "") + self.plan.label

    def on(self, workers: int) -> Parallel:
        """The same on a mesh."""
        return Parallel(
            mesh=Mesh(tensor=workers),
            batch_size=self.batch_size,
            microbatches=1,
            schedule="naive",
            sequence=self.sequence,
            clip_norm=self.clip_norm,
            plan=self.plan,
        )

    def check(self, task: Task, workers: int | None) -> None:
        self.on(1 if workers is None else workers).check(task, workers)

    def check_model(self, task: Task, model: nn.Module, workers: int | None) -> None:
        self.on(1 if workers is None else workers).check_model(task, model, workers)

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        return ParallelLearner(task, place, seed, self.on(place.group.size))
