"""The fewest clients of which a new model is made, as the clients of a run ask for it.

    F = max over the clients that have checked in of what each asks for; 1 where nobody asks

No model is made of updates of fewer than F clients, counted where they are combined: whoever drops
out, fails, is refused, or is late does not count. A round that has fewer waits for more, and begins
again at its deadline. `why_not` says whether a run can ever have so many; a client that asks for
more is not taken, so that it cannot stop the others.

A rule such as Krum takes all updates and hands on a few: then these are the cohort
(`Aggregator.handed_on`). Under secure aggregation each sum has at least `minimum` clients.
"""

from __future__ import annotations

from dure.federated.aggregate import Aggregator
from dure.federated.server.pacing import Pacing


def why_not(
    asked: int,
    clients: int,
    pacing: Pacing,
    rule: Aggregator,
    sums: int | None,
) -> str | None:
    """Why a run cannot keep to so many clients in each new model; None where it can.

    asked: what a client asks for. clients: how many the run may have. rule: by which updates
    become one. sums: the fewest clients of a sum, where nobody sees single updates.
    """
    if asked <= 1:
        return None
    if asked > clients:
        return f"the run has at most {clients} clients"
    if sums is not None:
        # The protocol sees to it in every sum.
        return f"a secure sum of the run may have {sums}" if sums < asked else None
    if pacing.tosses:
        return (
            "each client's own coin says whether it is in a round, which may so have one client, "
            "and what differential privacy counts on does not allow to wait for others"
        )
    if pacing.most(clients) < asked:
        what = "a round of the run has" if pacing.synchronous else "the run makes a model of every"
        return f"{what} {pacing.most(clients)}"
    handed_on = rule.handed_on(max(asked, pacing.updates(clients)))
    if handed_on < asked:
        return f"the rule {rule} makes a model of the updates of {handed_on}"
    return None
