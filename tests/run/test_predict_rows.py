"""New rows for models whose inputs are more than one tensor, or are made by the task's collate."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import dure
from dure.run.predict import predict


class OfColumns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(4, 2)
        self.last = nn.Linear(5, 3)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        scores: Tensor = self.last(torch.cat([self.codes(x["cat"]), x["num"]], 1))
        return scores


class OfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        scores: Tensor = self.last(torch.cat([x[0], x[1][:, None]], 1))
        return scores


class OfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(256, 3, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.words(x)
        return scores


NUMBERS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 3
COLUMNS = {"cat": torch.arange(6) % 4, "num": NUMBERS}


def bytes_of_texts(items: Any) -> tuple[Tensor, Tensor]:
    rows = [torch.tensor(list(text.encode())) for text, _ in items]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([y for _, y in items])


def items(kind: str) -> Any:
    if kind == "text":
        texts = [("a word", 0), ("two of them", 1), ("b", 2)]
        return DataLoader(texts, batch_size=2, collate_fn=bytes_of_texts)  # type: ignore[arg-type]
    if kind == "rows":
        return [
            {"cat": int(code), "num": row.tolist(), "label": int(label)}
            for code, row, label in zip(COLUMNS["cat"], NUMBERS, LABELS, strict=True)
        ]
    inputs: Any = COLUMNS if kind == "columns" else (NUMBERS, torch.arange(6.0))
    return inputs, LABELS


MODELS: dict[str, Callable[[], nn.Module]] = {
    "columns": OfColumns,
    "rows": OfColumns,
    "two": OfTwo,
    "text": OfWords,
}
Runs = dict[str, tuple[Path, dure.Task, nn.Module]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found: Runs = {}
    for kind, model in MODELS.items():
        out = tmp_path_factory.mktemp(kind) / "run"
        task = dure.Task(model=model, loss=F.cross_entropy, train=items(kind))
        run = dure.train(task, dure.SingleWorker(2), stop=dure.Stop(steps=2), out=out)
        found[kind] = out, task, run.model.eval()
    return found


def agrees(runs: Runs, kind: str, file: Path, inputs: Any, **changes: Any) -> None:
    out, task, model = runs[kind]
    said = predict(out, str(file), dataclasses.replace(task, **changes)).outputs
    with torch.no_grad():
        assert torch.equal(said, model(inputs))


ONE = {"cat": COLUMNS["cat"][1:2], "num": NUMBERS[1:2]}
TWO = {"cat": COLUMNS["cat"][1:3], "num": NUMBERS[1:3]}


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_objects_of_json_are_rows_of_a_dict(kind: str, runs: Runs, tmp_path: Path) -> None:
    rows = [{"cat": place % 4, "num": NUMBERS[place].tolist()} for place in (1, 2)]
    (tmp_path / "one.json").write_text(json.dumps(rows[0]))
    (tmp_path / "two.json").write_text(json.dumps(rows))
    agrees(runs, kind, tmp_path / "one.json", ONE)
    agrees(runs, kind, tmp_path / "two.json", TWO)


@pytest.mark.parametrize("kind", ["columns", "rows"])
@pytest.mark.parametrize(
    ("names", "row"),
    [
        ("id,num.0,num.1,num.2,cat", "9,{0},{1},{2},{cat}"),
        ("num[0],num[1],num[2],cat", "{0},{1},{2},{cat}"),
        ("num,cat,more", '"[{0}, {1}, {2}]",{cat},x'),
    ],
)
def test_cells_of_a_table_are_known_by_the_names_of_columns(
    kind: str, names: str, row: str, runs: Runs, tmp_path: Path
) -> None:
    rows = [row.format(*NUMBERS[place].tolist(), cat=place % 4) for place in (1, 2)]
    (tmp_path / "rows.csv").write_text("\n".join([names, *rows]))
    agrees(runs, kind, tmp_path / "rows.csv", TWO)


def test_columns_of_many_rows_are_a_batch(runs: Runs, tmp_path: Path) -> None:
    save_file({name: column.clone() for name, column in TWO.items()}, tmp_path / "two.safetensors")
    agrees(runs, "columns", tmp_path / "two.safetensors", TWO)
    (tmp_path / "two.json").write_text(json.dumps({n: c.tolist() for n, c in TWO.items()}))
    agrees(runs, "columns", tmp_path / "two.json", TWO)


def test_lists_of_json_are_rows_of_a_tuple(runs: Runs, tmp_path: Path) -> None:
    rows = [[NUMBERS[place].tolist(), float(place)] for place in (1, 2)]
    (tmp_path / "one.json").write_text(json.dumps(rows[0]))
    (tmp_path / "two.json").write_text(json.dumps(rows))
    agrees(runs, "two", tmp_path / "one.json", (NUMBERS[1:2], torch.tensor([1.0])))
    agrees(runs, "two", tmp_path / "two.json", (NUMBERS[1:3], torch.tensor([1.0, 2.0])))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("texts.json", '["one", "and another"]'),
        ("texts.json", '[{"text": "one"}, {"text": "and another"}]'),
        ("texts.csv", "id,text\n1,one\n2,and another\n"),
    ],
)
def test_texts_go_through_the_collate_of_the_task(
    name: str, content: str, runs: Runs, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    inputs, _ = bytes_of_texts([("one", 0), ("and another", 0)])
    agrees(runs, "text", tmp_path / name, inputs)


def test_a_task_s_own_parse_makes_inputs_of_rows(runs: Runs, tmp_path: Path) -> None:
    def parse(row: Any) -> dict[str, Any]:
        return {"cat": "abcd".index(row["letter"]), "num": [float(row["size"])] * 3}

    (tmp_path / "rows.csv").write_text("letter,size\nb,0.5\nd,2\n")
    inputs = {
        "cat": torch.tensor([1, 3]),
        "num": torch.tensor([[0.5], [2.0]]).expand(2, 3),
    }
    agrees(runs, "columns", tmp_path / "rows.csv", inputs, parse=parse)
    (tmp_path / "row.json").write_text('{"letter": "b", "size": 0.5}')
    first = {name: column[:1] for name, column in inputs.items()}
    agrees(runs, "columns", tmp_path / "row.json", first, parse=parse)
    (tmp_path / "bad.csv").write_text("letter,size\nz,1\n")
    with pytest.raises(ValueError, match="parse failed on row 0"):
        agrees(runs, "columns", tmp_path / "bad.csv", inputs, parse=parse)


@pytest.mark.parametrize(
    ("kind", "name", "content", "said"),
    [
        ("columns", "a.json", '{"cat": 1}', "a.json: num is missing; the row has cat"),
        (
            "columns",
            "a.json",
            "[1, 2]",
            "not an object with the names of the task's inputs: cat, num",
        ),
        ("columns", "a.json", '{"cat": 0.5, "num": [1, 2, 3]}', "cat contains fractions"),
        ("columns", "a.json", '{"cat": 1, "num": [1, 2]}', r"num has the shape \(2,\)"),
        ("columns", "a.csv", "cat,num.0,num.2\n1,1,1\n", "num is missing"),
        ("columns", "a.csv", "cat,num\n1,x\n", "num is not an array of numbers"),
        ("rows", "a.json", '[{"cat": 1, "num": [1, 2, 3]}, {}]', "row 1 of .*: cat is missing"),
        ("two", "a.json", "[[1, 2, 3]]", "a row"),
        ("text", "a.json", "[1]", "is neither text nor"),
    ],
)
def test_a_row_that_is_not_like_the_examples_is_refused_by_name(
    kind: str, name: str, content: str, said: str, runs: Runs, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    out, task, _ = runs[kind]
    with pytest.raises(ValueError, match=said):
        predict(out, str(tmp_path / name), task)


def test_columns_of_a_table_are_put_in_the_order_of_the_task_s_features(tmp_path: Path) -> None:
    task = dure.Task(
        model=lambda: nn.Linear(3, 3),
        loss=F.cross_entropy,
        train=(NUMBERS, LABELS),
        features=["a", "b", "c"],
    )
    run = dure.train(task, dure.SingleWorker(2), stop=dure.Stop(steps=1), out=tmp_path / "run")
    (tmp_path / "rows.csv").write_text("c,id,a,b\n3,0,1,2\n")
    (tmp_path / "row.json").write_text('{"c": 3, "a": 1, "b": 2}')
    (tmp_path / "short.csv").write_text("c,a\n3,1\n")
    with torch.no_grad():
        expected = run.model.eval()(torch.tensor([[1.0, 2.0, 3.0]]))
    for name in ("rows.csv", "row.json"):
        said = predict(tmp_path / "run", str(tmp_path / name), task)
        assert torch.equal(said.outputs, expected)
    with pytest.raises(ValueError, match=r"short\.csv has no b: the task's features are a, b, c"):
        predict(tmp_path / "run", str(tmp_path / "short.csv"), task)
