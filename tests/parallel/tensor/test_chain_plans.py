"""Chains of linear layers divided by columns, by rows and alternately: equal, and what travels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from divided import backward, compare, on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dure
from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.parallel.tensor import Column, Row, parallelize, prove_plan
from dure.parallel.tensor.builtin_plans import plan_of
from dure.parallel.tensor.chain_plans import MAKERS, chain_plan, chains_of, traced_chains
from dure.parallel.tensor.dividing import check_plan
from dure.parallel.tensor.written_plan import NAMES, TensorPlan
from dure.run.registry import decode_strategy, encode, parse_strategy
from small import FEATURES, largest_difference, same_bits, small_task

TOLERANCE = 1e-12
ROWS = 5
WIDTHS = (12, 24, 12, 36, 12)
PLANS = tuple(MAKERS)


def chain(widths: Sequence[int] = WIDTHS, dropout: float = 0) -> nn.Sequential:
    """Linear layers with element-wise ones between them, some in a Sequential of their own."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(nn.Sequential(*layers[:3]), *layers[3:-2]).double()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for _ in range(count):
        inputs = torch.randn(ROWS, WIDTHS[0], generator=generator, dtype=torch.float64)
        made.append((inputs, torch.randint(0, WIDTHS[-1], (ROWS,), generator=generator)))
    return made


class Sent(NamedTuple):
    """Numbers that a rank sends."""

    forward: float
    backward: float


def formula(plan: str, widths: Sequence[int], degree: int) -> Sent:
    """As `dure.parallel.tensor.chain_plans` says it."""
    *inner, last = [ROWS * width for width in widths[1:]]
    share = (degree - 1) / degree
    if plan == "columns":
        return Sent(share * (sum(inner) + last), share * sum(inner))
    if plan == "rows":
        return Sent(share * (sum(inner) + 2 * last), share * sum(inner))
    even = len(widths) % 2 == 1
    forward = 2 * share * sum([*inner, last][1::2]) + (0 if even else share * last)
    return Sent(forward, 2 * share * sum(inner[1::2]))


def sent(plan: str, widths: Sequence[int], group: Group) -> Sent:
    """As the meter counts it, of numbers of eight bytes."""
    model = chain(widths)
    parallelize(model, chain_plan(plan, model), group)
    counters = group.meter.counters
    inputs = torch.ones(ROWS, widths[0], dtype=torch.float64)
    before = counters.bytes_sent
    loss = model(inputs).sum()
    between = counters.bytes_sent
    loss.backward()
    return Sent((between - before) / 8, (counters.bytes_sent - between) / 8)


def divided(group: Group) -> dict[str, Any]:
    """For each plan: how far it is from the undivided model, and what two chains have sent."""
    found: dict[str, Any] = {}
    for plan in PLANS:
        made = chain_plan(plan, chain())
        found[plan] = {
            "apart": max(
                *compare(group, chain, batches(3), plan=made).values(),
                *compare(group, written, batches(2), plan=chain_plan(plan, written())).values(),
            ),
            # of an even number of layers, and of an odd one
            "sent": [sent(plan, widths, group) for widths in (WIDTHS, WIDTHS[:-1])],
        }
        # Dropout on parts is drawn by each rank for itself, and this is compared as well.
        model = chain(dropout=0.5)
        inputs, targets = batches(1)[0]
        loss = partial(nn.functional.cross_entropy, target=targets)
        prove_plan(model, made, inputs, loss, group)
        parallelize(model, made, group)
        backward(model, (inputs, targets))
        found[plan]["alike after"] = float(torch.rand(()))
    return found


def on_groups(context: RankContext) -> dict[int, Any]:
    found = {}
    for ranks in ([3], [0, 1], [0, 1, 2], [0, 1, 2, 3]):
        group = dist.new_group(ranks, backend="dure")
        if context.group.rank in ranks:
            found[len(ranks)] = divided(Group(group))
    return found


def test_the_three_plans_are_the_undivided_chain_and_send_what_the_formulas_say() -> None:
    rows = on_ranks(4, on_groups)
    for degree in (1, 2, 3, 4):
        ranks = [row[degree] for row in rows if degree in row]
        assert len(ranks) == degree
        for plan in PLANS:
            own = [rank[plan] for rank in ranks]
            assert max(one["apart"] for one in own) < TOLERANCE
            expected = [formula(plan, widths, degree) for widths in (WIDTHS, WIDTHS[:-1])]
            for one in own:
                assert one["sent"] == [pytest.approx(each, abs=1e-9) for each in expected]
            assert len({one["alike after"] for one in own}) == 1


@given(
    widths=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    breaks=st.sets(st.integers(0, 4)),
    plan=st.sampled_from(PLANS),
    degree=st.integers(1, 4),
)
def test_every_linear_layer_of_any_chain_is_divided(
    widths: list[int], breaks: set[int], plan: str, degree: int
) -> None:
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(pairwise(widths)):
        layers += [nn.Linear(degree * inputs, degree * outputs)]
        layers += [nn.LayerNorm(degree * outputs) if place in breaks else nn.ReLU()]
    model = nn.Sequential(*layers)
    made = chain_plan(plan, model)
    check_plan(model, made, degree)
    assert list(made) == [str(2 * place) for place in range(len(widths) - 1)]
    # A norm uses all features: it ends a chain, and the next one begins.
    inside = breaks & set(range(len(widths) - 2))
    assert len(chains_of(model)) == len(inside) + 1
    whole = [str(2 * place) for place in [*sorted(inside), len(widths) - 2]]
    for name, kind in made.items():
        if isinstance(kind, Row):
            assert kind.features is (plan == "rows" and name not in whole)
        else:
            assert isinstance(kind, Column)
            assert plan == "alternating" or kind.gather_output is (name in whole)


class Branching(nn.Module):
    """Its code looks at numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Written(nn.Module):
    """Chains in code of one's own: first, second; beside, whose outputs are used twice; last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.second = nn.Linear(24, 12)
        self.beside = nn.Linear(12, 12)
        self.last = nn.Linear(12, 12)
        self.twice = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(nn.functional.dropout(self.first(x).relu(), 0.0, self.training))
        z = torch.tanh(self.beside(y.softmax(-1)))
        scores: Tensor = self.twice(self.twice(self.last(z + z)))
        return scores


def written() -> nn.Module:
    torch.manual_seed(1)
    return Written().double()


def test_chains_are_found_in_code_of_ones_own() -> None:
    assert traced_chains(written()) == [["first", "second"], ["beside"], ["last"]]
    plan = plan_of(Written(), False, TensorPlan("columns"))
    assert plan["second"] == Column(gather_output=True, features=True)


class Wrapped(nn.Module):
    """Two chains, between which a model can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 8),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 12),
            nn.ReLU(),
            nn.Linear(12, 4),
        ).double()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


def test_strategies_take_them_by_name_and_go_on_with_the_same_bits(tmp_path: Path) -> None:
    task = small_task(model=Wrapped)
    stop = dure.Stop(steps=6)
    world = dure.Processes(2)
    alone = dure.train(task, dure.SingleWorker(8), stop=stop, seed=3)
    columns = dure.TensorParallel(8, plan="columns")  # type: ignore[arg-type]
    many = dure.train(task, columns, world, stop, seed=3)
    assert many.summary["label"] == "tensor parallel, columns ×2"
    assert largest_difference(alone, many) < TOLERANCE
    dure.train(task, columns, world, dure.Stop(steps=3), seed=3, out=tmp_path / "a")
    assert same_bits(many, dure.resume(tmp_path / "a", task=task, stop=stop))
    # between the two chains the model can be cut
    mesh = dure.Mesh(pipeline=2, tensor=2)
    rows = dure.Parallel(mesh, 8, 2, cut=("layers.4",), plan="rows")  # type: ignore[arg-type]
    cut = dure.train(task, rows, dure.Processes(4), stop, seed=3)
    assert largest_difference(alone, cut) < TOLERANCE


def test_a_named_plan_is_written_as_its_name() -> None:
    for name in NAMES:
        strategy = dure.TensorParallel(plan=name)  # type: ignore[arg-type]
        assert encode(strategy)["plan"] == name
        assert decode_strategy(encode(strategy)) == strategy
    assert parse_strategy("tensor-parallel,plan=rows") == dure.TensorParallel(
        plan=TensorPlan("rows")
    )


def test_what_cannot_be_divided_so_is_refused() -> None:
    def refused(model: nn.Module, plan: str, said: str, sequence: bool = False) -> None:
        with pytest.raises(ValueError, match=said):
            check_plan(model, plan_of(model, sequence, TensorPlan(plan)), 3)

    odd = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 10))
    refused(odd, "columns", "2 with 10 outputs has 10 to divide, not a multiple of the degree 3")
    refused(nn.Sequential(nn.Linear(8, 9)), "rows", "0 with 8 inputs has 8 to divide")
    uneven = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 9))
    refused(uneven, "rows", "0 with 10 outputs has 10 to divide")
    refused(nn.Sequential(nn.Conv1d(1, 1, 1)), "rows", "this Sequential has none that can be")
    refused(Branching(), "alternating", "this Branching cannot be traced: symbolically traced")
    refused(odd, "rows", "the plan rows divides no sequences", sequence=True)
    with pytest.raises(ValueError, match="did you mean 'rows'"):
        TensorPlan("row")
    with pytest.raises(ValueError, match="leave sequence, enters and leaves out"):
        check_plan(odd, {"0": Column(features=True, sequence=1)}, 3)
    with pytest.raises(ValueError, match="leave sequence, enters and leaves out"):
        check_plan(odd, {"0": Row(features=True, leaves=False)}, 3)


def test_a_layer_that_stands_in_two_places_is_part_of_no_chain() -> None:
    twice = nn.Linear(6, 6)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), twice, nn.ReLU(), twice, nn.Linear(6, 6))
    assert chains_of(model) == [["0"], ["5"]]
