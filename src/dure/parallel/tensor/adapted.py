"""Division of adapted layers: the adapters are divided with their layer.

    y = W x + s·B A x            W, B, A are three linear layers of an adapted layer

    entry of the layer    W             A                          B
    Column, Output        the entry     whole on every rank        the entry: the same outputs
    Row                   the entry     the entry: the same inputs whole on every rank

A column's A computes on the whole input, so each rank needs it whole; its outputs, `rank` numbers,
enter the divided region of B. A row's A is summed over the ranks to `rank` numbers. If another
module begins or ends the region, or the ranks have shards of the sequence, the whole factor has a
different gradient on each rank, and the gradients are summed (`OnShards`).

Cost: an all-reduce of `rank` numbers for each token, backward for a column and forward for a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from dure.contracts.adapter import ADAPTER, is_adapted
from dure.parallel.tensor.changes import OnShards
from dure.parallel.tensor.plan import Column, Output, PlanEntry, Row, Vocabulary


def with_adapters(
    model: nn.Module, found: Iterable[tuple[str, PlanEntry]]
) -> list[tuple[str, PlanEntry]]:
    """Return a plan's entries by module, with the entries of the layers inside adapted layers.

    Raises ValueError for an entry that adapters cannot follow.
    """
    return [
        each
        for name, kind in found
        for each in (
            _entries(name, kind) if is_adapted(model.get_submodule(name)) else [(name, kind)]
        )
    ]


def _entries(name: str, kind: PlanEntry) -> Iterator[tuple[str, PlanEntry]]:
    """Yield the entries of an adapted layer's three layers."""
    if not isinstance(kind, Column | Row | Output | Vocabulary):
        yield name, kind
        return
    if isinstance(kind, Vocabulary) or (isinstance(kind, Column | Row) and kind.features):
        raise ValueError(
            f"the plan has {kind} for {name}, which has an adapter: adapters are divided with a "
            "Column, a Row or an Output that takes and returns no parts of features"
        )
    a, b = f"{name}.lora_A.{ADAPTER}", f"{name}.lora_B.{ADAPTER}"
    by_rows = isinstance(kind, Row)
    yield f"{name}.base_layer", kind
    yield a if by_rows else b, kind
    alone = kind.leaves if isinstance(kind, Row) else kind.enters
    if not alone or kind.sequence is not None:
        yield b if by_rows else a, OnShards()
