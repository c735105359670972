"""dure: train a PyTorch model with many machines, by every system that its field uses.

Names are imported when they are first used, so that `import dure` is quick and the command line
answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dure import catalog
from dure.machine.torch_backend import register_when_imported

__version__ = "0.1.0"

# For editors and type checkers, which do not run `__getattr__`; the same names as below.
if TYPE_CHECKING:
    from dure.averaging.admm import ADMM as ADMM
    from dure.averaging.diloco import DiLoCo as DiLoCo
    from dure.averaging.local_sgd import LocalSGD as LocalSGD
    from dure.averaging.parallel_sgd import ParallelSGD as ParallelSGD
    from dure.collectives.compression import QSGD as QSGD
    from dure.collectives.compression import Cast as Cast
    from dure.collectives.compression import NoCompression as NoCompression
    from dure.collectives.compression import OneBit as OneBit
    from dure.collectives.compression import PowerSGD as PowerSGD
    from dure.collectives.compression import Sign as Sign
    from dure.collectives.compression import TopK as TopK
    from dure.contracts.adapter import LoRA as LoRA
    from dure.contracts.metric import SumMetric as SumMetric
    from dure.contracts.own_loss import OwnLoss as OwnLoss
    from dure.contracts.stop import Stop as Stop
    from dure.contracts.strategy import Strategy as Strategy
    from dure.contracts.task import Task as Task
    from dure.contracts.task import accuracy as accuracy
    from dure.contracts.world import World as World
    from dure.data.datasets import DatasetExamples as DatasetExamples
    from dure.data.examples import Examples as Examples
    from dure.data.partition import IID as IID
    from dure.data.partition import Blocks as Blocks
    from dure.data.partition import Dirichlet as Dirichlet
    from dure.data.partition import FeatureSkew as FeatureSkew
    from dure.data.partition import LabelShards as LabelShards
    from dure.data.partition import NaturalKey as NaturalKey
    from dure.data.partition import QuantitySkew as QuantitySkew
    from dure.data.sampling import class_weights as class_weights
    from dure.data.shards import Shards as Shards
    from dure.data.streams import StreamExamples as StreamExamples
    from dure.deploy.world import Network as Network
    from dure.errors import StopRun as StopRun
    from dure.federated.algorithms.byzantine import ByzantineGD as ByzantineGD
    from dure.federated.algorithms.ditto import Ditto as Ditto
    from dure.federated.algorithms.fed_async import FedAsync as FedAsync
    from dure.federated.algorithms.fed_avg import FedAvg as FedAvg
    from dure.federated.algorithms.fed_buff import FedBuff as FedBuff
    from dure.federated.algorithms.fed_opt import FedAdagrad as FedAdagrad
    from dure.federated.algorithms.fed_opt import FedAdam as FedAdam
    from dure.federated.algorithms.fed_opt import FedAvgM as FedAvgM
    from dure.federated.algorithms.fed_opt import FedYogi as FedYogi
    from dure.federated.algorithms.fed_per import FedPer as FedPer
    from dure.federated.algorithms.fed_prox import FedProx as FedProx
    from dure.federated.algorithms.fed_sgd import FedSGD as FedSGD
    from dure.federated.algorithms.local_only import LocalOnly as LocalOnly
    from dure.federated.algorithms.per_fed_avg import PerFedAvg as PerFedAvg
    from dure.federated.algorithms.scaffold import Scaffold as Scaffold
    from dure.federated.privacy.privacy_settings import Privacy as Privacy
    from dure.federated.privacy.secure_aggregation.settings import (
        SecureAggregation as SecureAggregation,
    )
    from dure.federated.privacy.secure_aggregation.settings import (
        SecureAggregationPlus as SecureAggregationPlus,
    )
    from dure.federated.privacy.user_level.settings import UserLevel as UserLevel
    from dure.parallel.data.strategy import DataParallel as DataParallel
    from dure.parallel.mesh.mesh import Mesh as Mesh
    from dure.parallel.mesh.pipeline import Pipeline as Pipeline
    from dure.parallel.mesh.strategy import Parallel as Parallel
    from dure.parallel.mesh.tensor_parallel import TensorParallel as TensorParallel
    from dure.parallel.single_worker import SingleWorker as SingleWorker
    from dure.parallel.threads.hogwild import Hogwild as Hogwild
    from dure.parallel.threads.layers_per_core import LayersPerCore as LayersPerCore
    from dure.parallel.zero.strategy import ZeRO as ZeRO
    from dure.parameter_server.downpour import Downpour as Downpour
    from dure.parameter_server.strategy import ParameterServer as ParameterServer
    from dure.privacy.dp_sgd import DPSGD as DPSGD
    from dure.record.run import Run as Run
    from dure.record.run import load_run as load_run
    from dure.report import write_report as write_report
    from dure.run.backup import backup as backup
    from dure.run.client import Client as Client
    from dure.run.compare import Comparison as Comparison
    from dure.run.compare import compare as compare
    from dure.run.existing_runs import resume_comparison as resume_comparison
    from dure.run.join import join as join
    from dure.run.personalise import personal_model as personal_model
    from dure.run.personalise import personalise as personalise
    from dure.run.replay import replay as replay
    from dure.run.serve import serve as serve
    from dure.run.train import resume as resume
    from dure.run.train import train as train
    from dure.split.export import end_of as end_of
    from dure.split.export import head_of as head_of
    from dure.split.export import tail_of as tail_of
    from dure.split.in_turn import SplitLearning as SplitLearning
    from dure.split.parallel import ParallelSplit as ParallelSplit
    from dure.split.parties.model import VerticalModel as VerticalModel
    from dure.split.split_fed import SplitFed as SplitFed
    from dure.split.vertical import VerticalSplit as VerticalSplit
    from dure.tasks.builtin import load_task as load_task
    from dure.tasks.parts import HeadTask as HeadTask
    from dure.tasks.parts import TailTask as TailTask
    from dure.tasks.parts import joined as joined
    from dure.trainers.simulate import simulate as simulate
    from dure.worlds.processes.world import Processes as Processes
    from dure.worlds.simulated import Simulated as Simulated
    from dure.worlds.threads import Threads as Threads
    from dure.worlds.torchrun.world import Torchrun as Torchrun

_WHERE = {
    **{system.kind: system.module for system in catalog.SYSTEMS.values()},
    **{world.kind: world.module for world in catalog.WORLDS.values()},
    "QSGD": "dure.collectives.compression",
    "Cast": "dure.collectives.compression",
    "NoCompression": "dure.collectives.compression",
    "OneBit": "dure.collectives.compression",
    "PowerSGD": "dure.collectives.compression",
    "Sign": "dure.collectives.compression",
    "TopK": "dure.collectives.compression",
    "compare": "dure.run.compare",
    "Comparison": "dure.run.compare",
    "Examples": "dure.data.examples",
    "DatasetExamples": "dure.data.datasets",
    "StreamExamples": "dure.data.streams",
    "class_weights": "dure.data.sampling",
    "OwnLoss": "dure.contracts.own_loss",
    "Shards": "dure.data.shards",
    "IID": "dure.data.partition",
    "Dirichlet": "dure.data.partition",
    "LabelShards": "dure.data.partition",
    "NaturalKey": "dure.data.partition",
    "Blocks": "dure.data.partition",
    "FeatureSkew": "dure.data.partition",
    "QuantitySkew": "dure.data.partition",
    "Privacy": "dure.federated.privacy.privacy_settings",
    "SecureAggregation": "dure.federated.privacy.secure_aggregation.settings",
    "SecureAggregationPlus": "dure.federated.privacy.secure_aggregation.settings",
    "UserLevel": "dure.federated.privacy.user_level.settings",
    "DPSGD": "dure.privacy.dp_sgd",
    "Mesh": "dure.parallel.mesh.mesh",
    "Run": "dure.record.run",
    "load_run": "dure.record.run",
    "write_report": "dure.report",
    "Stop": "dure.contracts.stop",
    "StopRun": "dure.errors",
    "SumMetric": "dure.contracts.metric",
    "Strategy": "dure.contracts.strategy",
    "World": "dure.contracts.world",
    "Task": "dure.contracts.task",
    "LoRA": "dure.contracts.adapter",
    "HeadTask": "dure.tasks.parts",
    "TailTask": "dure.tasks.parts",
    "joined": "dure.tasks.parts",
    "VerticalModel": "dure.split.parties.model",
    "head_of": "dure.split.export",
    "tail_of": "dure.split.export",
    "end_of": "dure.split.export",
    "accuracy": "dure.contracts.task",
    "load_task": "dure.tasks.builtin",
    "backup": "dure.run.backup",
    "Client": "dure.run.client",
    "join": "dure.run.join",
    "personal_model": "dure.run.personalise",
    "personalise": "dure.run.personalise",
    "replay": "dure.run.replay",
    "resume": "dure.run.train",
    "resume_comparison": "dure.run.existing_runs",
    "serve": "dure.run.serve",
    "train": "dure.run.train",
    "simulate": "dure.trainers.simulate",
}

_SUBMODULES = (
    "collectives",
    "errors",
    "parallel",
    "parameter_server",
    "averaging",
    "federated",
    "fleet",
    "data",
    "record",
)

_MODULES = {name: f"dure.{name}" for name in _SUBMODULES} | {
    "models": "dure.tasks.models",
    "client": "dure.trainers.patch",
}

__all__ = sorted([*_WHERE, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'dure' has no attribute {name!r}")
    # Python finds the name directly next time, without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


# So that init_process_group("dure") works after `import dure`, whichever came first.
register_when_imported("dure.collectives.shared_memory.backend")
