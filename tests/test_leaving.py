"""docs/privacy.md describes the data in every field of every message of a site."""

from __future__ import annotations

import re

from dure.wire import requests
from leaving import LEAVES, PAGE, fields_of, rewritten

DESCRIBED = {kind: told for kinds in LEAVES.values() for kind, told in kinds.items()}


def test_every_field_of_every_message_is_described() -> None:
    for kind, told in DESCRIBED.items():
        named = [name for names in told for name in names.split(", ") if name]
        assert sorted(named) == sorted(fields_of(kind)), kind.__name__


def test_every_body_that_a_client_posts_is_described() -> None:
    # The list of routes at the top of the module: "POST /v1/watch  Watch -> Watched".
    posted = re.findall(r"^ +POST +/v1/\S+ +(\w+)", requests.__doc__ or "", re.MULTILINE)
    assert len(posted) > 8
    assert not set(posted) - {kind.__name__ for kind in DESCRIBED}


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert rewritten(page) == page
