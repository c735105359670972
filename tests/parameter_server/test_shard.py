"""A shard by itself: what it answers, and what it writes where."""

from __future__ import annotations

import torch
from histories import History

from dure.parameter_server.messages import Pull


def test_an_answer_that_is_given_again_changes_no_memory_that_may_be_in_use() -> None:
    history = History(servers=1, staleness=None, clocks=3)
    shard = history.nodes[0].owned[0].shard
    layout = history.manager.layout
    into = torch.zeros(11, dtype=torch.float64)
    pull = Pull(0, 0, worker=0, life=0, number=1, start=0, stop=11, clock=0, into=into)
    first = shard.pull(pull, layout)
    assert first is not None
    assert first.values.data_ptr() == into.data_ptr()
    shard.values.fill_(7.0)
    again = shard.pull(pull, layout)
    assert again is not None
    assert torch.equal(into, torch.ones(11, dtype=torch.float64))
    assert torch.equal(again.values, torch.full((11,), 7.0, dtype=torch.float64))
