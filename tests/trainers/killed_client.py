"""Program of a client: `killed_client.py URL FOLDER`. Its first process is killed in round 2."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from hugging_face_cases import trainer, transformers

import dure


class Dies(transformers.TrainerCallback):  # type: ignore[misc]
    """Callback that kills the process at its fifteenth step, once."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.trained = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.trained += 1
        if self.trained == 15 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    url, folder = sys.argv[1], Path(sys.argv[2])
    made = trainer(folder, optim="adamw_torch", callbacks=[Dies(folder / "killed")])
    dure.client.patch(made, url, name="site", state=folder / "state").train()
