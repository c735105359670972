"""Small steps get one thread, whatever the machine is doing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dure
from dure.machine.threads import SMALL_STEP, threads, threads_for
from small import small_task


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_are_as_before_when_the_block_ends(two_threads):
    assert (threads_for(SMALL_STEP / 2), threads_for(SMALL_STEP * 2)) == (1, 2)
    with threads(1):
        assert torch.get_num_threads() == 1
        with threads(2):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_a_run_of_a_small_model_uses_one_thread(two_threads):
    used, evaluated = [], []

    class Watched(nn.Linear):
        def forward(self, inputs):
            (used if self.training else evaluated).append(torch.get_num_threads())
            return super().forward(inputs)

    dure.train(
        small_task(model=lambda: Watched(6, 3).double()),
        dure.SingleWorker(8),
        stop=dure.Stop(steps=3),
    )
    assert used == [1, 1, 1]
    assert evaluated[1:] == [2, 2], "the first one counted operations; then came two evaluations"
    assert torch.get_num_threads() == 2
