"""Who is still there? When a transfer fails, the ranks find out which of them was lost.

A lost rank r makes its neighbours fail, and those make theirs fail: the rank whose transfer failed last would blame
a healthy one. So before anybody blames, every rank that failed answers the roll call in the job's store and waits a
moment for the others' answers. Those who did not answer are the lost ones; a rank that answered with an error of
its own is the culprit, whatever the transport said. Then everybody raises the same.

Cost: nothing until something fails; then N keys of a few bytes.
"""

from __future__ import annotations

import time

from torch.distributed.distributed_c10d import Store

from dure.errors import PeerLostError

PRESENT = "present"


class RollCall:
    """The roll call of one job. store: a torch.distributed key-value store that all ranks reach.

    patience: seconds to wait for answers; deadline: seconds a transfer may take, for the message.
    """

    def __init__(self, store: Store, rank: int, size: int, deadline: float, patience: float = 2.0) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.deadline, self.patience = deadline, patience

    def answer(self, text: str) -> None:
        """This rank is there, and failed by `text` (PRESENT: only because others did)."""
        try:
            self.store.set(f"roll/{self.rank}", text)
        except RuntimeError:
            return  # the store is gone together with whoever held it: each rank tells what it knows

    def died(self, rank: int, text: str) -> None:
        """A supervisor saw `rank` end."""
        self.store.set(f"dead/{rank}", text)

    def diagnose(self, operation: str, step: str, error: Exception) -> PeerLostError:
        """The error to raise on this rank after a failed transfer."""
        self.answer(PRESENT)
        answers, deaths = self._collect()
        guilty = {rank: text for rank, text in answers.items() if text != PRESENT} | deaths
        missing = tuple(r for r in range(self.size) if r not in answers and r not in deaths)
        if guilty:
            return PeerLostError(tuple(guilty), operation, step, "; ".join(dict.fromkeys(guilty.values())))
        if missing:
            return PeerLostError(missing, operation, step, self._silence(error))
        return PeerLostError((self.rank,), operation, step, f"lost its connection ({error})")

    def _silence(self, error: Exception) -> str:
        timed_out = "imed out" in str(error) or "imeout" in str(error)
        return f"fell silent (nothing for {self.deadline:g} s)" if timed_out else "died"

    def _collect(self) -> tuple[dict[int, str], dict[int, str]]:
        """Answers and reported deaths, as soon as everybody is accounted for or patience ends."""
        until = time.monotonic() + self.patience
        answers: dict[int, str] = {self.rank: PRESENT}
        deaths: dict[int, str] = {}
        while True:
            for rank in range(self.size):
                self._look(f"roll/{rank}", rank, answers)
                self._look(f"dead/{rank}", rank, deaths)
            if len(answers.keys() | deaths.keys()) == self.size or time.monotonic() > until:
                return answers, deaths
            time.sleep(0.02)

    def _look(self, key: str, rank: int, into: dict[int, str]) -> None:
        try:
            if rank not in into and self.store.check([key]):
                into[rank] = self.store.get(key).decode()
        except RuntimeError:
            return
