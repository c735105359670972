"""Bound on the models that a site evaluates for a server.

    round r   digests d_1 ... d_k of the evaluated models; a further model is evaluated if
              k < evaluations_per_round, and a model of the list any number of times

The server numbers the rounds. A site with a bound therefore evaluates no model of a round before
the newest round. A server that numbers rounds faster than it trains is not detected.
"""

from __future__ import annotations

import secrets

from dure.deploy.client.policy import Policy
from dure.deploy.client.state import ClientState


class EvaluationBound:
    """Evaluated models of a run, bounded by the site's policy.

    `state` stores the list between starts of the client.
    """

    def __init__(self, policy: Policy, state: ClientState, run: str) -> None:
        self.policy = policy
        self._state = state
        self._run = run
        self._bounded = policy.evaluations_per_round is not None
        self._measured = set(state.measured(run)) if self._bounded else set()
        self._newest = max((round for round, _ in self._measured), default=-1)

    def another(self, round: int, examples: int) -> str:
        """Return the `refusal` of an evaluation in split learning; every evaluation counts.

        No site knows the digest of the whole model there.
        """
        return self.refusal(round, secrets.token_hex(32), examples)

    def refusal(self, round: int, digest: str, examples: int) -> str:
        """Return the reason against an evaluation; "" if it is allowed, and then count it.

        `round` is the server's number, `digest` the digest of the model, and `examples` the number
        of held-out examples.
        """
        if self._bounded and (round, digest) in self._measured:
            return self.policy.evaluation(examples, 0)
        if self._bounded and round < self._newest:
            return (
                f"a model of round {self._newest} was evaluated, but this is one of round {round}"
            )
        earlier = sum(1 for measured, _ in self._measured if measured == round)
        reason = self.policy.evaluation(examples, earlier)
        if not reason and self._bounded:
            self._state.note_measured(self._run, round, digest)
            self._measured.add((round, digest))
            self._newest = round
        return reason
