"""Makes the folders beside this file: a run that was being served, and its client's.

They were made once, by the first version that serves over a network, and are there to be resumed by
later ones. `python make.py FOLDER` makes others with the version that is installed.

    FOLDER/run      the server's folder after five of eight rounds: checkpoint, journal, an update
    FOLDER/client   the client's, with its key, which is good for nothing else
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import dure

sys.path.insert(0, str(Path(__file__).parents[2]))
from small import small_task

STRATEGY = dure.Scaffold(clients=1, batch_size=4)
STOP = dure.Stop(rounds=8)
ROUNDS = 5


def make(folder: Path) -> None:
    stop = threading.Event()
    clients: list[threading.Thread] = []

    def client(url: str) -> None:
        # It is stopped at its work.
        with contextlib.suppress(Exception):
            dure.join(url, small_task(), name="site", state=kept, part=0, stop=stop)

    def progress(event: dict[str, Any]) -> None:
        if "serving" in event:
            clients.append(threading.Thread(target=client, args=(event["serving"],)))
            clients[0].start()
        elif event.get("step") == ROUNDS and not (folder / "run").exists():
            dure.backup(run, folder / "run")
            os.kill(os.getpid(), signal.SIGINT)

    with tempfile.TemporaryDirectory() as there:
        run, kept = Path(there, "run"), Path(there, "client")
        dure.serve(
            small_task(),
            STRATEGY,
            STOP,
            out=run,
            checkpoint_every=3,
            evaluate_every=4,
            port=0,
            access="open",
            on_progress=progress,
        )
        stop.set()
        clients[0].join()
        shutil.copytree(kept, folder / "client", ignore=shutil.ignore_patterns("lock"))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
