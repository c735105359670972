"""How a process leaves its groups: when it ends, and in a forked child.

At its end no peer is to wait for it. A forked child has its parent's groups, and must not use them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Protocol

from torch import Tensor

_unread: list[Tensor] = []
"""What peers of groups that this process has left may still read."""


class Leaver(Protocol):
    """A group, as this process leaves it."""

    def leave(self) -> None:
        """Tells the others, unless this has been done."""

    def abandon(self) -> None:
        """In a forked child: the group is the parent's."""


_groups: weakref.WeakSet[Leaver] = weakref.WeakSet()


def remember(group: Leaver) -> None:
    """The group will be left when the process ends."""
    _groups.add(group)


def keep(tensors: list[Tensor]) -> None:
    """Keeps what peers may still read until the process ends."""
    _unread.extend(tensors)


@atexit.register
def leave_all() -> None:
    """A process that ends without destroying its groups leaves them."""
    # At the end of the interpreter parts of a group may be gone: no error helps anybody then.
    for group in list(_groups):
        with contextlib.suppress(Exception):
            group.leave()


def _abandon_all() -> None:
    for group in list(_groups):
        group.abandon()


# A child has the parent's mappings and sockets, but none of its threads: whatever it did in these
# groups, peers would take for the parent's.
os.register_at_fork(after_in_child=_abandon_all)
