"""A federation over a real network on this machine: real processes, real sockets, TLS on.

    rounds   seconds of a round whose clients answer at once, with what they got, beside bare
             sockets and grpc.aio, which transfer as much
    memory   the server's peak, over that of the same server with a model of nothing
    idle     5,000 clients that wait by long poll: how long a check-in takes, the server's memory
    resume   a server killed at random moments, and a client in mid-work
    link     an update over 100 Mbit/s and 50 ms that breaks five times: bytes accepted, and sent

In `rounds` two clients are dure's own (`deployed/site.py`): they check what they fetch, and hash
what they send, as always. More than two are light ones without torch (`deployed/light.py`), which
speak the same protocol: else importing torch would be most of what a small machine does. Sockets
and grpc.aio do the transfers only: no averaging, no digests, no disk. Flower (`deployed/flower.py`)
is its own SuperLink, SuperNodes and FedAvg, with an app that answers at once. `disk` has the run
folder on the disk, with every sync; `memory` has it on /dev/shm, where a sync is nothing: the
difference is what syncing takes. Flower keeps its state in memory. Contenders take turns, each turn
a run of processes of its own; a turn's figure is the median over its rounds after the first, and
that of a contender the median over its turns. A first round from cold is timed from the start of
the first process. Peaks of memory are those seen at looks of 0.25 s, of the server or of all
processes of a turn, with all that they have started; pages that several share count once.

    python benchmarks/deployment.py --into benchmarks/results/deployment.json \\
        --page docs/deployment.md

grpc.aio and Flower need a Python that has them, and are skipped without:

    python -m venv peers && peers/bin/pip install grpcio flwr
    python benchmarks/deployment.py --only rounds --peers peers/bin/python

Whether all of it still runs is seen in about two minutes:

    python benchmarks/deployment.py --quick

`link` needs root. Progress goes to standard error, the result as JSON to standard output, or
(`--into`) into a file, where what was measured before of other questions stays.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from outcome import give

sys.path.insert(0, str(Path(__file__).parent / "deployed"))

import measure_idle
import measure_link
import measure_memory
import measure_resume
import measure_rounds
import pages
import tables

JSON = dict[str, Any]
MEASURES = {
    "rounds": measure_rounds.measure,
    "memory": measure_memory.measure,
    "idle": measure_idle.measure,
    "resume": measure_resume.measure,
    "link": measure_link.measure,
}

QUICK = ["--turns", "1", "--sizes", "2 x 0.8 MB"]
QUICK += ["--contenders", "dure, disk", "dure, memory, light clients"]
QUICK += ["--idle", "100", "--idle-seconds", "3", "--clients", "2", "--kills", "2", "--places", "1"]
"""Every part runs, in about two minutes: it shows that they can, and measures nothing well."""


def certificates(folder: Path) -> Path:
    """An authority and a server's certificate for this machine."""
    from dure.wire.certificates import issue_server, make_authority

    make_authority(folder)
    issue_server(folder, ["10.78.0.1"])
    return folder


def _leave(number: int, frame: object) -> None:
    """Ends the benchmark as Ctrl-C does: its processes and its folder go with it."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--turns", type=int, default=5, help="of each contender (rounds)")
    parser.add_argument("--large", action="store_true", help="2 x 400 MB, too (rounds)")
    parser.add_argument("--peers", help="the Python that has grpcio and flwr (rounds)")
    parser.add_argument("--contenders", nargs="+", help="all by default (rounds)")
    parser.add_argument("--sizes", nargs="+", help='as "2 x 40 MB"; all by default (rounds)')
    parser.add_argument("--idle", type=int, default=5000, help="clients (idle)")
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 10, 50], help="(memory)")
    parser.add_argument("--idle-seconds", type=float, default=60.0, help="that all wait (idle)")
    parser.add_argument("--kills", type=int, default=50, help="of the server (resume)")
    parser.add_argument("--places", type=int, default=3, help="clients that are killed (resume)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (resume)")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; ./ by default")
    parser.add_argument("--into", type=Path, help="a result, whose other parts stay")
    parser.add_argument("--page", type=Path, help="whose tables are filled")
    parser.add_argument("--quick", action="store_true", help=f"small: {' '.join(QUICK)}")
    given = sys.argv[1:]
    # What is said beside it counts.
    asked = parser.parse_args([*QUICK, *given] if "--quick" in given else given)
    signal.signal(signal.SIGTERM, _leave)
    folder = Path(tempfile.mkdtemp(prefix="deployment-", dir=asked.folder or Path.cwd()))
    found: JSON = {"benchmark": "deployment"}
    if asked.into is not None and asked.into.exists():
        found = json.loads(asked.into.read_text())
    found["machine"] = {"cores": os.cpu_count(), "system": platform.platform()}
    try:
        tls = certificates(folder / "tls")
        for name in asked.only:
            print(f"{name}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            began = time.time()
            load = os.getloadavg()
            found[name] = MEASURES[name](asked, folder, tls)
            found[name] |= {
                "seconds": time.time() - began,
                "load_average": [round(load[0], 2), round(os.getloadavg()[0], 2)],
            }
            if asked.into is not None:
                give(found, asked.into, indent=1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if asked.into is None:
        give(found, None, indent=1)
    if asked.page is not None:
        pages.fill(asked.page, tables.blocks(found))


if __name__ == "__main__":
    main()
