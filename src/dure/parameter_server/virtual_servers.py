"""Servers of a simulated run, and their manager, on a network with a virtual clock.

Learners add the workers (`simulated`, `simulated_replicas`). No node fails, so there are no
heartbeats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dure.fleet.conditions import Conditions
from dure.fleet.devices import BYTES_PER_MBIT
from dure.fleet.virtual_network import (
    NodeLink,
    TransmissionCallback,
    VirtualNetwork,
    ignore_transmission,
)
from dure.parameter_server.layout import ShardLayout
from dure.parameter_server.manager import Manager
from dure.parameter_server.messages import MANAGER, Snapshot, server
from dure.parameter_server.plan import ParameterServerPlan
from dure.parameter_server.server import ShardServer
from dure.parameter_server.shard import Shard, Terms
from dure.parameter_server.table_shard import TableShard
from dure.record.meter import Meter


class VirtualServers:
    """Servers with shards of these states, at the time `now`.

    Args:
        plan: plan of the run.
        layout: initial layout.
        terms: training terms.
        conditions: conditions with the speed of the servers' links.
        states: states of the shards.
        now: virtual time in seconds.
        watch: as in `VirtualNetwork`.
    """

    def __init__(
        self,
        plan: ParameterServerPlan,
        layout: ShardLayout,
        terms: Terms,
        conditions: Conditions,
        states: Sequence[Mapping[str, Any]],
        now: float,
        watch: TransmissionCallback = ignore_transmission,
    ) -> None:
        speed = conditions.server_mbit * BYTES_PER_MBIT
        # No node fails here, so the manager needs no heartbeats.
        self.manager = Manager(
            layout, plan.servers, plan.staleness, math.inf, replicas=plan.replicas
        )
        self.network = VirtualNetwork(watch=watch)
        self.network.now = now
        self.network.add(MANAGER, self.manager)
        self.servers = [
            ShardServer(number, layout, terms, beat=None, patience=math.inf)
            for number in range(plan.servers)
        ]
        for one in self.servers:
            self.network.add(one.name, one, NodeLink(out=speed, into=speed))
        for number, state in enumerate(states):
            self._begin(number, state, now)

    def _begin(self, number: int, state: Mapping[str, Any], now: float) -> None:
        """Distribute an initial shard before the run, without any cost."""
        placed = self.manager.layout.shards[number]
        assert placed.owner is not None
        snapshot = Snapshot(number, placed.epoch, state["version"], state)
        self.servers[placed.owner].receive(MANAGER, snapshot, now)
        if placed.replica is not None:
            self.servers[placed.replica].receive(server(placed.owner), snapshot, now)
            self.servers[placed.owner].copied(number)

    def _shards(self) -> list[Shard]:
        owners = [placed.owner for placed in self.manager.layout.shards]
        return [
            self.servers[owner].owned[number].shard
            for number, owner in enumerate(owners)
            if owner is not None
        ]

    def values(self) -> list[Tensor]:
        """Return the weights, by shard of keys; views of the servers' memory."""
        return [shard.values for shard in self._shards() if not isinstance(shard, TableShard)]

    def tables(self) -> list[TableShard]:
        """Return the shards of tables, which follow those of keys."""
        return [shard for shard in self._shards() if isinstance(shard, TableShard)]

    def states(self) -> list[dict[str, Any]]:
        """Return the shards with the states of their optimizers."""
        return [shard.state() for shard in self._shards()]

    def count(self, meters: Sequence[Meter]) -> None:
        """Add the traffic since the last call to the meters, by node name."""
        for meter in meters:
            traffic = self.network.traffic(meter.name)
            meter.exchanged(sent=traffic.sent, received=traffic.received)
