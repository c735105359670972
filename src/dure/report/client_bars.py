"""Bars of the named clients, such as hospitals: the global model's metric on each client's data.

Clients that are numbers only are summarised by the spread instead. The client with the worst value
of the metric is marked.
"""

from __future__ import annotations

from dure.report.federated_figures import FederationRun, name_of
from dure.report.formatting import escape, higher_is_better, is_share, metric_name, metric_value
from dure.report.html_fragments import swatch
from dure.report.translation import translated

MOST = 100
"""Most clients with a bar."""


def client_bars(one: FederationRun, metric: str) -> str:
    """Return the bars of a run; empty if no client has a name, or none has measured."""
    values = one.federation.by_client.get(f"client_{metric}", ())
    known = [
        (client, value)
        for client, value in zip(one.federation.clients, values, strict=False)
        if value is not None and _has_name(one, client)
    ]
    if not known:
        return ""
    worst = (min if higher_is_better(metric) else max)(value for _, value in known)
    # The scale of a share is 1; of any other metric, the largest value.
    full = 1.0 if is_share(metric) else max(max(abs(value) for _, value in known), 1e-12)
    # Of many clients, those with the worst values.
    ordered = sorted(known, key=lambda pair: pair[1], reverse=not higher_is_better(metric))[:MOST]
    shown = sorted(client for client, _ in ordered)
    by_client = dict(known)
    rows = "".join(
        _row(name_of(one.run, client), metric, by_client[client], worst=worst, full=full)
        for client in shown
    )
    name = escape(metric_name(metric))
    title = translated("{run}: {metric} by client", run=escape(one.run.label), metric=name)
    heading = f"<h3>{swatch(one.place)}<span>{title}</span></h3>"
    left = len(known) - len(shown)
    note = translated("{count} more clients, all with better values.", count=left)
    more = f'<p class="aside">{note}</p>' if left else ""
    return f'<div class="bars clients">{heading}<ul>{rows}</ul>{more}</div>'


def _has_name(one: FederationRun, client: int) -> bool:
    return name_of(one.run, client) != str(client)


def _row(name: str, metric: str, value: float, worst: float, full: float) -> str:
    written = metric_value(metric, value)
    if value == worst:
        mark = f'<span class="unseen"> ({translated("worst")})</span>'
        written = f'<span class="least">{written}{mark}</span>'
    width = max(0.0, min(100.0, 100 * value / full))
    kind = "checkpoint" if value == worst else "compute"
    bar = f'<span class="bar"><i class="{kind}" style="width:{width:.1f}%"></i></span>'
    who = f'<span class="who">{escape(name)}</span>'
    return f'<li data-client="{escape(name)}">{who}{bar}<span class="much">{written}</span></li>'
