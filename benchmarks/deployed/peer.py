"""What the peers of dure share, raw.py and grpc_aio.py: their arguments, and what they say.

    PEER.py server|client --bytes MODEL --clients N --rounds N --port PORT --tls FOLDER

The server takes part in all rounds, and then says when each was over. Both sides run in any Python
that has what the peer itself imports.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Play:
    """size: bytes of the model, and of an update. tls: the folder with the certificates."""

    size: int
    clients: int
    rounds: int
    port: int
    tls: Path


def say(at: Sequence[float]) -> None:
    """at: time.time() at the end of each round."""
    times = [after - before for before, after in itertools.pairwise(at)]
    print(json.dumps({"rounds": times, "first_round": at[0]}), flush=True)


def main(serve: Callable[[Play], object], take_part: Callable[[Play], object]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["server", "client"])
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tls", type=Path, required=True)
    asked = parser.parse_args()
    play = Play(asked.bytes, asked.clients, asked.rounds, asked.port, asked.tls)
    (serve if asked.role == "server" else take_part)(play)
