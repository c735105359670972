"""What a client does not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

JOINS = """
import sys, tempfile
from dataclasses import replace
from functools import partial
from threading import Thread
import torch
import dure
from small import small_task

task = small_task(optimizer=partial(torch.optim.Adam, lr=0.01))
with tempfile.TemporaryDirectory() as folder:
    clients = []

    def started(event):
        if "serving" in event:
            how = {"state": folder + "/client", "name": "only"}
            clients.append(Thread(target=dure.join, args=(event["serving"], task), kwargs=how))
            clients[0].start()

    dure.serve(
        replace(task, train=None),
        dure.FedAvg(clients=1),
        dure.Stop(rounds=1),
        out=folder + "/run",
        port=0,
        access="open",
        on_progress=started,
    )
    clients[0].join()
    dure.personalise(folder + "/client", task)
print(sorted(name for name in sys.modules if name.startswith("torch._dynamo")))
"""


def test_who_trains_does_not_wait_for_the_compiler_to_load() -> None:
    done = subprocess.run(
        [sys.executable, "-c", JOINS],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
