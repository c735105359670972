"""The smallest cohort: the fewest clients of a new model, as the run's clients require.

    F = max over the checked-in clients of the number that each requires; 1 without requirements

No model is made of updates of fewer than F clients, counted at the time of combining: a client that
drops out, fails, is refused, or is late does not count. A round with fewer updates waits for more,
and restarts at its deadline. `cohort_objection` decides whether a run can ever have F clients; a
client that requires more is rejected, so that it cannot block the others.

A rule such as Krum takes all updates and selects a few: the selected updates then count as the
cohort (`Aggregator.least_contributors`). Under secure aggregation each sum has at least `minimum`
clients.
"""

from __future__ import annotations

from dure.federated.aggregate import Aggregator
from dure.federated.server.pacing import Pacing


def cohort_objection(
    asked: int,
    clients: int,
    pacing: Pacing,
    rule: Aggregator,
    sums: int | None,
) -> str | None:
    """Return why a run cannot have `asked` clients in each new model; None if it can.

    Args:
        asked: number of clients that a client requires.
        clients: largest number of clients in the run.
        pacing: pacing of the run.
        rule: rule that combines updates.
        sums: fewest clients of a secure sum; None without secure aggregation.
    """
    if asked <= 1:
        return None
    if asked > clients:
        return f"the run has at most {clients} clients"
    if sums is not None:
        # The protocol guarantees the minimum in every sum.
        return f"a secure sum of the run may have {sums}" if sums < asked else None
    if pacing.samples_independently:
        return (
            "each client's own coin says whether it is in a round, which may so have one client, "
            "and what differential privacy counts on does not allow to wait for others"
        )
    if pacing.most(clients) < asked:
        what = "a round of the run has" if pacing.synchronous else "the run makes a model of every"
        return f"{what} {pacing.most(clients)}"
    least_contributors = rule.least_contributors(max(asked, pacing.updates(clients)))
    if least_contributors < asked:
        return f"the rule {rule} makes a model of the updates of {least_contributors}"
    return None
