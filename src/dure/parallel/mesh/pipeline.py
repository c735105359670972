"""Pipeline parallelism: a mesh with a single axis, on which ranks store stages of the model.

    stage s computes micro-batch m while stage s-1 computes m+1

The model is divided between layers, and micro-batches pass through the stages. Every step computes
the gradient of the joint batch with any schedule, so training follows that of a single worker.
Schedules differ in the idle time of ranks (the bubble) and in the number of micro-batches whose
activations are stored: see `dure.parallel.pipeline.builders`.

For every example, the values at each boundary cross it once forward, and their gradients cross it
once backward.

Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", and 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"; Qi et al. 2023, "Zero Bubble
Pipeline Parallelism".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dure.contracts.strategy import RunTraits, Traits
from dure.data.sampling import JOINT_SAMPLING
from dure.memory.offload.offload_setting import Offload, parse_offload
from dure.parallel.learner_offloading import NO_OFFLOAD
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.single_axis import SingleAxisMesh
from dure.parallel.mesh.strategy import TRAINS_WITH, Parallel
from dure.parallel.pipeline.balance import Balance
from dure.parallel.pipeline.schedule import Schedule, is_user_defined
from dure.parallel.pipeline.trace import TRACES
from dure.settings import parse_fields


@dataclass(frozen=True)
class Pipeline(SingleAxisMesh):
    """Pipeline parallelism: ranks store stages of the model.

    Args:
        batch_size: examples of a step; None is all the data.
        microbatches: M, the parts of a batch that pass through the stages one after the other.
        schedule: naive, gpipe, 1f1b, interleaved, zero-bubble or zero-bubble-v; or a list of your
            own, as text.
        stages_per_rank: stages on each rank in the interleaved schedule; by default two.
        cut: names of the modules at which the stages after the first begin; by default dure cuts
            the model into balanced stages.
        balance: quantity that stages balance: estimated or measured time, or memory.
        recompute: stages store their inputs alone, and recompute the rest for backward.
        offload: tensors in files while they are not needed, such as optimizer,activations: of
            optimizer and activations.
        offload_folder: folder of these files, on a disk; by default the first usual folder on a
            disk.
    """

    batch_size: int | None = 64
    microbatches: int = 4
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    cut: tuple[str, ...] | None = None
    balance: Balance = "estimated"
    recompute: bool = False
    offload: Offload = NO_OFFLOAD
    offload_folder: str | None = None

    name: ClassVar[str] = "pipeline"
    traits: ClassVar[Traits] = Traits(
        kind="ranks",
        unit="step",
        trains_with=TRAINS_WITH,
        samples=JOINT_SAMPLING,
        moves=frozenset(
            {"schedule", "stages_per_rank", "cut", "balance", "recompute"}
            | {"offload", "offload_folder"}
        ),
    )

    def __post_init__(self) -> None:
        parse_fields(self, {"offload": parse_offload})

    @property
    def label(self) -> str:
        strategy = self.on(1)
        own = (
            Schedule.parse(self.schedule).name if is_user_defined(self.schedule) else self.schedule
        )
        return f"pipeline {own}, {strategy.most} micro-batch{'' if strategy.most == 1 else 'es'}"

    @property
    def run_traits(self) -> RunTraits:
        return RunTraits(
            # Another cut adds shared gradients, and the norm of the gradient, in another order.
            deterministic=self.balance != "measured",
            spares_memory=bool(self.offload),
            imports=(TRACES,),
        )

    def on(self, workers: int | None) -> Parallel:
        return Parallel(
            mesh=Mesh(pipeline=workers or 1),
            batch_size=self.batch_size,
            microbatches=self.microbatches,
            schedule=self.schedule,
            stages_per_rank=self.stages_per_rank,
            cut=self.cut,
            balance=self.balance,
            recompute=self.recompute,
            offload=self.offload,
            offload_folder=self.offload_folder,
        )
