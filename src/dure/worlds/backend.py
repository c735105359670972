"""Which torch.distributed backend carries what the ranks of a job send.

gloo goes through sockets, between machines too. dure stays within one machine: its ranks share
memory.
"""

from __future__ import annotations

from typing import Literal, get_args

Backend = Literal["gloo", "dure"]


def check_backend(name: str) -> None:
    """Raises ValueError if there is no backend called `name`."""
    if name not in get_args(Backend):
        raise ValueError(f"there is no backend {name!r}: it is {' or '.join(get_args(Backend))}")
