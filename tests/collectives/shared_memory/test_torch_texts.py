"""The sentences of torch's gloo that errors have, by the patterns of torch's own tests."""

from __future__ import annotations

import re

import pytest

from dure.collectives.shared_memory.torch_error_texts import at_monitored_barrier, not_in_time
from dure.errors import PeerLostError


def test_a_time_out_is_known_by_the_patterns_of_torch() -> None:
    text = str(PeerLostError((2,), "a barrier", "call 4", not_in_time(0.001)))
    for pattern in (" (Timed out|closed|timeout) ", " timed out ", "Timed out waiting 1ms"):
        assert re.search(pattern, text)


@pytest.mark.parametrize(
    ("rank", "seconds", "wait_all_ranks", "said"),
    [
        (0, 2.0, False, "Rank 1 failed to pass monitoredBarrier in 2000 ms"),
        (0, 0.1, True, "Ranks 1, 3 failed to pass monitoredBarrier in 100 ms"),
        (0, 0.0, False, "Rank 0 timed out in monitoredBarrier after 0 ms"),
        (2, 2.0, False, "Rank 2 successfully reached monitoredBarrier, but received errors"),
    ],
)
def test_a_monitored_barrier_says_what_that_of_gloo_says(
    rank: int, seconds: float, wait_all_ranks: bool, said: str
) -> None:
    # Errors name ranks of the job: the group's ranks 1 and 3 are 5 and 7 there.
    loss = PeerLostError((5, 7), "barrier()", "call 1", "died")
    error = at_monitored_barrier(loss, rank, [4, 5, 6, 7], seconds, wait_all_ranks)
    assert said in str(error)
    assert error.ranks == (5, 7)
    assert str(error).startswith("ranks 5, 7 died")
