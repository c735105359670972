"""Joint determination of the lost rank after a failed transfer.

A lost rank makes its neighbours fail, and they make their neighbours fail: the rank whose transfer
failed last would blame a healthy rank. So every rank whose transfer failed writes an answer into
the job's store, with the peer for which it waited. After a short time the lost ranks are those for
which others waited and that did not answer; a rank that answered with an error of its own is the
cause, whatever the transport reported. The first rank to decide writes the verdict into the store,
and all ranks raise the same error.

Cost: nothing until a failure; then a few short keys.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from dure.collectives.group import Group
from dure.collectives.transport import backends_of
from dure.errors import PeerLostError


def transfer_seconds(deadline: float) -> float:
    """Return the timeout of a transfer, so that all ranks raise within `deadline` seconds.

    The remaining time is for the roll call.
    """
    return deadline - min(2.0, deadline / 4)


_SIGNS_OF_SILENCE = ("imed out", "imeout", "did not come within")  # in what the backends say


def deadline_of(seconds: float) -> float:
    """Return the deadline for a transfer timeout in seconds: the inverse of `transfer_seconds`."""
    return seconds + min(2.0, seconds / 3)


class RollCallAnswer(msgspec.Struct):
    """Answer of a rank to the roll call.

    failed: the rank's own error, if any. waited_for: the peer of the failed transfer. timed_out:
    whether that peer was silent, as far as the error shows.
    """

    failed: str | None = None
    waited_for: int | None = None
    timed_out: bool = False


class LostRankVerdict(msgspec.Struct):
    """Fields of the error that all ranks raise."""

    ranks: tuple[int, ...]
    operation: str
    step: str
    reason: str

    def error(self) -> PeerLostError | None:
        """Return the error, or None if no rank was lost.

        Without a lost rank the transfer failed for another reason.
        """
        return (
            PeerLostError(self.ranks, self.operation, self.step, self.reason)
            if self.ranks
            else None
        )


@dataclass
class RollCallState:
    """Information so far: answers and, from a supervisor, deaths; by rank."""

    answers: dict[int, RollCallAnswer]
    deaths: dict[int, str]

    def verdict(self, size: int, operation: str, step: str, waited: str) -> LostRankVerdict:
        """Return the lost ranks, as far as known.

        waited: timeout of a transfer, as text.
        """
        failed = {
            rank: f"failed: {answer.failed}"
            for rank, answer in self.answers.items()
            if answer.failed
        }
        # Observed deaths and the ranks' own errors are certain.
        guilty = failed | self.deaths
        if guilty:
            return LostRankVerdict(
                tuple(sorted(guilty)), operation, step, "; ".join(dict.fromkeys(guilty.values()))
            )
        absent = set(range(size)) - self.answers.keys()
        # Of the absent ranks, those for which a rank waited: an absent rank may still be waiting in
        # its own transfer.
        suspects = {answer.waited_for for answer in self.answers.values()} & absent
        lost = suspects or absent
        timed_out = all(
            answer.timed_out for answer in self.answers.values() if answer.waited_for in lost
        )
        reason = f"fell silent (nothing for {waited})" if timed_out else "died or hung up"
        return LostRankVerdict(
            tuple(sorted(rank for rank in lost if rank is not None)), operation, step, reason
        )


class RollCall:
    """Roll call of a job. store: a torch.distributed key-value store that all ranks reach.

    deadline: seconds until every rank has raised; `transfer_seconds` of them are for a transfer,
    the rest for the answers.
    """

    def __init__(self, store: Store, rank: int, size: int, deadline: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.patience = min(2.0, deadline / 4)
        self.waited = f"{transfer_seconds(deadline):g} s"
        self._mine: RollCallAnswer | None = None

    def answer(self, answer: RollCallAnswer) -> None:
        """Answer for this rank. Later answers are ignored."""
        if self._mine is None:
            self._mine = answer
            self._set(f"answer/{self.rank}", msgspec.json.encode(answer).decode())

    def died(self, rank: int, how: str) -> None:
        """Report that a supervisor saw `rank` end: "was killed by SIGKILL"."""
        self._set(f"death/{rank}", how)

    def diagnose(
        self, operation: str, step: str, peer: int | None, error: Exception
    ) -> PeerLostError | None:
        """Return the error to raise after a failed transfer with `peer` (None: with all ranks).

        None if every rank is present: the error of the transfer is then more informative.
        """
        text = str(error)
        mine = RollCallAnswer(
            waited_for=peer, timed_out=any(sign in text for sign in _SIGNS_OF_SILENCE)
        )
        self.answer(mine)
        known = RollCallState({self.rank: mine}, {})
        # Until all have answered or a death is known. The first rank to finish writes a verdict,
        # which ends the wait of all others.
        until = time.monotonic() + self.patience
        while time.monotonic() < until:
            told = self._get("verdict")
            if told is not None:
                return msgspec.json.decode(told, type=LostRankVerdict).error()
            self._hear(known)
            if known.deaths or len(known.answers) == self.size:
                break
            time.sleep(0.02)
        verdict = known.verdict(self.size, operation, step, self.waited)
        return self._agreed(verdict).error()

    def _hear(self, known: RollCallState) -> None:
        for rank in range(self.size):
            if rank not in known.answers and (told := self._get(f"answer/{rank}")) is not None:
                known.answers[rank] = msgspec.json.decode(told, type=RollCallAnswer)
            if rank not in known.deaths and (death := self._get(f"death/{rank}")) is not None:
                known.deaths[rank] = death

    def _agreed(self, verdict: LostRankVerdict) -> LostRankVerdict:
        """Return the verdict that was written first, which is valid for all ranks."""
        try:
            standing = self.store.compare_set("verdict", "", msgspec.json.encode(verdict).decode())
        except RuntimeError:
            # The store is gone together with its host: each rank raises its own verdict.
            return verdict
        return msgspec.json.decode(standing, type=LostRankVerdict)

    def _set(self, key: str, value: str) -> None:
        try:
            self.store.set(key, value)
        except RuntimeError:  # the store is gone, so other ranks cannot be informed
            return

    def _get(self, key: str) -> str | None:
        try:
            return self.store.get(key).decode() if self.store.check([key]) else None
        except RuntimeError:
            return None


def with_lost_rank_diagnosis(process_group: Group | dist.ProcessGroup | None) -> Group:
    """Return the group (None: all ranks), with errors that name lost ranks; all ranks call it.

    A group of all ranks of a job, over a backend that cannot identify lost ranks, such as gloo,
    gets a roll call in the job's store. Other groups stay unchanged.
    """
    group = Group.of(process_group)
    if (
        isinstance(process_group, Group)
        or group.process_group is None
        or group.size != dist.get_world_size()
    ):
        return group
    # Over dure alone, errors name the lost ranks already.
    backends = backends_of(group.process_group)
    if set(backends.values()) == {"dure"}:
        return group
    # Rank 0's clock gives a new prefix: the store may still contain answers of an earlier roll call
    # of the same job. Up to 2^52, float64 is exact.
    number = group.all_gather_values([float(time.time_ns() % 2**52)])[0][0]
    store = PrefixStore(f"roll call {number:.0f}", _get_default_store())
    device = "cpu" if "cpu" in backends else next(iter(backends))
    # The backend's own timeout limits a transfer.
    options = group.process_group._get_backend(torch.device(device)).options
    roll_call = RollCall(
        store, group.rank, group.size, deadline_of(options._timeout.total_seconds())
    )
    return Group(group.process_group, diagnose=roll_call.diagnose)
