"""Extension of torch functions that admit only gloo, to groups of this backend.

    dist.monitored_barrier                  the group's own `monitored_barrier`
    DistributedDataParallel's built-in      torch's C++ takes the futures of a C++ group only;
      hook that compresses to 16 bits       torch's own hook in Python does the same
    DistributedDataParallel's log           has the settings of gloo, used between hosts
    torch.compile                           skips the calls of a group, with a graph break

Applied with the first group of a process; other groups are unaffected.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    BuiltinCommHookType,
    _register_comm_hook,
    distributed_c10d,
)
from torch.nn.parallel import DistributedDataParallel

from dure.machine.torch_backend import gloo_settings, when_imported

_COMPILER = "torch._dynamo.trace_rules"
_NOT_COMPILED = ("dure.collectives", "dure.tensors", "dure.errors")


@functools.cache
def patch_torch(ours: type[dist.ProcessGroup]) -> None:
    """Apply all extensions, once. ours: the class of this backend's groups."""
    _admit_to_monitored_barrier(ours)
    _admit_to_the_built_in_hook(ours)
    _admit_to_the_log(ours)
    when_imported(_COMPILER, _leave_calls_alone)


def _admit_to_monitored_barrier(ours: type[dist.ProcessGroup]) -> None:
    theirs: Callable[..., None] = distributed_c10d.monitored_barrier

    @functools.wraps(theirs)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        chosen = dist.group.WORLD if group is None else group
        if not isinstance(chosen, ours):
            theirs(group, timeout, wait_all_ranks)
            return
        seconds = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        chosen.monitored_barrier(seconds, wait_all_ranks=wait_all_ranks)  # type: ignore[attr-defined]

    for module in (dist, distributed_c10d):
        module.monitored_barrier = monitored_barrier  # type: ignore[attr-defined]


def _admit_to_the_built_in_hook(ours: type[dist.ProcessGroup]) -> None:
    theirs = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(theirs)
    def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        compresses = comm_hook_type == BuiltinCommHookType.FP16_COMPRESS
        if not (compresses and isinstance(self.process_group, ours)):
            theirs(self, comm_hook_type)  # type: ignore[no-untyped-call]
            return
        hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
        _register_comm_hook(self.reducer, self.process_group, hooks.fp16_compress_hook)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    DistributedDataParallel._register_builtin_comm_hook = _register_builtin_comm_hook  # type: ignore[method-assign]


def _admit_to_the_log(ours: type[dist.ProcessGroup]) -> None:
    theirs = DistributedDataParallel._get_ddp_logging_data

    @functools.wraps(theirs)
    def _get_ddp_logging_data(self: Any) -> dict[str, Any]:
        data: dict[str, Any] = theirs(self)  # type: ignore[no-untyped-call]
        return {**gloo_settings(), **data} if isinstance(self.process_group, ours) else data

    DistributedDataParallel._get_ddp_logging_data = _get_ddp_logging_data  # type: ignore[method-assign]


def _leave_calls_alone() -> None:
    """Exclude the functions of this backend from compilation.

    torch has the same rule for its own collectives.
    """
    rules = sys.modules[_COMPILER]
    for name in _NOT_COMPILED:
        rules.add(name)
