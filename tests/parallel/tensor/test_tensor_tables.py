"""Plans for models that hold tables by heads, numbers in configs, names of a layer's parameters.

And for models that make rows of all tokens. All learn what they learn undivided.
"""

from __future__ import annotations

import dataclasses
import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from divided import at_all_degrees, compare, enliven, on_ranks, texts, transformer
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.errors import PlanError
from dure.parallel.tensor import (
    Attributes,
    Column,
    Cut,
    DivisionPlan,
    Enter,
    Join,
    Leave,
    OnShards,
    Output,
    OwnDraws,
    Row,
    Tensors,
    Vocabulary,
    prove_plan,
)
from dure.parallel.tensor.dividing import check_lengths, check_plan
from dure.parallel.tensor.plan_entry import DivisionContext
from dure.parallel.tensor.rng import RngTracker
from dure.parallel.tensor.written_plan import TensorPlan
from small import largest_difference
from test_docs import DOCS, FENCE

CLOSE = 1e-12
PAGE = DOCS / "tensor-parallel.md"
SYMBOLS = 13
HEADS = 4
HEAD = 4
WIDTH = HEADS * HEAD
LENGTH = 8


@dataclass(frozen=True)
class Config:
    """Of the whole model, as all of its modules hold it."""

    heads: int = HEADS
    dropout: float = 0.0


class Attention(nn.Module):
    """Of rows of tokens, with everything by heads that no layer holds."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.table = nn.Parameter(torch.randn(2 * LENGTH - 1, config.heads))
        self.register_buffer("slopes", torch.rand(config.heads, 1, 1), persistent=False)
        self.register_buffer("seen", torch.zeros(config.heads))
        self.steps = torch.arange(1.0, 1 + config.heads).view(-1, 1, 1)
        self.temperature = nn.Parameter(torch.ones(()))
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, distances: Tensor, hidden: Tensor, far: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        heads = self.config.heads
        rows = self.query_key_value(hidden.reshape(batch * length, -1))
        query, key, value = rows.view(batch, length, 3, heads, HEAD).permute(2, 0, 3, 1, 4)
        biases = self.table[distances + LENGTH - 1].permute(2, 0, 1) + far
        biases = biases - self.slopes * self.steps * distances.abs()
        scores = query @ key.transpose(-1, -2) * self.temperature + biases
        self.seen.copy_(self.table.detach().abs().mean(0))
        shares = F.dropout(scores.softmax(-1), self.config.dropout, self.training)
        mixed = (shares @ value).transpose(1, 2).reshape(batch * length, -1)
        given: Tensor = self.projection(mixed).view(batch, length, -1)
        return given


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(config)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, 24)
        self.contract = nn.Linear(24, WIDTH)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, distances: Tensor, far: Tensor) -> Tensor:
        given = self.attention(distances, hidden=self.first_norm(hidden), far=far)
        hidden = hidden + self.dropout(given)
        rows = self.second_norm(hidden).flatten(0, 1)
        return hidden + self.contract(self.expand(rows).tanh()).view(hidden.shape)


class Head(nn.Module):
    """The bias of its layer has a name here too, which comes first and nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(SYMBOLS))
        self.decoder = nn.Linear(WIDTH, SYMBOLS)
        self.decoder.bias = self.bias
        self.register_parameter("weight", None)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.decoder(hidden)
        return scores.transpose(1, 2)


class Reader(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        config = Config(dropout=dropout)
        self.config = config
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.far = nn.Embedding(2, config.heads)
        self.blocks = nn.ModuleList([Block(config) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Head()
        self.head.decoder.weight = self.embedding.weight
        self.head.weight = self.embedding.weight

    def forward(self, symbols: Tensor) -> Tensor:
        places = torch.arange(symbols.shape[1])
        distances = places[:, None] - places
        far = self.far((distances.abs() > 2).long()).permute(2, 0, 1)
        hidden = self.embedding(symbols)
        for block in self.blocks:
            hidden = block(hidden, distances, far)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


def reader(dropout: float = 0.0) -> Reader:
    torch.manual_seed(1)
    model = Reader(dropout).double()
    enliven(model)
    return model


def plan_for_reader(sequence: bool) -> dict[str, Any]:
    along, rows = (1, 0) if sequence else (None, None)
    inside = (
        Attributes("config.heads"),
        Tensors("table"),
        Tensors("slopes", "steps", "seen", dim=0),
        OnShards("temperature"),
        Enter(along, argument="hidden"),
        Leave(along),
    )
    plan: dict[str, Any] = {
        "embedding": Vocabulary(along),
        "far": Column(),
        "blocks.*.attention": inside,
        "blocks.*.attention.query_key_value": Column(blocks=3, unit=HEAD, enters=False),
        "blocks.*.attention.projection": Row(unit=HEAD, leaves=False),
        "blocks.*.expand": Column(sequence=rows),
        "blocks.*.contract": Row(sequence=rows),
        "head.decoder": Output(),
    }
    if sequence:
        plan["blocks.*.*_norm"] = OnShards()
        plan["norm"] = (OnShards(), Join(1))
        plan["head.decoder"] = Output(enters=False)
        plan[""] = OwnDraws()
    return plan


def loss_of(targets: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda outputs: F.cross_entropy(outputs, targets)


def test_tables_numbers_and_rows_are_divided() -> None:
    def program(group: Group) -> list[dict[str, float]]:
        data = texts(2, SYMBOLS, LENGTH)
        found = []
        for sequence in (False, True):
            plan = plan_for_reader(sequence)
            found.append(compare(group, reader, data, plan=plan))
            # with dropout as well: who draws what is part of the proof
            inputs, targets = data[0]
            prove_plan(reader(0.3), plan, inputs, loss_of(targets), group)
        found.append(compare(group, rows_of_tokens, data, plan=ROWS))
        return found

    for degree, of_ranks in at_all_degrees(program).items():
        for rows in of_ranks:
            for row in rows:
                assert max(row.values()) < CLOSE, (degree, row)


class Told(nn.Module):
    """A block of rows of tokens, which is told of how many texts they are."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor, batch: int) -> Tensor:
        each = self.query_key_value(self.norm(rows)).view(batch, -1, 3, self.heads, HEAD)
        query, key, value = each.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return rows + self.projection(mixed.transpose(1, 2).reshape(-1, self.heads * HEAD))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.ModuleList([Told() for _ in range(2)])
        self.output = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        rows = self.embedding(symbols.flatten())
        for block in self.blocks:
            rows = block(rows, len(symbols))
        scores: Tensor = self.output(rows).view(*symbols.shape, -1)
        return scores.transpose(1, 2)


def rows_of_tokens() -> nn.Module:
    torch.manual_seed(1)
    model = Rows().double()
    enliven(model)
    return model


ROWS: dict[str, Any] = {
    "embedding": Vocabulary(),
    "blocks.0": Cut(0),
    "blocks.*": Attributes("heads"),
    "blocks.*.norm": OnShards(),
    "blocks.*.query_key_value": Column(blocks=3, unit=HEAD, sequence=0),
    "blocks.*.projection": Row(unit=HEAD, sequence=0),
    "output": Output(sequence=0),
}


def task_of(dropout: float = 0.0) -> dure.Task:
    inputs, targets = texts(1, SYMBOLS, LENGTH, batch=24)[0]
    return dure.Task(
        lambda: reader(dropout),
        F.cross_entropy,
        dure.Examples(inputs, targets),
        test=dure.Examples(inputs[:6], targets[:6]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        name="reader",
    )


def test_a_run_walks_the_path_of_one_worker_and_goes_on_from_its_folder(tmp_path: Path) -> None:
    task = task_of()
    strategy = dure.TensorParallel(8, plan=plan_for_reader(True))  # type: ignore[arg-type]
    alone = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=2), seed=3)
    world = dure.Processes(2)
    dure.train(task, strategy, world, dure.Stop(steps=1), seed=3, out=tmp_path / "run")
    many = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(steps=2))
    assert largest_difference(alone, many) < CLOSE


@pytest.mark.parametrize(
    ("strategy", "sequence"),
    [
        (dure.Parallel(dure.Mesh(data=2, tensor=2), 8, 2, zero=3), False),
        (dure.Parallel(dure.Mesh(pipeline=2, tensor=2), 8, 2), True),
    ],
    ids=["ZeRO 3", "pipeline"],
)
def test_meshes_walk_the_path_of_one_worker(strategy: dure.Parallel, sequence: bool) -> None:
    task = task_of()
    strategy = dataclasses.replace(strategy, plan=TensorPlan(plan_for_reader(sequence)))
    alone = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=2), seed=3)
    many = dure.train(task, strategy, dure.Processes(4), dure.Stop(steps=2), seed=3)
    assert largest_difference(alone, many) < CLOSE


def without(plan: dict[str, Any], pattern: str, kind: type) -> dict[str, Any]:
    return {**plan, pattern: tuple(one for one in plan[pattern] if not isinstance(one, kind))}


class Reading(Reader):
    """Its head reads the parent's name of the bias, as well as its layer does."""

    def forward(self, symbols: Tensor) -> Tensor:
        return super().forward(symbols) + self.head.bias[:, None]


ATTENTION = "blocks.*.attention"
WHOLE = plan_for_reader(False)
WRONG = {
    "a table that stays whole": (
        without(WHOLE, ATTENTION, Tensors),
        r"the model fails in blocks\.0\.attention \(the plan has Attributes\('config\.heads'\)",
    ),
    "an embedding that stays whole": (
        {pattern: kind for pattern, kind in WHOLE.items() if pattern != "far"},
        r"the model fails in blocks\.0\.attention ",
    ),
    "heads that stay": (
        without(WHOLE, ATTENTION, Attributes),
        r"the model fails in blocks\.0\.attention ",
    ),
    "nobody enters": (
        without(WHOLE, ATTENTION, Enter),
        r"^embedding\.weight: the plan has Vocabulary\(\); its gradient differs",
    ),
    "nobody sums": (without(WHOLE, ATTENTION, Leave), "its gradient differs"),
    "summed twice": (
        {**WHOLE, f"{ATTENTION}.projection": Row(unit=HEAD)},
        "its gradient differs",
    ),
    "a number that all have": (
        without(WHOLE, ATTENTION, OnShards),
        r"^blocks\.0\.attention\.temperature: .*the sum over the ranks is right, as "
        r"OnShards\('temperature'\) of its module makes it",
    ),
    "everything on shards": (
        {**WHOLE, ATTENTION: (*WHOLE[ATTENTION], OnShards())},
        r"^blocks\.0\.attention\.table: ",
    ),
    "rows that are no sequence": (
        {**plan_for_reader(True), "blocks.*.expand": Column(sequence=1)},
        r"fails in blocks\.0\.expand \(the plan has Column\(sequence=1\)\).*"
        r"blocks\.0\.expand has a tensor of 2 dimensions, the last one of features, so "
        r"sequence=1 is not a sequence dimension: where a model flattens",
    ),
}


def test_wrong_plans_are_refused_by_name() -> None:
    inputs, targets = texts(1, SYMBOLS, LENGTH)[0]

    def tried(model: nn.Module, plan: DivisionPlan, group: Group) -> str:
        try:
            prove_plan(model, plan, inputs, loss_of(targets), group)
        except PlanError as error:
            return str(error)
        return ""

    def program(context: RankContext) -> list[str]:
        found = [tried(reader(), plan, context.group) for plan, _ in WRONG.values()]
        return [*found, tried(Reading().double(), WHOLE, context.group)]

    *found, reads = on_ranks(2, program)[0]
    for (name, (_, message)), text in zip(WRONG.items(), found, strict=True):
        assert re.search(message, text), f"{name}: {text}"
    assert "the model fails, which it does not undivided" in reads


def test_a_sequence_of_features_is_refused_before_ranks_start() -> None:
    plan = {**plan_for_reader(True), "blocks.*.contract": Row(sequence=1)}
    inputs, _ = texts(1, SYMBOLS, LENGTH)[0]
    with pytest.raises(ValueError, match=r"blocks\.0\.contract has a tensor of 2 dimensions"):
        check_lengths(reader(), plan, 2, inputs)
    check_lengths(reader(), plan_for_reader(True), 2, inputs)


def with_tables(**tensors: Any) -> nn.Module:
    model = nn.Module()
    for name, value in tensors.items():
        if isinstance(value, nn.Parameter):
            model.register_parameter(name, value)
        else:
            model.register_buffer(name, value)
    return model


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def tied_tables() -> nn.Module:
    model = nn.ModuleList([with_tables(table=parameter(3, 4)) for _ in range(2)])
    model[1].table = model[0].table
    return model


def scaled() -> nn.Module:
    model = with_tables(table=parameter(3, 4))
    model.table.register_hook(lambda gradient: 2 * gradient)  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(
    ("model", "plan", "said"),
    [
        (
            with_tables(table=parameter(3, 4)),
            {"": Tensors("tables")},
            "not have its own parameter or buffer 'tab",
        ),
        (with_tables(table=parameter(3, 3)), {"": Tensors("table")}, r"\[3, 3\] has 3 to divide"),
        (with_tables(table=parameter(4)), {"": Tensors("table", dim=1)}, "has 1 dimensions, and n"),
        (with_tables(table=parameter(3, 4)), {"": Tensors("table", blocks=3)}, "not 3 equal blo"),
        (with_tables(table=parameter(3, 4)), {"": Tensors("table", unit=4)}, "1 .units of 4. to d"),
        (scaled(), {"": Tensors("table")}, "table has hooks, which its part would not have"),
        (tied_tables(), {"0": Tensors("table")}, r"0 and 1 share a parameter: .*Tensors\('table'"),
        (
            tied_tables(),
            {"0": Tensors("table"), "1": Tensors("table", dim=0, unit=1)},
            "table of shape .3, 4. has 3 to divide",
        ),
        (
            with_tables(table=parameter(4, 4)),
            {"": (Tensors("table"), Tensors("table", dim=0))},
            "divides .table in two ways",
        ),
        (
            nn.Sequential(nn.Linear(4, 4)),
            {"0": (Column(), Tensors("weight"))},
            "0 is a layer that the plan divides: leave Tensors out",
        ),
        (nn.Sequential(nn.Embedding(2, 3)), {"0": Column()}, "0 with 3 columns has 3 to divide"),
        (nn.Sequential(nn.Embedding(2, 4)), {"0": Column(sequence=1)}, "whose input is indices"),
        (
            nn.Sequential(nn.Embedding(2, 4, sparse=True)),
            {"0": Column()},
            "0 has max_norm, scale_grad_by_freq or sparse",
        ),
        (
            nn.Sequential(nn.Linear(4, 4)),
            {"0": Row(sequence=1, leaves=False)},
            "leave sequence out",
        ),
        (transformer(), {"": OnShards("scale")}, "the model has no parameter 'scale' of its own"),
        (
            transformer(),
            {"blocks.0": Enter(argument="state")},
            "blocks.0 takes no argument 'state'",
        ),
        (transformer(), {"blocks.0": Cut(0, units=3)}, "cuts 3 units, not a multiple of the degr"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_any_work(
    model: nn.Module, plan: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check_plan(model, plan, 2)


Named = namedtuple("Named", ["heads", "width"])


class Slotted:
    __slots__ = ("heads",)

    def __init__(self) -> None:
        self.heads = 4


@pytest.mark.parametrize(
    ("holds", "name", "read"),
    [
        (SimpleNamespace(heads=4), "held.heads", lambda held: held.heads),
        (Config(), "held.heads", lambda held: held.heads),
        (Slotted(), "held.heads", lambda held: held.heads),
        ({"heads": 4, "width": 6}, "held.heads", lambda held: held["heads"]),
        (Named(4, 6), "held.heads", lambda held: held.heads),
        (Named(4, 6), "held.0", lambda held: held.heads),
        ((6, 4), "held.1", lambda held: held[1]),
        ([6, 4], "held.1", lambda held: held[1]),
        (SimpleNamespace(text=Config()), "held.text.heads", lambda held: held.text.heads),
    ],
)
def test_a_number_in_what_a_module_holds_is_divided_for_that_module_alone(
    holds: Any, name: str, read: Callable[[Any], int]
) -> None:
    first, second = nn.Module(), nn.Module()
    for module in (first, second):
        module.held = holds
        module.more = 8
    model = nn.ModuleList([first, second])
    group = Group()
    group.size = 2  # alone, with the numbers of one of two
    plan = {"0": (Attributes(name), Attributes("more"))}
    check_plan(model, plan, 2)
    assert read(first.held) == 4, "a check changes nothing"
    at = DivisionContext(group, None, RngTracker(group, torch.device("cpu")))
    for kind in plan["0"]:
        kind.change("0", first, at)()
    assert (read(first.held), read(second.held), read(holds)) == (2, 4, 4)
    assert type(first.held) is type(holds)
    assert (first.more, second.more) == (4, 8)


class Fixed:
    @property
    def heads(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("holds", "name", "said"),
    [
        (Config(), "held.width", "0 has no integer 'held.width' that could be divided"),
        (Config(), "held.dropout", "0 has no integer 'held.dropout'"),
        ({"heads": True}, "held.heads", "0 has no integer 'held.heads'"),
        (Config(heads=3), "held.heads", "0 has held.heads = 3, not a multiple of the degree 2"),
        (Fixed(), "held.heads", "0 has held.heads, which cannot be changed"),
        (
            nn.Linear(4, 4),
            "held.in_features",
            r"a Linear: use Attributes\('in_features'\) for that",
        ),
    ],
)
def test_a_number_that_cannot_be_divided_is_refused_by_name(
    holds: Any, name: str, said: str
) -> None:
    module = nn.Module()
    module.held = holds
    with pytest.raises(ValueError, match=said):
        check_plan(nn.ModuleList([module]), {"0": Attributes(name)}, 2)


def test_several_columns_enter_a_region_once() -> None:
    """And after it all ranks draw alike again."""

    def program(context: RankContext) -> tuple[float, float, list[float]]:
        draws = RngTracker(context.group, torch.device("cpu"))
        torch.manual_seed(1)
        draws.enter()
        draws.enter()
        own = float(torch.rand(()))
        draws.leave()
        common = float(torch.rand(()))
        # A region that was left by an error, after which the generator was put back.
        draws.enter()
        torch.manual_seed(2)
        draws.enter()
        again = float(torch.rand(()))
        draws.leave()
        return own, common, [again, float(torch.rand(()))]

    (own, common, (again, last)), (other, alike, (another, end)) = on_ranks(2, program)
    assert own != other
    assert common == alike
    assert again != another
    assert last == end


def test_the_plan_of_the_page_is_right_and_each_word_of_it_is_needed() -> None:
    (body,) = (
        body for _, body in FENCE.findall(PAGE.read_text()) if body.startswith("# my_attention.py")
    )
    page: dict[str, Any] = {"__name__": "my_attention"}
    exec(compile(body, "my_attention.py", "exec"), page)
    plan, symbols = page["plan"], page["symbols"][:4]
    first, *layers = plan
    fewer = [
        {**plan, first: tuple(one for one in plan[first] if one != left)} for left in plan[first]
    ]
    fewer += [{name: plan[name] for name in plan if name != layer} for layer in layers]
    torch.manual_seed(1)
    model = page["Model"]()
    enliven(model)

    def program(context: RankContext) -> list[bool]:
        held = []
        for each in (plan, *fewer):
            try:
                prove_plan(model, each, symbols, loss_of(symbols.flip(1)), context.group)
                held.append(True)
            except PlanError:
                held.append(False)
        return held

    assert on_ranks(2, program)[0] == [True] + [False] * (len(plan[first]) + len(layers))
