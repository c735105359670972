"""What clients tell of their examples, where they train by DP-SGD, and what that does not go with.

Client k has n_k examples and makes its steps with rate q_k = B / n_k and noise z. After T_k steps,
of all turns that it was asked for, whether or not its update counted, its epsilon is that of T_k
releases. Clients' examples are apart, so that every client has an account of its own, and the
federation has the epsilon of the worst one:

    epsilon         of the client that has told most
    epsilon_least   of the client that has told least

They are called example_epsilon and example_epsilon_least beside an epsilon of clients.

More steps tell more, and so does a larger rate; a client of which another has both is not asked
for. The account is the server's, of what it has asked; it takes no message. It holds for clients
that train as they are asked to: a server cannot see that they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dure.federated.privacy.choice import Privacy
from dure.privacy.accountant import Releases, epsilon
from dure.privacy.dp_sgd import DPSGD
from dure.privacy.example_level import promise


class ExampleAccount:
    """The accounts of all clients.

    sizes: examples of each. steps: that each makes in a turn. batch_size: B; None is all of a
    client's examples in every step. simulated: whether the noise follows from the seed.
    beside: whether clients have an epsilon too.
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
        """Each of these has trained once more, as far as is known."""
        for client in clients:
            self.turns[client] += 1

    def numbers(self) -> dict[str, float]:
        """What the most and the least talkative client has told."""
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
        """What is promised, for the summary and the report."""
        numbers = self.numbers()
        bound = numbers[self.name] if self.settings.noise else None
        rate = max(self.rates)
        return {
            "promises": [
                {
                    **promise(self.settings, rate, self.delta, self.simulated).facts(bound),
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
    """Those of (rate, steps) of which no other has both larger, or smaller."""
    front: list[tuple[float, int]] = []
    sign = 1 if largest else -1
    for rate, times in sorted(spent, reverse=largest):
        if not front or sign * times > sign * front[-1][1]:
            front.append((rate, times))
    return front


def check_own_noise(privacy: Privacy) -> None:
    """Raises ValueError where a client elsewhere would draw noise that the server can draw too."""
    if privacy.example is not None and privacy.example.draws == "seed":
        raise ValueError(
            "dp-sgd: the server knows the seed, and would know the noise of its clients: leave "
            "draws=seed out"
        )


def check_example_level(privacy: Privacy, epsilon: float | None, fine_tune: int) -> None:
    """Raises ValueError for what local training by DP-SGD does not go with."""
    if privacy.example is None:
        return
    if fine_tune:
        raise ValueError(
            "dp-sgd: fine_tune trains clients' own models without noise, and what is measured of "
            "them tells of their examples: leave fine_tune out"
        )
    if privacy.user is None and epsilon is not None:
        raise ValueError(
            "dp-sgd: how many steps a client makes depends on its examples, so that no noise is "
            "chosen for an epsilon: leave epsilon out, and give the noise, as in dp-sgd:1:1.1"
        )
