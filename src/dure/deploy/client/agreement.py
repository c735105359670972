"""Agreement of a site to a run, and the checks of every later message against it.

    Welcome          describes the agreed run in every field, and the policy still allows it
    Train            has a cohort as large as the policy requires, and a model of plausible size
    EvaluationTask   has a model of plausible size
    SayThis          occurs only in a run whose updates stay at their clients

The site stores the agreement (`ClientState.agree`) before it takes a place in the run. A malicious
server may describe the run differently to an observer, to a training client and to a returning
client; the client therefore checks every message, and not only the first. `Session.fetch` compares
the tensors of a model with the tensors of the site's own model, and `dure.run.client_training`
checks local work against the policy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from dure.errors import PolicyError
from dure.wire.requests import EvaluationTask, NextAnswer, TaskDescription, Train, Welcome

MOST_EXTRAS = 8
"""Largest size of an assignment, extras included, as a multiple of the model."""

HEADER = 1 << 20
"""Maximum bytes of a stream's header, added to the bytes of the elements."""

MOST_SHOWN = 80
"""Maximum characters of a differing value in an error message."""


class AgreedRun(msgspec.Struct, frozen=True):
    """Description of a run by its server, with fields of `Welcome`.

    The torch version and the heartbeat are absent, because a server that moves to another machine
    may change them. `threads` and `engine` are present, because the client has to follow them.
    """

    run: str
    clients: int
    strategy: dict[str, Any]
    seed: int
    trains: TaskDescription
    engine: str
    threads: int
    holds: bool

    @classmethod
    def of(cls, welcome: Welcome) -> AgreedRun:
        """Return the run that a welcome describes."""
        return cls(
            run=welcome.run,
            clients=welcome.clients,
            strategy=welcome.strategy,
            seed=welcome.seed,
            trains=welcome.trains,
            engine=welcome.machine.engine,
            threads=welcome.machine.threads,
            holds=welcome.holds,
        )

    def differences(self, other: AgreedRun) -> list[str]:
        """Return the fields in which another description differs, in words."""
        mine = _flat(msgspec.to_builtins(self))
        theirs = _flat(msgspec.to_builtins(other))
        return [
            f"{name} was {_shown(mine, name)}, but is {_shown(theirs, name)}"
            for name in sorted(mine.keys() | theirs.keys())
            if name not in mine or name not in theirs or mine[name] != theirs[name]
        ]


def model_bytes(trains: TaskDescription) -> int:
    """Return the bytes of the elements of all tensors that travel."""
    return sum(_bytes_of(dtype, shape) for dtype, shape in trains.forms.values())


def _bytes_of(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor: "F32" and "float32" have 32 bits an element, "BOOL" has 8."""
    bits = re.search(r"\d+", dtype)
    return max(0, math.prod(shape)) * (int(bits[0]) if bits else 8) // 8


class ServerChecks:
    """Checks of a server's messages.

    The base class accepts everything, for a client without a policy.

    `smallest_cohort` is the minimum number of clients that the site requires in a combined update.
    """

    smallest_cohort = 1

    def welcome(self, welcome: Welcome) -> None:
        """Check the description of the run.

        Raises PolicyError if it differs from the agreed run.
        """

    def word(self, word: NextAnswer) -> None:
        """Check a request of the server. Raises PolicyError if the site does not execute it."""


class AgreementChecks(ServerChecks):
    """Checks against a site's agreement.

    Args:
        agreed: The agreed run.
        smallest_cohort: Minimum number of clients that the site requires, as in `ServerChecks`.
        allows: Function that raises PolicyError for a welcome that the policy forbids.
        number: Function that returns the number of this client; None before it has a number.
        secure: Whether the run's privacy keeps updates at their clients, even if the server does
            not say so.
    """

    def __init__(
        self,
        agreed: AgreedRun,
        smallest_cohort: int,
        allows: Callable[[Welcome], None],
        number: Callable[[], int | None],
        secure: bool = False,
    ) -> None:
        self.agreed = agreed
        self.smallest_cohort = smallest_cohort
        self._allows = allows
        self._number = number
        self._holds = agreed.holds or secure
        self._most_bytes = MOST_EXTRAS * model_bytes(agreed.trains) + HEADER

    def welcome(self, welcome: Welcome) -> None:
        different = self.agreed.differences(AgreedRun.of(welcome))
        if different:
            raise PolicyError(
                "this site does not take part: the server describes the run differently than "
                f"when this site approved it: {'; '.join(different[:5])}; examine the changes, "
                "and if you accept them join once with --approve"
            )
        number = self._number()
        if number is not None and welcome.client not in (-1, number):
            raise PolicyError(
                f"this site does not take part: it is client {number} of run {welcome.run}, but "
                f"the server identifies it as client {welcome.client}"
            )
        self._allows(welcome)

    def word(self, word: NextAnswer) -> None:
        if word.train is not None:
            self._train(word.train)
        for measure in (word.measure, word.final):
            if measure is not None:
                self._model(measure, "a model")
        if word.say is not None and not self._holds:
            raise PolicyError(
                f"this site rejects a protocol step for ticket {word.say.ticket}: the approved "
                f"run {self.agreed.run} sends updates directly and has no such steps"
            )

    def _train(self, train: Train) -> None:
        least = self.smallest_cohort
        if train.smallest_cohort < least:
            raise PolicyError(
                f"this site does not train for round {train.round + 1} (ticket {train.ticket}): "
                f"policy.toml requires at least {least} clients in a new model, but the server "
                f"guarantees {train.smallest_cohort}: ask its operator to install a newer dure"
            )
        self._model(train, f"the model of ticket {train.ticket}")

    def _model(self, said: Train | EvaluationTask, what: str) -> None:
        if said.bytes > self._most_bytes and self.agreed.trains.forms:
            raise PolicyError(
                f"this site does not fetch {what}: it has {said.bytes:,} bytes, but the approved "
                f"model has at most {self._most_bytes:,}"
            )


def _flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


def _shown(found: Mapping[str, Any], name: str) -> str:
    text = repr(found[name]) if name in found else "nothing"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
