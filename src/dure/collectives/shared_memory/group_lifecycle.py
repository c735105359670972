"""Exit of a process from its groups: at its end, and in a forked child.

At the end of a process no peer should wait for it. A forked child has its parent's groups, and must
not use them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Protocol

from torch import Tensor

_unread: list[Tensor] = []
"""Messages that peers of groups that this process has left may still read."""


class GroupLifecycle(Protocol):
    """Group that can be left or abandoned."""

    def leave(self) -> None:
        """Notify the other ranks, once."""

    def abandon(self) -> None:
        """Detach from the group in a forked child."""


_groups: weakref.WeakSet[GroupLifecycle] = weakref.WeakSet()


def remember(group: GroupLifecycle) -> None:
    """Register a group to leave at the end of the process."""
    _groups.add(group)


def keep(tensors: list[Tensor]) -> None:
    """Keep tensors that peers may still read, until the process ends."""
    _unread.extend(tensors)


@atexit.register
def leave_all() -> None:
    """Leave all groups at the end of a process that did not destroy them."""
    # At interpreter exit parts of a group may be gone; errors are useless then.
    for group in list(_groups):
        with contextlib.suppress(Exception):
            group.leave()


def _abandon_all() -> None:
    for group in list(_groups):
        group.abandon()


# A child has the parent's mappings and sockets, but none of its threads: peers would mistake the
# child's actions in these groups for the parent's.
os.register_at_fork(after_in_child=_abandon_all)
