"""dure: train one PyTorch model with many machines, by every system that its field uses.

Names are imported when they are first used, so that `import dure` is quick and the command line answers at once.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dure.registration import register_when_imported

__version__ = "0.1.0"

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
    from dure.compare import Comparison as Comparison
    from dure.compare import compare as compare
    from dure.data.examples import Examples as Examples
    from dure.data.partition import IID as IID
    from dure.data.partition import Dirichlet as Dirichlet
    from dure.data.partition import LabelShards as LabelShards
    from dure.data.partition import NaturalKey as NaturalKey
    from dure.data.partition import QuantitySkew as QuantitySkew
    from dure.federated.byzantine import ByzantineGD as ByzantineGD
    from dure.federated.ditto import Ditto as Ditto
    from dure.federated.fed_async import FedAsync as FedAsync
    from dure.federated.fed_avg import FedAvg as FedAvg
    from dure.federated.fed_buff import FedBuff as FedBuff
    from dure.federated.fed_opt import FedAdagrad as FedAdagrad
    from dure.federated.fed_opt import FedAdam as FedAdam
    from dure.federated.fed_opt import FedAvgM as FedAvgM
    from dure.federated.fed_opt import FedYogi as FedYogi
    from dure.federated.fed_per import FedPer as FedPer
    from dure.federated.fed_prox import FedProx as FedProx
    from dure.federated.fed_sgd import FedSGD as FedSGD
    from dure.federated.per_fed_avg import PerFedAvg as PerFedAvg
    from dure.federated.scaffold import Scaffold as Scaffold
    from dure.parallel.combined import Parallel as Parallel
    from dure.parallel.data import DataParallel as DataParallel
    from dure.parallel.hogwild import Hogwild as Hogwild
    from dure.parallel.layers import LayersPerCore as LayersPerCore
    from dure.parallel.mesh import Mesh as Mesh
    from dure.parallel.pipeline.strategy import Pipeline as Pipeline
    from dure.parallel.single import SingleWorker as SingleWorker
    from dure.parallel.tensor.strategy import TensorParallel as TensorParallel
    from dure.parallel.zero.strategy import ZeRO as ZeRO
    from dure.record.run import Run as Run
    from dure.record.run import load_run as load_run
    from dure.report import write_report as write_report
    from dure.stop import Stop as Stop
    from dure.task import Task as Task
    from dure.task import accuracy as accuracy
    from dure.tasks import load_task as load_task
    from dure.train import resume as resume
    from dure.train import train as train
    from dure.worlds.processes import Processes as Processes
    from dure.worlds.simulated import Simulated as Simulated
    from dure.worlds.threads import Threads as Threads
    from dure.worlds.torchrun import Torchrun as Torchrun

_WHERE = {
    "QSGD": "dure.collectives.compression",
    "Cast": "dure.collectives.compression",
    "NoCompression": "dure.collectives.compression",
    "OneBit": "dure.collectives.compression",
    "PowerSGD": "dure.collectives.compression",
    "Sign": "dure.collectives.compression",
    "TopK": "dure.collectives.compression",
    "compare": "dure.compare",
    "Comparison": "dure.compare",
    "Examples": "dure.data.examples",
    "IID": "dure.data.partition",
    "Dirichlet": "dure.data.partition",
    "LabelShards": "dure.data.partition",
    "NaturalKey": "dure.data.partition",
    "QuantitySkew": "dure.data.partition",
    "ParallelSGD": "dure.averaging.parallel_sgd",
    "LocalSGD": "dure.averaging.local_sgd",
    "DiLoCo": "dure.averaging.diloco",
    "ADMM": "dure.averaging.admm",
    "ByzantineGD": "dure.federated.byzantine",
    "Ditto": "dure.federated.ditto",
    "FedAdagrad": "dure.federated.fed_opt",
    "FedAdam": "dure.federated.fed_opt",
    "FedAsync": "dure.federated.fed_async",
    "FedAvg": "dure.federated.fed_avg",
    "FedAvgM": "dure.federated.fed_opt",
    "FedBuff": "dure.federated.fed_buff",
    "FedPer": "dure.federated.fed_per",
    "FedProx": "dure.federated.fed_prox",
    "FedSGD": "dure.federated.fed_sgd",
    "FedYogi": "dure.federated.fed_opt",
    "PerFedAvg": "dure.federated.per_fed_avg",
    "Scaffold": "dure.federated.scaffold",
    "DataParallel": "dure.parallel.data",
    "Hogwild": "dure.parallel.hogwild",
    "LayersPerCore": "dure.parallel.layers",
    "Mesh": "dure.parallel.mesh",
    "Parallel": "dure.parallel.combined",
    "Pipeline": "dure.parallel.pipeline.strategy",
    "SingleWorker": "dure.parallel.single",
    "TensorParallel": "dure.parallel.tensor.strategy",
    "ZeRO": "dure.parallel.zero.strategy",
    "Run": "dure.record.run",
    "load_run": "dure.record.run",
    "write_report": "dure.report",
    "Stop": "dure.stop",
    "Task": "dure.task",
    "accuracy": "dure.task",
    "load_task": "dure.tasks",
    "resume": "dure.train",
    "train": "dure.train",
    "Processes": "dure.worlds.processes",
    "Simulated": "dure.worlds.simulated",
    "Threads": "dure.worlds.threads",
    "Torchrun": "dure.worlds.torchrun",
}

_SUBMODULES = ("collectives", "models", "errors", "parallel", "averaging", "federated", "fleet", "data", "record")

__all__ = sorted([*_WHERE, *_SUBMODULES])


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"dure.{name}")
    else:
        raise AttributeError(f"module 'dure' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps `dure.train` and `dure.compare` functions: an import of the modules they live in, which have the same
    names, would put those in their place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _WHERE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)  # pickle knows plain modules only


sys.modules[__name__].__class__ = _Package
register_when_imported()
