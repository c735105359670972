"""A federation in one process: the server and all clients, message by message.

For now the clients of a round train one after another; what travels is counted as if it had travelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from dure.strategy import Kind, Place
from dure.worlds.here import refuse_under_torchrun, run_here

Value = TypeVar("Value")


@dataclass(frozen=True)
class Simulated:
    """Simulated clients; how many there are is the strategy's to say."""

    name: ClassVar[str] = "simulated"
    kind: ClassVar[Kind] = "clients"
    leads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse_under_torchrun("a simulated federation")

    @property
    def workers(self) -> int | None:
        return None

    def describe(self) -> str:
        return "simulated clients"

    def run(self, program: Callable[[Place], Value], report: Callable[[dict[str, Any]], None]) -> Value:
        return run_here(program, report, "server", self.kind)
