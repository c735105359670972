"""Example-level privacy account of clients that train by DP-SGD, and its combinations.

Client k has n_k examples and makes its steps with sampling rate q_k = B / n_k and noise z. T_k is
the number of steps in all assignments to the client, whether or not its updates counted. The
client's epsilon is that of T_k releases. The data of clients are disjoint, so each client has an
account of its own, and the federation has the epsilon of the worst client:

    epsilon         the largest epsilon of a client
    epsilon_least   the smallest epsilon of a client

The names are example_epsilon and example_epsilon_least if clients have an epsilon as well.

Epsilon grows with the steps and with the rate, so only the clients on the front of (rate, steps)
are computed. The server keeps the account from its own assignments; the account needs no message.
The guarantee assumes that clients train as requested: the server cannot verify their training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dure.federated.privacy.privacy_settings import Privacy
from dure.privacy.accountant import Releases, epsilon
from dure.privacy.dp_sgd import DPSGD
from dure.privacy.example_level import dp_sgd_guarantee


class ExampleAccount:
    """Privacy accounts of all clients.

    Args:
        settings: settings of DP-SGD.
        delta: delta of each client's guarantee.
        sizes: number of examples of each client.
        steps: number of steps that each client makes in an assignment.
        batch_size: B; None uses all of a client's examples in every step.
        simulated: whether the noise follows from the seed.
        beside: whether clients have an epsilon as well.
    """

    def __init__(
        self,
        settings: DPSGD,
        delta: float,
        sizes: Sequence[int],
        steps: Sequence[int],
        batch_size: int | None,
        simulated: bool,
        beside: bool = False,
    ) -> None:
        self.name = "example_epsilon" if beside else "epsilon"
        self.simulated = simulated
        self.settings = settings
        self.delta = delta
        self.rates = [
            1.0 if batch_size is None or not size else min(1.0, batch_size / size) for size in sizes
        ]
        self.steps = list(steps)
        self.turns = [0] * len(self.steps)

    def asked(self, clients: Iterable[int]) -> None:
        """Add an assignment to the account of each of these clients."""
        for client in clients:
            self.turns[client] += 1

    def numbers(self) -> dict[str, float]:
        """Return the largest and the smallest epsilon of a client."""
        spent = {
            (rate, turns * steps)
            for rate, turns, steps in zip(self.rates, self.turns, self.steps, strict=True)
        }
        return {
            self.name: max(map(self._epsilon, _front(spent, largest=True))),
            f"{self.name}_least": min(map(self._epsilon, _front(spent, largest=False))),
        }

    def _epsilon(self, spent: tuple[float, int]) -> float:
        rate, times = spent
        return epsilon([Releases(rate, self.settings.noise, times)], self.delta)

    def facts(self) -> dict[str, Any]:
        """Return the guarantee for the summary and the report."""
        numbers = self.numbers()
        bound = numbers[self.name] if self.settings.noise else None
        rate = max(self.rates)
        return {
            "promises": [
                {
                    **dp_sgd_guarantee(self.settings, rate, self.delta, self.simulated).facts(
                        bound
                    ),
                    "assumes": "clients that train as they are asked to",
                    "least": numbers[f"{self.name}_least"] if self.settings.noise else None,
                    "mechanism": str(self.settings),
                    "rate": rate,
                }
            ]
        }

    def state(self) -> list[int]:
        return list(self.turns)

    def restore(self, state: Sequence[int]) -> None:
        self.turns = list(state)


def _front(spent: Iterable[tuple[float, int]], largest: bool) -> list[tuple[float, int]]:
    """Return the pairs (rate, steps) that no other pair exceeds in both; or undercuts in both."""
    front: list[tuple[float, int]] = []
    sign = 1 if largest else -1
    for rate, times in sorted(spent, reverse=largest):
        if not front or sign * times > sign * front[-1][1]:
            front.append((rate, times))
    return front


def check_own_noise(privacy: Privacy) -> None:
    """Check that remote clients draw secret noise; raises ValueError for noise from the seed."""
    if privacy.example is not None and privacy.example.draws == "seed":
        raise ValueError(
            "dp-sgd: the server knows the seed, and so could compute its clients' noise: leave "
            "draws=seed out"
        )


def check_example_level(privacy: Privacy, epsilon: float | None, fine_tune: int) -> None:
    """Check the settings next to DP-SGD; raises ValueError for a combination without guarantee."""
    if privacy.example is None:
        return
    if fine_tune:
        raise ValueError(
            "dp-sgd: fine_tune trains personalised models without noise, and their metrics "
            "reveal information on the examples: leave fine_tune out"
        )
    if privacy.user is None and epsilon is not None:
        raise ValueError(
            "dp-sgd: a client's number of steps depends on its examples, so the noise cannot be "
            "chosen for an epsilon: leave epsilon out and give the noise, as in dp-sgd:1:1.1"
        )
