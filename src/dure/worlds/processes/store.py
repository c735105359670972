"""Store of the ranks of a machine: a file, unreachable over a network.

torch's default, a TCPStore, resolves the name of 127.0.0.1 at both ends of each connection, for its
log: if no name server answers, or a packet is lost, every rank starts 5 s later. A TCPStore also
listens on all interfaces.

Cost: some 10 to 30 us per key; a rank that waits for a key polls every 10 ms, and notices its
timeout up to a second late.

Source: torch.distributed.FileStore; the name lookups are those of pytorch/pytorch issue 159007.
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
def temporary_store(removes: Callable[[str], None]) -> Iterator[str]:
    """Yield the path of a new store, for processes of this user until the block ends.

    `removes` has another process remove the folder if this process is killed before. Each store has
    a unique name: a store may outlive its file, and would write into a new file of the same name.
    """
    with tempfile.TemporaryDirectory(prefix="dure-") as folder:
        removes(folder)
        yield str(Path(folder) / "store")


def store_at(path: str, seconds: float) -> FileStore:
    """Open the store at that path; a wait for a key raises RuntimeError after `seconds`."""
    store = FileStore(path, _NOBODY_COUNTS)
    store.set_timeout(timedelta(seconds=seconds))
    return store
