"""Policy of a site: `policy.toml`, a file at the client that no server can change.

    systems = ["fed-avg", "scaffold"]       # allowed systems; default: all of dure's
    local_epochs = 5                        # maximum local epochs per round
    local_steps = 500                       # maximum local steps per round
    smallest_cohort = 10                    # fewest clients whose updates are combined
    evaluations_per_round = 1               # most models of a round that the site evaluates
    smallest_test_set = 50                  # fewest examples of an evaluation
    owner = "1f3a 90bc 5512 7de0 …"         # signer of the roster of clients: key or fingerprint
    hours = "22:00-06:00"                   # local time; or several: ["12:00-13:00", "20:00-06:00"]
    cores = 2                               # most processor cores
    memory = "4 GB"                         # most memory of the client
    bandwidth = "2 MB"                      # most bytes per second, in each direction
    storage = "2 GB"                        # most storage of a run
    largest_gradient = 100.0                # in split learning, largest norm of received gradients
    approve = "ask"                         # the user has to approve each run; else "always"
    share_errors = true                     # send messages and source lines of the site's errors

Every key is optional. Without keys only storage is bounded (`Quota`), and messages of errors are
not sent. The client compares the run with the policy before any training (`check`), at each later
welcome, and at each training (`work`) and evaluation (`evaluation`), with the numbers known there.
A quantity that cannot be shown to be within a bound counts as beyond it.

The operating system enforces `cores` and `memory` too (`hold`). The check compares the least memory
of a model with `memory` in advance: the received weights, the trained weights, the gradients and
the update. The memory of activations and an optimizer depends on the site's code; if the system
refuses more memory, the client fails in that round, and reports the failure.

`smallest_cohort` bounds the number of clients whose updates make a new model. A site sends the
number at its check-in. The number of a run is the maximum over its clients, and the server combines
no fewer updates at any time, or waits. Each assignment states the number, and a site does not train
for a smaller number. A site does not take part in a run that cannot have so many: fewer clients,
smaller rounds, fed-async, fed-buff with a smaller buffer. Under secure aggregation the number is
also the fewest clients of a sum that the server may see. A malicious server can enrol clients of
its own: only an owner's roster prevents this attack; without a roster the number protects against
mistakes only.

`evaluations_per_round` counts the models that the site has evaluated, by the server's round number.
Evaluations are a membership oracle: a party that may request many evaluations on few examples
learns which examples the site has.

`largest_gradient` bounds the Euclidean norm of the gradients that a server, or the label holder,
sends for a batch in split learning (`dure.split.gradient_bound`).

`owner` is the same as `dure join --owner`: the site takes part only if this owner has signed a
roster that lists the site (`dure.wire.owners_roster`). `dure.deploy.client.site` checks its
signature.
"""

from __future__ import annotations

import math
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any

import torch

from dure.catalog import SYSTEMS
from dure.deploy.client.agreement import model_bytes
from dure.deploy.client.quota import default_quota
from dure.errors import PolicyError, suggestion
from dure.machine.threads import set_own_threads
from dure.record.untrusted_files import contents
from dure.references import is_reference, last_part
from dure.wire.members import parse_key
from dure.wire.requests import TaskDescription, Welcome

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "policy.toml"

_CLIENT_SYSTEMS = ("dure.federated.", "dure.split.")
_OWN_SYSTEMS = [name for name, each in SYSTEMS.items() if each.module.startswith(_CLIENT_SYSTEMS)]

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kMGT]?)B")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

_HOURS = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")
_DAY = 24 * 60

COPIES = 4
"""Copies of the model that training needs at least."""


Hours = tuple[int, int]
"""First and last minute of a period in a day; the period spans midnight if the last is earlier."""


@dataclass(frozen=True)
class Policy:
    """Policy of a site. None means no bound.

    Args:
        systems: Allowed systems, by name or reference.
        local_epochs: Maximum number of local epochs per round.
        local_steps: Maximum number of local steps per round.
        smallest_cohort: Minimum number of clients whose updates are combined.
        evaluations_per_round: Maximum models of a round that the site evaluates.
        smallest_test_set: Fewest examples of an evaluation.
        owner: Public key or fingerprint of the roster's owner, digits only; empty for no owner.
        hours: Periods of work; empty for all day.
        cores: Maximum processor cores.
        memory: Maximum bytes of memory.
        bandwidth: Maximum bytes per second in each direction.
        storage: Maximum bytes of storage per run.
        largest_gradient: Largest Euclidean norm of received gradients in split learning.
        approve: "ask" if the user has to approve each run; else "always".
        share_errors: Whether messages and source lines of the site's errors are sent.
    """

    systems: tuple[str, ...] = tuple(_OWN_SYSTEMS)
    local_epochs: int | None = None
    local_steps: int | None = None
    smallest_cohort: int = 1
    evaluations_per_round: int | None = None
    smallest_test_set: int = 0
    owner: str = ""
    hours: tuple[Hours, ...] = ()
    cores: int | None = None
    memory: int | None = None
    bandwidth: int | None = None
    storage: int | None = None
    largest_gradient: float | None = None
    approve: str = "always"
    share_errors: bool = False

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy file.

        Raises PolicyError, which names the file, the key and the allowed values.
        """
        try:
            written = tomllib.loads(contents(path, most=1 << 20, links=True).decode())
        except OSError as error:
            raise PolicyError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise PolicyError(f"{path} is not valid TOML: {error}") from error
        given = {}
        for key, value in written.items():
            if key not in _READERS:
                raise PolicyError(f"{path} has no key {key!r}{suggestion(key, _READERS)}")
            try:
                given[key] = _READERS[key](value)
            except ValueError as error:
                raise PolicyError(
                    f"{path}: {key} is {value!r}, but it has to be {error}"
                ) from error
        return cls(**given)

    @classmethod
    def beside(cls, folder: Path) -> Policy:
        """Read `policy.toml` in the folder; without the file nothing is bounded."""
        path = folder / FILE
        # A dangling symbolic link counts as an unreadable policy, not as no policy.
        return cls.read(path) if os.path.lexists(path) else cls()

    @property
    def asks(self) -> bool:
        return self.approve == "ask"

    # Requirements of a run

    def check(
        self, welcome: Welcome, examples: int | None = None, sums: int | None = None
    ) -> list[str]:
        """Return the reasons against taking part; empty if the policy allows the run.

        `examples` is the number of the client's training examples, if known. `sums` is the fewest
        clients of a sum that the server sees, if it sees only sums.
        """
        return [
            *self._system(welcome.strategy),
            *self.work(welcome.strategy, examples),
            *self._cohort(welcome),
            *self._sums(sums),
            *self._memory(welcome.trains),
        ]

    def _system(self, strategy: Mapping[str, Any]) -> Iterator[str]:
        name = strategy.get("name")
        reference = strategy.get("from")
        if "from" not in strategy and name in self.systems:
            return
        # Compared by the last part of the reference, because the folder may differ between the
        # machines. A built-in name is not a reference, whatever systems are allowed.
        own = {last_part(one) for one in self.systems if is_reference(one)}
        named = reference if isinstance(reference, str) else ""
        if is_reference(named) and last_part(named) in own:
            return
        shown = f"{name!r} of its own" if "from" in strategy else repr(name)
        yield f"{FILE} allows the systems {', '.join(self.systems)}; the run's is {shown}"

    def work(self, strategy: Mapping[str, Any], examples: int | None = None) -> Iterator[str]:
        """Yield the reasons against the local work of a round; none if it is allowed.

        `strategy` has local_epochs, local_steps, batch_size and fine_tune. `examples` is as in
        `check`.
        """
        if self.local_epochs is None and self.local_steps is None:
            return
        epochs = strategy.get("local_epochs")
        steps = strategy.get("local_steps")
        tuning = strategy.get("fine_tune", 0)
        batch = strategy.get("batch_size")
        numbers = [each for each in (epochs, steps, tuning, batch) if each is not None]
        if not all(_is_count(each, 0) for each in numbers) or (epochs, steps) == (None, None):
            yield f"{FILE} bounds local work, but the run does not state how much it requires"
            return
        # Steps take precedence if both are given. Without a batch size an epoch is a single step.
        per_epoch = _steps_per_epoch(examples, batch)
        yield from self._epochs(epochs, steps, tuning, per_epoch)
        yield from self._steps(epochs, steps, per_epoch)

    def _epochs(
        self, epochs: int | None, steps: int | None, tuning: int, per_epoch: int | None
    ) -> Iterator[str]:
        most = self.local_epochs
        if most is None:
            return
        allowed = f"{FILE} allows at most {_many(most, 'local epoch')}; the run requires"
        if tuning > most:
            yield f"{allowed} {tuning} of fine-tuning"
        if steps is None:
            if epochs is not None and epochs > most:
                yield f"{allowed} {epochs}"
        elif per_epoch is None:
            yield f"{allowed} {_many(steps, 'step')}, which may be more"
        elif steps > most * per_epoch:
            yield f"{allowed} {_many(steps, 'step')}, of which {most * per_epoch} are {most}"

    def _steps(self, epochs: int | None, steps: int | None, per_epoch: int | None) -> Iterator[str]:
        most = self.local_steps
        if most is None:
            return
        allowed = f"{FILE} allows at most {_many(most, 'local step')}; the run requires"
        if steps is not None:
            if steps > most:
                yield f"{allowed} {steps}"
        elif epochs is not None and per_epoch is None:
            yield f"{allowed} {_many(epochs, 'epoch')}, which may be more"
        elif epochs is not None and per_epoch is not None and epochs * per_epoch > most:
            yield f"{allowed} {_many(epochs, 'epoch')}, which are {epochs * per_epoch}"

    def _cohort(self, welcome: Welcome) -> Iterator[str]:
        allowed = f"{FILE} requires at least {_many(self.smallest_cohort, 'client')}"
        if self.smallest_cohort == 1:
            return
        if welcome.clients < self.smallest_cohort:
            yield f"{allowed}; the run has {welcome.clients}"
            return
        together = updates_together(welcome.strategy)
        if together is not None:
            if together < self.smallest_cohort:
                yield f"{allowed}; the run makes a model from every {_many(together, 'update')}"
            return
        fraction = welcome.strategy.get("fraction", 1.0)
        if isinstance(fraction, (int, float)) and 0 < fraction <= 1:
            asked = max(round(fraction * welcome.clients), 1)
            if asked < self.smallest_cohort:
                yield f"{allowed}; a round of the run has {asked}"
        else:
            yield f"{allowed}, but the run does not state how many a round has"

    def _sums(self, fewest: int | None) -> Iterator[str]:
        if fewest is not None and fewest < self.smallest_cohort:
            yield (
                f"{FILE} requires at least {_many(self.smallest_cohort, 'client')}; a secure sum "
                f"of the run may have {fewest}: its minimum has to be {self.smallest_cohort}"
            )

    def _memory(self, trains: TaskDescription) -> Iterator[str]:
        if self.memory is None:
            return
        model = model_bytes(trains)
        least = COPIES * model + trains.frozen_bytes
        if least > self.memory:
            yield (
                f"{FILE} allows {_size(self.memory)} of memory; training a model of "
                f"{_size(model)} needs at least {_size(least)}"
            )

    def quota(self, trains: TaskDescription) -> int:
        """Return the bytes that the run may store at the site."""
        if self.storage is not None:
            return self.storage
        return default_quota(model_bytes(trains) + trains.frozen_bytes)

    def evaluation(self, examples: int, earlier: int) -> str:
        """Return the reason against an evaluation; "" if it is allowed.

        `examples` is the number of held-out examples. `earlier` is the number of models of the same
        round that the site has evaluated, which `EvaluationBound` counts.
        """
        most = self.evaluations_per_round
        if examples < self.smallest_test_set:
            return (
                f"{FILE} allows evaluations on at least "
                f"{_many(self.smallest_test_set, 'example')}, but this site has {examples}"
            )
        if most is not None and earlier >= most:
            return f"{FILE} allows {_many(most, 'evaluation')} a round"
        return ""

    # Working hours

    def open_at(self, now: datetime) -> bool:
        """Return whether `now` is within the working hours; a naive `now` is local time."""
        local = now.astimezone()
        minute = local.hour * 60 + local.minute
        return not self.hours or any(_within(minute, hours) for hours in self.hours)

    def seconds_until_open(self, now: datetime) -> float:
        """Return the seconds from `now` to the working hours; 0 within them."""
        if self.open_at(now):
            return 0.0
        local = now.astimezone()
        return min(_seconds_until(begin, local) for begin, _ in self.hours)

    # System limits

    def hold(self) -> None:
        """Limit the cores and the memory of this process and its children by the operating system.

        Call this before other threads start. Raises PolicyError if the process already uses more
        memory.
        """
        if self.cores is not None:
            if hasattr(os, "sched_setaffinity"):  # Linux
                os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: self.cores])
            set_own_threads(min(self.cores, torch.get_num_threads()))
        if self.memory is not None:
            _limit_memory(self.memory)


def _limit_memory(memory: int) -> None:
    taken = _taken()
    if taken > memory:
        raise PolicyError(
            f"{FILE} allows {_size(memory)} of memory, but Python and its libraries alone need "
            f"{_size(taken)}"
        )
    # Limits the data segment, not the address space: libraries reserve far more addresses than they
    # use.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, most))


def _taken() -> int:
    """Return the bytes that already count against the limit; 0 if unknown."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmData:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


# Working hours


def _within(minute: int, hours: Hours) -> bool:
    begin, end = hours
    if begin < end:
        return begin <= minute < end
    return minute >= begin or minute < end


def _seconds_until(begin: int, local: datetime) -> float:
    """Return the seconds until this minute of the day, daylight saving changes included."""
    opening = datetime.combine(local.date(), time(begin // 60, begin % 60))
    if opening <= local.replace(tzinfo=None):
        opening += timedelta(days=1)
    return (opening.astimezone() - local).total_seconds()


# Strategies of runs


def _steps_per_epoch(examples: int | None, batch: int | None) -> int | None:
    """Return the steps of an epoch; None if unknown."""
    if not batch:
        return 1
    return None if examples is None else math.ceil(examples / batch)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def updates_together(strategy: Mapping[str, Any]) -> int | None:
    """Return the updates of a new model, in systems without rounds; None in the others."""
    if strategy.get("name") == "fed-async":
        return 1
    buffer = strategy.get("buffer")
    return buffer if _is_count(buffer, 1) else None


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _size(count: int) -> str:
    """ "4 GB", "1.5 MB"."""
    for unit in "TGMk":
        if count >= _FACTORS[unit]:
            return f"{count / _FACTORS[unit]:.3g} {unit}B"
    return f"{count} B"


# Values of the file: each reader raises ValueError with the allowed values


def _whole(value: object) -> int:
    if not _is_count(value, 1):
        raise ValueError("an integer, 1 or more")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _read_times(value: object) -> int:
    if not _is_count(value, 0):
        raise ValueError("an integer, 0 or more; 0 disables evaluations")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _read_size(value: object) -> int:
    allowed = 'a size such as "4 GB" or "500 MB", or a number of bytes'
    if _is_count(value, 1):
        return int(value)  # type: ignore[call-overload, no-any-return]
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    size = int(float(found[1]) * _FACTORS[found[2]]) if found else 0
    if size < 1:
        raise ValueError(allowed)
    return size


def _read_systems(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise ValueError('a list of names, such as ["fed-avg", "scaffold"]')
    for name in value:
        if name not in _OWN_SYSTEMS and not is_reference(name):
            raise ValueError(
                f"a list of systems, and there is no system {name!r}"
                f"{suggestion(name, _OWN_SYSTEMS)}, or path/to/file.py:Class"
            )
    return tuple(value)


def _read_hours(value: object) -> tuple[Hours, ...]:
    written = [value] if isinstance(value, str) else value
    if not isinstance(written, list) or not written:
        raise ValueError(_ALLOWED_HOURS)
    return tuple(_read_one(one) for one in written)


_ALLOWED_HOURS = 'local time such as "22:00-06:00", or a list of those'


def _read_one(written: object) -> Hours:
    found = _HOURS.fullmatch(written) if isinstance(written, str) else None
    if found is None:
        raise ValueError(_ALLOWED_HOURS)
    begin, begin_minute, end, end_minute = map(int, found.groups())
    hours = (begin * 60 + begin_minute, end * 60 + end_minute)
    if max(begin_minute, end_minute) > 59 or hours[0] >= _DAY or hours[1] > _DAY:
        raise ValueError(_ALLOWED_HOURS)
    if hours[0] == hours[1]:
        raise ValueError(f"{_ALLOWED_HOURS}, which end later than they begin")
    return hours


def _read_owner(value: object) -> str:
    allowed = "a public key of 64 hexadecimal digits, or a fingerprint of 32"
    try:
        return parse_key(value if isinstance(value, str) else "")
    except ValueError:
        raise ValueError(allowed) from None


def _read_norm(value: object) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise ValueError("a number greater than 0")
    return float(value)  # type: ignore[arg-type]


def _read_approve(value: object) -> str:
    if value not in ("ask", "always"):
        raise ValueError('"ask" or "always"')
    return str(value)


def _read_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


_READERS: dict[str, Callable[[object], Any]] = {
    "systems": _read_systems,
    "local_epochs": _whole,
    "local_steps": _whole,
    "smallest_cohort": _whole,
    "evaluations_per_round": _read_times,
    "smallest_test_set": _whole,
    "owner": _read_owner,
    "hours": _read_hours,
    "cores": _whole,
    "memory": _read_size,
    "bandwidth": _read_size,
    "storage": _read_size,
    "largest_gradient": _read_norm,
    "approve": _read_approve,
    "share_errors": _read_bool,
}
