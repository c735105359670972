"""Worlds, and the context in which they run a program on a rank.

Worlds know no system and systems know no world; they meet in `dure.train`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn

from dure.arguments import CheckedSettings
from dure.collectives.group import Group
from dure.contracts.fresh_model import seeded_model
from dure.contracts.task import Task
from dure.machine.devices import is_cpu
from dure.record.trace import Trace

Kind = Literal["ranks", "threads", "clients"]
"""Three families of worlds.

SPMD ranks over a group; a program with worker threads, on one device or several; a server with
clients.
"""

Value = TypeVar("Value")


@dataclass
class RankContext:
    """Context that a world passes to a program running in it.

    A world of clients passes a `dure.protocol.server_context.ServerContext`.

    Args:
        group: the ranks, with this rank's number.
        trace: this process's timeline.
        report: sends an event to the process that displays the run (rank 0 only).
        interrupted: whether the user asked to stop (rank 0 only).
        kind: kind of the world.
        devices: device of each worker of this program; the first is the program's own.
        clock_offset: seconds to add to this machine's clock to get rank 0's clock.
        deadline: timeout in seconds for a silent rank.
        ending: resources to close at the end of the run, such as threads.
        survives_peer_loss: declares that the program survives the death of ranks other than the
            first, so that the world does not end the program.
        control_flags: returns the control flags in the middle of a long step: STOP, with INTERRUPT
            or without, or 0. The driver sets it if it drives this rank alone.
        report_seconds: minimum seconds between two reports of steps.
        prepared: returns the model that was made while the run was prepared.
        check: whether a learner compares its assumptions about the model with the model itself at
            construction; a difference raises ValueError.
        folder: folder of the run, if this process writes it.
        config: the content of config.json.
    """

    group: Group
    trace: Trace = field(default_factory=Trace)
    report: Callable[[dict[str, Any]], None] = lambda event: None
    interrupted: Callable[[], bool] = lambda: False
    kind: Kind = "ranks"
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)
    clock_offset: float = 0.0
    deadline: float = 60.0
    ending: ExitStack = field(default_factory=ExitStack)
    survives_peer_loss: Callable[[], None] = lambda: None
    control_flags: Callable[[], int] = lambda: 0
    report_seconds: float = 0.1
    prepared: Callable[[], nn.Module] | None = None
    check: bool = True
    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def model(self, task: Task, seed: int) -> nn.Module:
        """Return the run's newly created model: the prepared model of this process, or a new model.

        A learner calls this method once and copies the model for other uses (`unused_copy`).
        """
        model = self.host_model(task, seed)
        # The weights are drawn where the task draws them, and are therefore the same on any device.
        return model.to(self.device) if self._moves_model else model

    def host_model(self, task: Task, seed: int) -> nn.Module:
        """Return the run's newly created model where the task creates it, usually on the CPU."""
        return seeded_model(task, seed) if self.prepared is None else self.prepared()

    @property
    def _moves_model(self) -> bool:
        """Whether the model has to be moved to this program's device."""
        return self.kind == "ranks" and not is_cpu(self.device)

    @property
    def device(self) -> torch.device:
        """Device on which this program computes, or its first worker."""
        return self.devices[0]


class World(CheckedSettings):
    """Participants of a run and their connections: a frozen dataclass, made by the user.

    The fields are settings of the environment: they are written into run folders, and are flags of
    the command line. A subclass defines `name`, `kind` and `run`; other members have defaults.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]

    @property
    def is_leader(self) -> bool:
        """Whether this process writes the run folder and communicates with the user."""
        return True

    @property
    def rank_here(self) -> int:
        """Rank of this process if the process was started as a rank, otherwise 0."""
        return 0

    @property
    def workers(self) -> int | None:
        """Number of ranks or threads; None if the strategy determines the number of clients."""
        return None

    @property
    def computes_on(self) -> tuple[str, ...]:
        """Names of the workers' devices, if the world determines them."""
        return ()

    @property
    def starts_again(self) -> bool:
        """Whether ranks may be ended and restarted at any time, in another number."""
        return False

    @property
    def serves(self) -> bool:
        """Whether other processes have the training data, and this process is only their server."""
        return False

    @property
    def elsewhere(self) -> bool:
        """Whether programs run in other processes, for which this process only waits."""
        return False

    def begin(self, imports: Sequence[str] = ()) -> None:
        """Start slow preparations for the ranks in the background.

        imports: modules that the ranks will need (`Strategy.imports`).
        """

    def ready(self) -> None:
        """Wait for all preparations, so that no run's time includes them."""

    def describe(self) -> str:
        """Return a description for tables: "2 processes"."""
        return self.name

    def run(
        self, program: Callable[[RankContext], Value], report: Callable[[dict[str, Any]], None]
    ) -> Value:
        """Run `program` on every rank and return the result of rank 0.

        If each rank called `run` itself, the result is this rank's. `report` receives the program's
        events. Raises the first failure, after all ranks have ended.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method run")
