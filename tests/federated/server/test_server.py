"""The server half by itself: what it goes on from, and what it refuses."""

from __future__ import annotations

import pytest

import dure
from dure.contracts.world import RankContext
from dure.errors import RunFolderError
from dure.federated.server.server import FederatedServer
from small import small_task


def test_the_state_of_another_version_is_refused_in_a_line_that_names_it() -> None:
    def program(context: RankContext) -> None:
        server = dure.FedAvg(clients=3).learner(small_task(), context, 0)
        assert isinstance(server, FederatedServer)
        state = server.state()
        server.restore(server.weights(), state)
        with pytest.raises(
            RunFolderError, match=r"state version 3\), and this one reads version 2"
        ):
            server.restore(server.weights(), {**state, "version": 3})
        del state["version"]  # as the first one had none
        with pytest.raises(
            RunFolderError, match=r"state version 1\), and this one reads version 2"
        ):
            server.restore(server.weights(), state)

    dure.Simulated(engine="loop").run(program, lambda event: None)
