"""Training that goes on over rounds: one call of `train`, which waits between two rounds.

    the client's thread     run(round) ---------------> waits for the round's end
    the trainer's thread    train() ... `stepped` after each step; after the last of a round it
                            waits there for the next round, with the weights in place

At any time only one of the two threads runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dure.contracts.trainer import TrainerRound
from dure.randomness.seeds import generators_state, restore_generators


class ContinuedTraining:
    """Call of a trainer's `train` in a thread of its own.

    name: of the trainer, for messages.
    """

    def __init__(self, name: str, train: Callable[[], Any]) -> None:
        self._name = name
        self._train = train
        self._thread: threading.Thread | None = None
        self._turn = threading.Condition()
        self._left = 0
        self._trains = False
        self._ends = False
        self._error: BaseException | None = None
        self._generators: dict[str, Any] | None = None

    def run(self, round: TrainerRound, begin: Callable[[TrainerRound], None]) -> None:
        """Let the trainer make the steps of a round. Raises the error of the trainer.

        begin: is called with the round before its first step. Raises ValueError if the trainer has
        ended before.
        """
        if self._thread is not None and not self._thread.is_alive():
            raise ValueError(
                f"the {self._name} has ended its training, but the federation goes on: give it "
                "more steps or epochs, or state='reset'"
            )
        # An error in the middle would end the training of all rounds: `look` is called here alone.
        if round.look is not None:
            round.look()
        begin(replace(round, look=None))
        if self._generators is not None:
            # With `keep` the random numbers of the trainer go on too.
            restore_generators(self._generators)
        self._left = len(round.batches)
        self._trains = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        else:
            with self._turn:
                self._turn.notify_all()
        with self._turn:
            self._turn.wait_for(lambda: not self._trains)
        self._generators = generators_state()
        if self._error is not None:
            raise self._error

    def stepped(self) -> bool:
        """Wait at the end of a round; return whether training goes on. In the trainer's thread."""
        self._left -= 1
        if self._left > 0 and not self._ends:
            return True
        with self._turn:
            self._trains = False
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._trains or self._ends)
        return not self._ends

    def close(self) -> None:
        """End the training after its present step, and wait for its end."""
        if self._thread is None:
            return
        with self._turn:
            self._ends = True
            self._turn.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self._error = error
        with self._turn:
            self._trains = False
            self._turn.notify_all()
