"""Power-of-Choice: of d clients that are drawn, those with the largest losses train.

Y. J. Cho, J. Wang, G. Joshi, "Towards Understanding Biased Client Selection in Federated Learning",
AISTATS 2022, π_pow-d and, with no message more, π_rpow-d:

    A   <- d clients without replacement, each next one with probability ~ n_k
    S_t <- the m of A with the largest F_k(w): those they answer (pow-d), or told last (rpow-d)"""

import math
from dataclasses import dataclass
from typing import ClassVar

import dure
from dure.federated.server.sampling import Weighted


@dataclass(frozen=True)
class PowerOfChoice(Weighted):
    """π_pow-d, in a simulation. candidates: d, of which a round takes m = C·K."""

    candidates: int = 10

    name: ClassVar[str] = "pow-d"
    asks: ClassVar[bool] = True

    def ranked(self, seed, round, attempt, sizes, losses):
        order = self.order(seed, round, attempt, sizes)
        drawn = [order(place) for place in range(min(self.candidates, len(sizes)))]
        told = zip(drawn, self.losses_of(drawn, losses), strict=True)
        # Who does not answer, NaN, comes last.
        found = {one: -math.inf if math.isnan(loss) else loss for one, loss in told}
        return sorted(drawn, key=found.__getitem__, reverse=True)

    def losses_of(self, clients, losses):
        return losses.now(clients)


@dataclass(frozen=True)
class LastLosses(PowerOfChoice):
    """π_rpow-d, over a network too; whoever has not told a loss yet comes first."""

    name: ClassVar[str] = "rpow-d"
    asks: ClassVar[bool] = False

    def losses_of(self, clients, losses):
        told = [losses.last(client) for client in clients]
        return [math.inf if loss is None else loss for loss in told]


task = dure.load_task("digits", lr=0.1)
for selection in ("uniform", PowerOfChoice(candidates=12), LastLosses(candidates=12)):
    strategy = dure.FedAvg(30, 0.1, 2, selection=selection, partition="dirichlet:0.3")
    run = dure.train(task, strategy, stop=dure.Stop(rounds=30))
    print(f"{strategy.label}: accuracy {run.summary['test_accuracy']:.2f}")
