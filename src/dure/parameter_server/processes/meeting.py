"""Setup of a job's processes: roles of the ranks, and their connections.

Rank 0 leads: it is the manager, assigns work, and runs the learner. The next ranks are the servers,
the rest the workers. All ranks exchange their cards (`memory.Card`) once, over the group of ranks;
afterwards the group is not used, so that the remaining processes can continue after a loss.
"""

from __future__ import annotations

import hmac
import os

import msgspec
import torch.distributed as dist
from torch import nn

from dure.collectives.group import Group
from dure.collectives.shared_memory.two_hosts.inter_host import address_towards
from dure.errors import PeerLostError
from dure.machine.cores import available_cores
from dure.machine.group_key import VARIABLE, group_key
from dure.parameter_server.digests import MOST as LISTS
from dure.parameter_server.messages import MANAGER, server, worker
from dure.parameter_server.plan import ParameterServerPlan
from dure.parameter_server.processes.endpoint import Endpoint
from dure.parameter_server.processes.memory import RankInfo, own_card

SPIN = 100e-6
"""Seconds that a process polls for messages before it sleeps, if each process has a core: waking up
takes about as long as a small step.
"""

SLACK = 1 << 20
"""Bytes of a frame beyond the weights and the optimizer's state."""
ROW = 8
"""Bytes of a row number."""


def ranks_of(plan: ParameterServerPlan) -> int:
    """Return the number of ranks that a plan needs."""
    return 1 + plan.servers + len(plan.workers)


def name_of(rank: int, plan: ParameterServerPlan) -> str:
    """Return the node name of a rank."""
    if rank == 0:
        return MANAGER
    if rank <= plan.servers:
        return server(rank - 1)
    return worker(plan.workers[rank - 1 - plan.servers])


def rank_of(name: str, plan: ParameterServerPlan) -> int:
    """Return the rank of a node name; the inverse of `name_of`."""
    names = [name_of(rank, plan) for rank in range(ranks_of(plan))]
    return names.index(name)


def meet(group: Group, plan: ParameterServerPlan, model: nn.Module) -> Endpoint:
    """Return this rank's port, connected to its peers. All ranks call this together.

    Raises PeerLostError if a rank does not connect, or has another key.
    """
    told_to_all = group.broadcast_bytes(os.urandom(32) if group.rank == 0 else None)
    # The group broadcasts this value in the clear. With a shared key the token also depends on the
    # key, so that an eavesdropper cannot compute the token.
    key = group_key()
    token = told_to_all if key is None else hmac.digest(key, told_to_all, "sha256")
    mark = "" if key is None else hmac.digest(token, b"dure card", "sha256").hex()
    name = name_of(group.rank, plan)
    port = Endpoint(name, token, most=_most(plan, model), host=_own_address(group))
    cards = group.gather_bytes(msgspec.json.encode(own_card(name, port.address, mark)))
    told = group.broadcast_bytes(b"[" + b",".join(cards) + b"]" if group.rank == 0 else None)
    known = {card.name: card for card in msgspec.json.decode(told, type=list[RankInfo])}
    try:
        _check_keys(known, mark)
    except PeerLostError:
        port.close()
        raise
    port.meet(known, _called_by(group.rank, plan))
    assert port.memory is not None
    here = [other for other in known if port.memory.shares(other)]
    if name.startswith("server"):
        port.memory.see(here)
    if len(here) <= available_cores():
        port.spin = SPIN
    return port


def _check_keys(cards: dict[str, RankInfo], own: str) -> None:
    """Check that all processes have the same key or none; raises PeerLostError if not."""
    for rank, card in enumerate(cards.values()):
        if card.key != own:
            which = f"another {VARIABLE}" if card.key and own else "a key" if card.key else "no key"
            raise PeerLostError(
                (rank,),
                "the meeting of the parameter server",
                "its start",
                f"has {which}, unlike this one: set {VARIABLE} to the same value on all hosts",
            )


def _most(plan: ParameterServerPlan, model: nn.Module) -> int:
    """Return the largest bytes of a frame: a whole shard, for a copy or a checkpoint."""
    # The factor 8 covers the optimizer's state, which is a few times the weights.
    weights = 8 * sum(one.nbytes for one in [*model.parameters(), *model.buffers()])
    # A table adds the numbers of its rows, and the cached row lists of all workers.
    rows = sum(len(keys) for keys in plan.table_shards(model))
    return weights + ROW * rows * (1 + LISTS * len(plan.workers)) + SLACK


def pipeline_of(group: Group, plan: ParameterServerPlan) -> Group:
    """Return the group of ranks that depend on each other, with this rank, in order of workers.

    All ranks call this together, while all are alive.
    """
    alone = [[rank] for rank in range(1 + plan.servers)]
    teams = []
    for number in plan.workers:
        team = sorted([number, *plan.companions(number)])
        if number == team[0]:
            teams.append([rank_of(worker(one), plan) for one in team])
    if all(len(team) == 1 for team in teams):
        return group.alone()
    return group.split_into([*alone, *teams])


def _called_by(rank: int, plan: ParameterServerPlan) -> list[str]:
    """Return the nodes that a rank calls: those before it, so that no two call each other.

    Workers do not communicate with each other.
    """
    return [name_of(other, plan) for other in range(min(rank, plan.servers + 1))]


def _own_address(group: Group) -> str:
    """Return the address at which others reach this host; loopback if all ranks are on it."""
    if group.process_group is None or len(group.hosts()) == 1:
        return "127.0.0.1"
    found = address_towards(dist.distributed_c10d._get_default_store())
    if found is None:
        raise ValueError(
            "this host's address is not known: start the job with a name or address by which "
            "other hosts can reach rank 0, not with localhost"
        )
    return found
