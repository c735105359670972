"""Who is still there? When a transfer fails, the ranks find out together which of them was lost.

A lost rank makes its neighbours fail, and those make theirs fail: the rank whose transfer failed
last would blame a healthy one. So every rank whose transfer failed answers the roll call in the
job's store, and says on whom it waited. After a moment the lost are those that were waited for and
did not answer; a rank that answered with an error of its own is the culprit, whatever the transport
said. The first to know writes the verdict into the store, and everybody raises the same.

Cost: nothing until something fails; then a few short keys.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from dure.collectives.group import Group
from dure.errors import PeerLostError


def transfer_seconds(deadline: float) -> float:
    """How long a transfer may take, so that everybody has raised within `deadline` seconds.

    The rest of them is for the roll call.
    """
    return deadline - min(2.0, deadline / 4)


_SIGNS_OF_SILENCE = ("imed out", "imeout", "did not come within")  # in what the backends say


def deadline_of(seconds: float) -> float:
    """The deadline whose transfers may take so many seconds: the inverse of `transfer_seconds`."""
    return seconds + min(2.0, seconds / 3)


class Answer(msgspec.Struct):
    """What a rank says.

    failed: its own error, if it had one. waited_for: the peer of the transfer that failed.
    timed_out: whether that peer was silent, as far as the error tells.
    """

    failed: str | None = None
    waited_for: int | None = None
    timed_out: bool = False


class Verdict(msgspec.Struct):
    """The fields of the error that everybody raises."""

    ranks: tuple[int, ...]
    operation: str
    step: str
    reason: str

    def error(self) -> PeerLostError | None:
        """None if nobody was lost: then the transfer failed for a reason of its own."""
        return (
            PeerLostError(self.ranks, self.operation, self.step, self.reason)
            if self.ranks
            else None
        )


@dataclass
class Known:
    """What has been heard so far: answers and, from a supervisor, deaths; by rank."""

    answers: dict[int, Answer]
    deaths: dict[int, str]

    def verdict(self, size: int, operation: str, step: str, waited: str) -> Verdict:
        """The lost ranks, as far as can be known.

        waited: how long a transfer was waited for, in words.
        """
        failed = {
            rank: f"failed: {answer.failed}"
            for rank, answer in self.answers.items()
            if answer.failed
        }
        # Certain are deaths that were seen, and errors that ranks had of their own.
        guilty = failed | self.deaths
        if guilty:
            return Verdict(
                tuple(sorted(guilty)), operation, step, "; ".join(dict.fromkeys(guilty.values()))
            )
        absent = set(range(size)) - self.answers.keys()
        # Of those that did not answer, the ones that somebody waited for: a rank may be slow with
        # its answer only because its own transfer still waits.
        suspects = {answer.waited_for for answer in self.answers.values()} & absent
        lost = suspects or absent
        timed_out = all(
            answer.timed_out for answer in self.answers.values() if answer.waited_for in lost
        )
        reason = f"fell silent (nothing for {waited})" if timed_out else "died or hung up"
        return Verdict(
            tuple(sorted(rank for rank in lost if rank is not None)), operation, step, reason
        )


class RollCall:
    """The roll call of one job. store: a torch.distributed key-value store that all ranks reach.

    deadline: seconds until every rank has raised; `transfer_seconds` of them are a transfer's, the
    rest is for the answers.
    """

    def __init__(self, store: Store, rank: int, size: int, deadline: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.patience = min(2.0, deadline / 4)
        self.waited = f"{transfer_seconds(deadline):g} s"
        self._mine: Answer | None = None

    def answer(self, answer: Answer) -> None:
        """This rank is there. Its first answer stands."""
        if self._mine is None:
            self._mine = answer
            self._set(f"answer/{self.rank}", msgspec.json.encode(answer).decode())

    def died(self, rank: int, how: str) -> None:
        """A supervisor saw `rank` end: "was killed by SIGKILL"."""
        self._set(f"death/{rank}", how)

    def diagnose(
        self, operation: str, step: str, peer: int | None, error: Exception
    ) -> PeerLostError | None:
        """The error to raise on this rank after a transfer with `peer` (None: with all) failed.

        None if every rank is there: the error of the transfer tells more.
        """
        text = str(error)
        mine = Answer(waited_for=peer, timed_out=any(sign in text for sign in _SIGNS_OF_SILENCE))
        self.answer(mine)
        known = Known({self.rank: mine}, {})
        # Until all have answered or one is known to be dead. Whoever is done first writes a
        # verdict, which ends the wait of all others.
        until = time.monotonic() + self.patience
        while time.monotonic() < until:
            told = self._get("verdict")
            if told is not None:
                return msgspec.json.decode(told, type=Verdict).error()
            self._hear(known)
            if known.deaths or len(known.answers) == self.size:
                break
            time.sleep(0.02)
        verdict = known.verdict(self.size, operation, step, self.waited)
        return self._agreed(verdict).error()

    def _hear(self, known: Known) -> None:
        for rank in range(self.size):
            if rank not in known.answers and (told := self._get(f"answer/{rank}")) is not None:
                known.answers[rank] = msgspec.json.decode(told, type=Answer)
            if rank not in known.deaths and (death := self._get(f"death/{rank}")) is not None:
                known.deaths[rank] = death

    def _agreed(self, verdict: Verdict) -> Verdict:
        """The first verdict written stands for all."""
        try:
            standing = self.store.compare_set("verdict", "", msgspec.json.encode(verdict).decode())
        except RuntimeError:
            # The store is gone together with its holder: each rank tells what it knows.
            return verdict
        return msgspec.json.decode(standing, type=Verdict)

    def _set(self, key: str, value: str) -> None:
        try:
            self.store.set(key, value)
        except RuntimeError:  # without the store nobody can be told
            return

    def _get(self, key: str) -> str | None:
        try:
            return self.store.get(key).decode() if self.store.check([key]) else None
        except RuntimeError:
            return None


def watched(process_group: Group | dist.ProcessGroup | None) -> Group:
    """The group (None: all ranks), with errors that name lost ranks; all ranks call it together.

    A group of all ranks of a job, over a backend that does not know whom it lost, such as gloo,
    gets a roll call in the job's store. Other groups stay as they are.
    """
    group = Group.of(process_group)
    if (
        isinstance(process_group, Group)
        or group.process_group is None
        or group.size != dist.get_world_size()
    ):
        return group
    # Over dure alone, errors name the lost ranks already.
    backends = {group.backend(torch.device(kind)) for kind in ("cpu", "cuda")} - {""}
    if backends == {"dure"}:
        return group
    # Rank 0's clock names a place that is new to all: answers of an earlier roll call of the same
    # job may still stand in the store. Up to 2^52, float64 is exact.
    number = group.all_gather_values([float(time.time_ns() % 2**52)])[0][0]
    store = PrefixStore(f"roll call {number:.0f}", _get_default_store())
    device = next(kind for kind in ("cpu", "cuda") if group.backend(torch.device(kind)))
    # The backend's own time-out is how long a transfer may take.
    options = group.process_group._get_backend(torch.device(device)).options
    roll_call = RollCall(
        store, group.rank, group.size, deadline_of(options._timeout.total_seconds())
    )
    return Group(group.process_group, diagnose=roll_call.diagnose)
