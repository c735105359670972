"""A rank keeps memory that it frees."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

import dure
from dure.contracts.strategy import Place

PAGES = 5_000


def used_again(place: Place) -> int:
    """Pages that the system hands out while the same memory is asked for and freed again and
    again."""
    for turn in range(12):
        if turn == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(PAGES // 5 * 1024) for _ in range(5)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library is told so")
def test_memory_that_is_used_again_stays_with_the_rank() -> None:
    assert dure.Processes(1).run(used_again, lambda event: None) < PAGES
