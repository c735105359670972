"""The server's memory, by the number of clients; see benchmarks/deployment.py.

models_over_base: the peak of all that is resident (VmHWM), files that are mapped included, less
that of a server with as many clients and a model of nothing, in models. An update that is folded is
a mapped file, whose pages the system may drop; anonymous_models_over_base is without those.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes import Talking, Weighed, ended, free_port

JSON = dict[str, Any]
MODEL = 40_000_000
NOTHING = 4_000
ROUNDS = 4
PATIENCE = 600.0


def peak(clients: int, size: int, folder: Path, tls: Path) -> Weighed:
    """Of a server that serves so many light clients a model of so many bytes."""
    run = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    port = free_port()
    with ended() as started:
        server = Talking(
            "server.py",
            [
                "--folder",
                run / "run",
                "--floats",
                size // 4,
                "--clients",
                clients,
                "--rounds",
                ROUNDS,
                "--port",
                port,
                "--tls",
                tls,
                "--checkpoint-every",
                1,
            ],
        )
        started.append(server)
        weighed = Weighed(server.process.pid)
        for k in range(clients):
            about = ["--url", f"https://127.0.0.1:{port}", "--tls", tls, "--name", f"c{k}"]
            started.append(Talking("light.py", about))
        server.hears("rounds", PATIENCE, started)
        server.process.wait()
    weighed.ended()
    shutil.rmtree(run)
    return weighed


def measure(asked: argparse.Namespace, folder: Path, tls: Path) -> JSON:
    rows: JSON = {}
    for clients in asked.clients:
        base = peak(clients, NOTHING, folder, tls)
        whole = peak(clients, MODEL, folder, tls)
        rows[str(clients)] = {
            "base_bytes": base.peak,
            "peak_bytes": whole.peak,
            "models_over_base": (whole.peak - base.peak) / MODEL,
            "anonymous_models_over_base": (whole.anonymous - base.anonymous) / MODEL,
        }
        print(f"{clients} clients: {rows[str(clients)]}", file=sys.stderr, flush=True)
    return {"model_bytes": MODEL, "rows": rows}
