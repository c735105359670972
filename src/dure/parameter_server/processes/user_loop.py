"""Servers and workers in a user's training loop: `join`, on every rank of a job.

    worker = ps.join(model, optimizer, servers=1, staleness=2)
    if worker is not None:  # a rank that led, or served, is done
        with worker:
            for inputs, targets in my_part_of_the_data:
                worker.pull()
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                worker.push()

Rank 0 leads, the next ranks are servers, the rest workers. The servers make the steps, with an
optimizer of the class and settings of the given one. All ranks begin with rank 0's weights and
buffers, and rank 0's model has the servers' weights when all workers have left.

Such a run has neither rounds nor batches: each worker has data of its own, makes any number of
steps, and leaves at any time. The steps of a lost worker are not replaced. A step of a worker sends
d bytes up and d down, for d bytes of trained weights.

Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", section 3.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dure.collectives.compression import NoCompression
from dure.collectives.group import Group
from dure.collectives.roll_call import with_lost_rank_diagnosis
from dure.contracts.lr_schedule import LRSchedule, check_schedule, factor_at
from dure.contracts.world import RankContext
from dure.errors import PeerLostError, described
from dure.parallel.data.reducer import check_same_shapes
from dure.parallel.weight_broadcast import share_weights
from dure.parallel.zero.agreement import raise_on_all_ranks
from dure.parameter_server.embeddings import check_no_tables
from dure.parameter_server.graceful_stop import ResumePoint
from dure.parameter_server.manager import Manager
from dure.parameter_server.messages import MANAGER, server
from dure.parameter_server.optimizer import OptimizerRecipe, check_new
from dure.parameter_server.plan import ParameterServerPlan, check_model, in_words, states_of_keys
from dure.parameter_server.processes.endpoint import Endpoint
from dure.parameter_server.processes.meeting import meet, ranks_of
from dure.parameter_server.processes.messages import RankFailed
from dure.parameter_server.processes.serving import serve
from dure.parameter_server.processes.user_loop_leader import UserLoopLeader
from dure.parameter_server.processes.user_loop_worker import Worker
from dure.parameter_server.server import ShardServer
from dure.parameter_server.shard import Terms
from dure.record.meter import Meter
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import FlatParameters, by_dtype, trainable_parameters

PATIENCE = 10.0
"""Seconds of silence after which a process is dropped, at most the deadline, but at least 2."""


@dataclass(frozen=True)
class UserLoopPlan(ParameterServerPlan):
    """Plan of workers with data of their own."""

    @property
    def shares_data(self) -> bool:
        return False


def join(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    servers: int = 1,
    staleness: int | None = 0,
    replicas: int = 0,
    lr_schedule: LRSchedule | None = None,
    slows_stale: bool = False,
    process_group: Group | dist.ProcessGroup | None = None,
    deadline: float = 60.0,
) -> Worker | None:
    """Take part in a run of servers and workers; all ranks call this with equal arguments.

    Args:
        model: a model on the CPU, of equal shapes on all ranks. All begin with rank 0's weights and
            buffers.
        optimizer: a new optimizer over the model's parameters; the servers use its class and
            settings.
        servers: number of servers that share the weights; the ranks behind them are workers.
        staleness: steps by which a worker may be ahead of the slowest: 0 is synchronous, None is
            unbounded.
        replicas: copies of each server's weights, 0 or 1: with a copy, a server may fail.
        lr_schedule: the factor of the learning rates at the clock of the pushing worker, as in a
            `Task`.
        slows_stale: whether an update whose gradient is n updates old counts one n-th.
        process_group: a group of torch.distributed of any backend for CPU tensors, or a
            `dure.collectives.Group`; None is all ranks. The group is used for the setup alone.
        deadline: seconds until a pull times out.

    Returns the worker, on a rank that is a worker. On other ranks the call returns None when all
    workers have left; rank 0's model then has their weights, and the buffers of the first worker.

    Raises ValueError, on every rank and before any work, for arguments, a model or an optimizer
    that servers cannot use. On rank 0 and on servers it raises PeerLostError if the run cannot
    continue: weights were lost, or all workers.
    """
    group = with_lost_rank_diagnosis(process_group)
    workers = tuple(range(group.size - 1 - servers))
    plan = UserLoopPlan(
        servers=servers,
        groups=(workers,),
        batch_size=None,
        staleness=staleness,
        period=None,
        replicas=replicas,
        slows_stale=slows_stale,
        compression=NoCompression(),
        accumulate=1,
    )
    with raise_on_all_ranks(group, "the checks of the parameter server"):
        _check(plan, group, deadline)
        _check_optimizer(model, optimizer, lr_schedule)
        plan.layout(model)
        terms = _terms(plan, model, optimizer, lr_schedule)
    everything = [*model.parameters(), *model.buffers()]
    check_same_shapes(everything, group)
    _check_same(plan, terms.recipe, group)
    share_weights(model, group)
    port = meet(group, plan, model)
    if group.rank > servers:
        return _work(plan, terms, model, group.rank - 1 - servers, port, deadline)
    if group.rank == 0:
        _lead(plan, terms, model, port, deadline)
    else:
        _serve(plan, terms, model, group.rank - 1, port)
    return None


# Checks


def _check(plan: ParameterServerPlan, group: Group, deadline: float) -> None:
    """Check the settings of a run; raises ValueError for invalid settings."""
    if plan.servers < 1:
        raise ValueError(f"servers is {plan.servers}, but it has to be 1 or more")
    if not plan.workers:
        raise ValueError(
            f"servers={plan.servers} and a worker need {ranks_of(plan) + 1} ranks including the "
            f"leader, but here {'is' if group.size == 1 else 'are'} {group.size}: start more, "
            "such as by torchrun --nproc-per-node, and call torch.distributed.init_process_group "
            "first"
        )
    if group.process_group is not None and not group.backend(torch.device("cpu")):
        raise ValueError('the group cannot send CPU tensors: use the backend "dure" or gloo')
    if plan.staleness is not None and plan.staleness < 0:
        raise ValueError(
            f"staleness is {plan.staleness}, but it has to be 0 or more (None: unlimited)"
        )
    if plan.slows_stale and plan.staleness == 0:
        raise ValueError(
            "slows_stale applies to stale gradients, but with staleness=0 no gradient is stale"
        )
    if not 0 < deadline < math.inf:
        raise ValueError(
            f"deadline is {deadline}, but it has to be a number of seconds greater than 0"
        )


def _check_optimizer(
    model: nn.Module, optimizer: Optimizer, lr_schedule: LRSchedule | None
) -> None:
    """Check that servers can use the model and the optimizer; raises ValueError if not."""
    lazy = next((name for name, one in model.named_parameters() if is_lazy(one)), None)
    if lazy is not None:
        raise ValueError(f"{lazy} has no shape yet: call the model on an input before join")
    check_model(model)
    check_no_tables(model)
    kind = type(optimizer).__name__
    known = {id(parameter) for parameter in model.parameters()}
    handed_over = [one for group in optimizer.param_groups for one in group["params"]]
    if any(id(one) not in known for one in handed_over):
        raise ValueError(
            f"{kind} has a parameter that does not belong to the model: create it for this model"
        )
    check_new(optimizer)
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"a torch scheduler changes the learning rates of {kind} here, but not at the "
            "servers: give lr_schedule instead"
        )
    check_schedule(lr_schedule, optimizer)


def _terms(
    plan: ParameterServerPlan,
    model: nn.Module,
    optimizer: Optimizer,
    lr_schedule: LRSchedule | None,
) -> Terms:
    """Return the training terms of the shards. Raises ValueError as `OptimizerRecipe.of`."""
    return Terms(
        recipe=OptimizerRecipe.of(optimizer, list(by_dtype(trainable_parameters(model)).values())),
        staleness=plan.staleness,
        schedule=None if lr_schedule is None else partial(factor_at, lr_schedule),
        slows=plan.slows_stale,
    )


def _check_same(plan: ParameterServerPlan, recipe: OptimizerRecipe, group: Group) -> None:
    """Check that all ranks have equal settings and optimizers; raises ValueError on every rank."""
    text = repr((plan, recipe.kind, [sorted(one.items()) for one in recipe.groups], recipe.spans))
    # 6 bytes, since float64 represents every integer below 2^53.
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
    rows = group.all_gather_values([float(number)], "comparison of the settings")
    others = [str(rank) for rank, row in enumerate(rows) if row != rows[0]]
    if others:
        raise ValueError(
            f"rank {', '.join(others)} has other settings, or another optimizer, than rank 0: "
            "call join with the same on all ranks"
        )


# Roles of ranks


def _work(
    plan: ParameterServerPlan,
    terms: Terms,
    model: nn.Module,
    number: int,
    endpoint: Endpoint,
    deadline: float,
) -> Worker:
    worker = Worker(number, model, plan, terms.recipe.plain, endpoint, deadline)
    worker.begin()
    return worker


def _serve(
    plan: ParameterServerPlan, terms: Terms, model: nn.Module, number: int, endpoint: Endpoint
) -> None:
    """Serve until all workers have left."""
    name = server(number)
    try:
        # A connection loses messages only by breaking, so retries need no timeout.
        own = ShardServer(number, plan.layout(model), terms, patience=math.inf)
        if not serve(own, endpoint, RankContext(Group(None, Meter(name)))):
            raise PeerLostError((0,), "serving", "the training", "has ended the run")
    except PeerLostError:
        raise
    except BaseException as error:
        endpoint.say(MANAGER, RankFailed(name, "the training", "error", described(error)))
        raise
    finally:
        endpoint.close()


def _lead(
    plan: ParameterServerPlan, terms: Terms, model: nn.Module, endpoint: Endpoint, deadline: float
) -> None:
    """Lead until all workers have left; the model then has the servers' weights."""
    flat = FlatParameters(model)
    shards = plan.shards(model)
    patience = min(PATIENCE, max(2.0, deadline))
    manager = Manager(
        plan.layout(model), plan.servers, plan.staleness, patience, plan.replicas, inherits=False
    )
    holds = in_words(shards, flat.buffers)
    leader = UserLoopLeader(plan, manager, plan.all_portions(model), holds, endpoint, deadline)
    try:
        standing = ResumePoint(dict.fromkeys(plan.workers, 0), [() for _ in plan.groups])
        leader.start(states_of_keys(shards, flat.buffers, terms), standing, {})
        weights = leader.until_all_left()
    finally:
        leader.end()
    for keys, values in zip(shards, weights, strict=True):
        flat.buffers[keys.vector][keys.start : keys.stop] = values
    if leader.buffers is not None:
        BufferNames(model).load(model, leader.buffers[1])
