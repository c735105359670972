"""The store in which the ranks of one machine meet: a file, which nobody can reach over a network.

torch's own choice, a TCPStore, asks the name server what 127.0.0.1 is called, at both ends of each
connection, for its log: where no name server answers, or a packet is lost, every rank starts 5 s
later. And it listens on all interfaces.

Cost: some 10 to 30 us a key; a rank that waits for one looks every 10 ms, and notices the end of
    its time up to a second late.
Source: torch.distributed.FileStore; the names that are asked for are those of pytorch/pytorch issue
159007.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore  # type: ignore[attr-defined]

_NOBODY_COUNTS = -1


@contextmanager
def meeting_file(removes: Callable[[str], None]) -> Iterator[str]:
    """The path of a new store, for processes of this user until the block ends.

    removes: has somebody else remove its folder, should this process be killed before.

    A store may outlive its file, but a file of the same name would have it write there: each has a
    name of its own.
    """
    with tempfile.TemporaryDirectory(prefix="dure-") as folder:
        removes(folder)
        yield str(Path(folder) / "store")


def store_at(path: str, seconds: float) -> FileStore:
    """The store of that path. seconds: until waiting for a key is an error, a RuntimeError."""
    store = FileStore(path, _NOBODY_COUNTS)
    store.set_timeout(timedelta(seconds=seconds))
    return store
