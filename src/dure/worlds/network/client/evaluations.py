"""Bound on the models that a site measures for a server.

    round r   digests of the models that were measured, d_1 ... d_k; one more is measured where
              k < evaluations_per_round, and one of these again as often as it is asked

The server names the rounds. So a site that bounds evaluations measures none of an earlier round
than the newest one; a server that counts rounds faster than it trains is not noticed.
"""

from __future__ import annotations

import secrets

from dure.worlds.network.client.policy import Policy
from dure.worlds.network.client.state import ClientState


class Evaluations:
    """The models of a run that were measured here, which its policy bounds.

    state: keeps the list of them from one start of the client to the next.
    """

    def __init__(self, policy: Policy, state: ClientState, run: str) -> None:
        self.policy = policy
        self._state = state
        self._run = run
        self._bounded = policy.evaluations_per_round is not None
        self._measured = set(state.measured(run)) if self._bounded else set()
        self._newest = max((round for round, _ in self._measured), default=-1)

    def another(self, round: int, examples: int) -> str:
        """As `refusal`, for split learning: no site knows the whole model, so each one counts."""
        return self.refusal(round, secrets.token_hex(32), examples)

    def refusal(self, round: int, digest: str, examples: int) -> str:
        """Why a model is not measured, in words; empty where it may be, and then it counts.

        round: as the server names it. digest: of the model. examples: with how many.
        """
        if self._bounded and (round, digest) in self._measured:
            return self.policy.evaluation(examples, 0)
        if self._bounded and round < self._newest:
            return f"a model of round {self._newest} was measured, and this is one of round {round}"
        earlier = sum(1 for measured, _ in self._measured if measured == round)
        reason = self.policy.evaluation(examples, earlier)
        if not reason and self._bounded:
            self._state.note_measured(self._run, round, digest)
            self._measured.add((round, digest))
            self._newest = round
        return reason
