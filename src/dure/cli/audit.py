"""`dure audit FILE`: whether the log of what left a client's machine is as it was written."""

from __future__ import annotations

from pathlib import Path

USAGE = "dure audit FILE"


def main(given: list[str]) -> int:
    """Says how long the log is; raises AuditError with the first line that does not fit."""
    if given in (["--help"], ["-h"]):
        print(f"{USAGE}: whether it is as it was written; it lies in the client's --state")
        return 0
    if len(given) != 1 or given[0].startswith("-"):
        raise ValueError(f"{USAGE}: name the log of a client")
    # Not before it is needed: this imports torch.
    from dure.worlds.network.client.audit import verify

    chain = verify(Path(given[0]))
    print(
        f"{given[0]}: {chain.lines} {'line' if chain.lines == 1 else 'lines'}, each as it was "
        f"written; the last has the digest {chain.digest}"
    )
    return 0
