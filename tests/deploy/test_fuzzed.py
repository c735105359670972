"""Whatever is sent to a server, it answers, and what it refuses has changed nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzed import PLACES, Plan, Target, plans, sent
from hypothesis import given, settings


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    path: Path = tmp_path_factory.mktemp("fuzzed")
    with Target(path) as served:
        yield served


@settings(max_examples=400)
@given(plan=plans())
def test_no_request_is_an_error_of_the_server_or_changes_what_it_may_not(
    plan: Plan, target: Target
) -> None:
    target.assign()
    before = target.state()
    status = sent(target, plan)
    assert status < 500, status
    if status >= 400 or status == 0:
        assert target.state() == before
    sizes = target.sizes()
    assert sizes["sessions"] <= PLACES
    assert sizes["reserved"] <= PLACES
    assert sizes["kinds of refusals"] <= 65
