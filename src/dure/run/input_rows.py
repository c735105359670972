"""Turn new rows into inputs of a task's model, for inputs of more than one tensor.

    Task(parse=...)       parse(row) turns a row into the inputs of an example
    a dataset's items     a row has the fields of an item except the target; rows are batched like
                          items, by the task's collate function
    dicts and tuples      a row has the names, or the positions, of the tensors of an example

A row is an object, a list, a text or a number of JSON, or a row of a table: its cells by the names
of its columns. A tensor of several numbers has a column for each number, `num.0`, `num.1`, or one
column with a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dure.data.datasets import DatasetExamples
from dure.data.examples import LABELS, Examples
from dure.data.streams import StreamExamples
from dure.errors import described

TEXT = "text"
"""Name of the column with a text, in a table of several columns."""

Fit = Callable[[Any], Any]
"""Function from a row to the inputs of an example. Raises ValueError for an unsuitable row."""


@dataclass(frozen=True)
class CellTable:
    """A table of cells. names: of its columns; None if the first line has no names."""

    names: Sequence[str] | None
    cells: Sequence[Sequence[str]]

    def rows(self) -> list[Any]:
        """Return each row, as a dict of its cells by column; a list if columns have no name."""
        if self.names is None:
            return [list(row) for row in self.cells]
        return [dict(zip(self.names, row, strict=True)) for row in self.cells]


class FileTensors(dict[str, Tensor]):
    """The tensors of a file by name."""


class InputRows(list[Any]):
    """A list of rows; a single row is in a list too."""


def parse_rows(parse: Callable[[Any], Any], content: Any) -> InputRows:
    """Return the result of `Task.parse` for each row."""
    if isinstance(content, FileTensors) and len(content) == 1:
        content = next(iter(content.values()))
    if isinstance(content, CellTable):
        rows = content.rows()
    else:
        rows = list(content) if isinstance(content, (list, numpy.ndarray, Tensor)) else [content]
    found = InputRows()
    for number, row in enumerate(rows):
        try:
            found.append(parse(row))
        # The user's own code, on a row of unknown content.
        except Exception as error:
            raise ValueError(f"parse failed on row {number}: {described(error)}") from error
    return found


def is_structured(examples: Examples, example: Any) -> bool:
    """Return whether rows are more than an array: structures, texts, or items to collate."""
    return not isinstance(example, Tensor) or _collates(examples)


def row_inputs(examples: Examples, example: Any, content: Any, source: str) -> Any:
    """Return the inputs of a batch of new rows.

    example: inputs of an example of the task. content: the rows as read. Raises ValueError for rows
    that differ from the example in structure.
    """
    if isinstance(examples, DatasetExamples) and not isinstance(examples, StreamExamples):
        item = examples.first_item()
        fit = _item_fit(item, examples.collate is not None)
        # The labels come from the first item of the task; the model must not get them.
        inputs = examples.inputs_of(_rows(content, fit, source))
        return _without_labels(inputs) if examples.keeps_labels else inputs
    if isinstance(example, Mapping) and isinstance(content, Mapping):
        columns = _columns(example, content)
        if columns is not None:
            return columns
    return _stacked(_rows(content, lambda row: _fitted(example, row, ""), source))


def cast(given: Tensor, like: Tensor, what: str) -> Tensor:
    """Return the numbers in the dtype of `like`. Raises ValueError if fractions would be lost."""
    if like.is_floating_point() or not given.is_floating_point():
        return given.to(like.dtype)
    whole = given.to(like.dtype)
    if not torch.equal(whole.to(given.dtype), given):
        raise ValueError(f"{what} contains fractions, but the task's inputs are integers")
    return whole


def _collates(examples: Examples) -> bool:
    return isinstance(examples, DatasetExamples) and examples.collate is not None


def _rows(content: Any, fit: Fit, source: str) -> list[Any]:
    """Return the converted rows of a file, or the converted single row."""
    if isinstance(content, CellTable):
        rows = content.rows()
    elif isinstance(content, InputRows) or (
        isinstance(content, list) and content and not _fits(content, fit)
    ):
        rows = content
    else:
        rows = [content]
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(fit(row))
        except ValueError as error:
            where = f"row {number} of {source}" if len(rows) > 1 else source
            raise ValueError(f"{where}: {error}") from error
    if not found:
        raise ValueError(f"{source} contains no rows")
    return found


def _fits(row: Any, fit: Fit) -> bool:
    try:
        fit(row)
    except ValueError:
        return False
    return True


def _stacked(rows: Sequence[Any]) -> Any:
    try:
        return tree_map(lambda *leaves: torch.stack([torch.as_tensor(x) for x in leaves]), *rows)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"these {len(rows)} rows cannot be combined into a batch: {error}"
        ) from error


def _without_labels(inputs: Any) -> Any:
    return {name: value for name, value in inputs.items() if name not in LABELS}


def _columns(example: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Return batched tensors from columns of lists; None if the content has no such columns."""
    found = {}
    for name, like in example.items():
        try:
            given = torch.as_tensor(content[name])
        except (KeyError, TypeError, ValueError, RuntimeError):
            return None
        if not isinstance(like, Tensor) or given.ndim != like.ndim + 1:
            return None
        if given.shape[1:] != like.shape:
            return None
        found[name] = cast(given, like, name)
    lengths = {len(column) for column in found.values()}
    return found if len(lengths) == 1 and lengths != {0} else None


# Items of a dataset


def _item_fit(item: Any, varies: bool) -> Fit:
    """Return a function from a row to an item.

    varies: whether lengths may differ, since items are collated.
    """
    if isinstance(item, Mapping):
        target = next((name for name in LABELS if name in item), None)
        inputs = {name: value for name, value in item.items() if name != target}

        def named(row: Any) -> Any:
            alone = len(inputs) == 1 and not isinstance(row, Mapping)
            made = _fitted(inputs, {next(iter(inputs)): row} if alone else row, "", varies)
            return {**item, **made}

        return named
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return lambda row: (_fitted(item[0], row, "", varies), item[1])
    # The task's collate function alone separates inputs and targets.
    return lambda row: _fitted(item, row, "", varies)


def _fitted(like: Any, row: Any, name: str, varies: bool = False) -> Any:
    """Return a value of a row in the form of an example's. name: of the value, for errors."""
    if isinstance(like, Mapping):
        return _object(like, row, name, varies)
    if isinstance(like, str):
        return _text(row, name)
    if isinstance(like, Tensor):
        return _tensor(like, row, name, varies)
    if isinstance(like, numpy.ndarray):
        return _tensor(torch.from_numpy(like), row, name, varies).numpy()
    if isinstance(like, (bool, int, float, numpy.number)):
        kind: Any = type(like)
        return kind(_tensor(torch.as_tensor(like), row, name, False).item())
    if isinstance(like, (tuple, list)):
        return _list(like, row, name, varies)
    raise ValueError(
        f"{_called(name)} is a {type(like).__name__} in the task's examples, which a row cannot "
        "contain: give Task(parse=...)"
    )


def _object(like: Mapping[str, Any], row: Any, name: str, varies: bool) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(
            f"{_called(name)} is not an object with the names of the task's inputs: "
            f"{', '.join(map(str, like))}"
        )
    made = {}
    for key, value in like.items():
        whole = f"{name}.{key}" if name else str(key)
        if key in row:
            made[key] = _fitted(value, row[key], whole, varies)
        else:
            made[key] = _fitted(value, _spread(row, whole), whole, varies)
    return made


def _spread(row: Mapping[str, Any], name: str) -> list[Any]:
    """Return the cells of columns such as num.0, num.1, or num[0], num[1].

    Raises ValueError if there are none.
    """
    number = re.compile(rf"{re.escape(name)}(?:\.|_|\[)(\d+)\]?")
    found = {int(match[1]): cell for key, cell in row.items() if (match := number.fullmatch(key))}
    if not found or sorted(found) != list(range(len(found))):
        raise ValueError(f"{name} is missing; the row has {', '.join(map(str, row)) or 'nothing'}")
    return [found[place] for place in range(len(found))]


def _text(row: Any, name: str) -> str:
    if isinstance(row, Mapping):
        cells = [row[TEXT]] if TEXT in row else list(row.values())
        row = cells[0] if len(cells) == 1 else None
    elif isinstance(row, list) and len(row) == 1:
        row = row[0]
    if not isinstance(row, str):
        raise ValueError(f"{_called(name)} is neither text nor a row with a column {TEXT}")
    return row


def _tensor(like: Tensor, row: Any, name: str, varies: bool) -> Tensor:
    if isinstance(row, Mapping):
        row = list(row.values())
    try:
        # Through numpy, because torch would read lists of JSON as float32 and lose digits.
        given = row if isinstance(row, Tensor) else torch.as_tensor(numpy.asarray(_number(row)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{_called(name)} is not an array of numbers: {error}") from error
    given = cast(given, like, _called(name))
    if given.shape == like.shape or (varies and given.ndim == like.ndim and given.numel()):
        return given
    if given.numel() == like.numel() and given.ndim <= 1:
        return given.reshape(like.shape)
    raise ValueError(
        f"{_called(name)} has the shape {tuple(given.shape)}, but in an example of the task it "
        f"has {tuple(like.shape)}"
    )


def _number(cell: Any) -> Any:
    """Return a cell of a table as a number or a list of numbers."""
    if isinstance(cell, str):
        return json.loads(cell)
    return [_number(one) for one in cell] if isinstance(cell, list) else cell


def _list(like: Sequence[Any], row: Any, name: str, varies: bool) -> Any:
    if isinstance(row, str):
        row = _number(row)
    if not isinstance(row, list):
        raise ValueError(f"{_called(name)} is not a list of {len(like)} values")
    # A list of numbers, such as token ids, varies in length with its text; a tuple does not.
    numbers = isinstance(like, list) and like and all(isinstance(x, (int, float)) for x in like)
    if numbers and (varies or len(row) == len(like)):
        return [_fitted(like[0], one, name, varies) for one in row]
    if len(row) != len(like):
        raise ValueError(
            f"{_called(name)} has {len(row)} values, but in an example it has {len(like)}"
        )
    made = [
        _fitted(value, one, f"{name}[{place}]", varies)
        for place, (value, one) in enumerate(zip(like, row, strict=True))
    ]
    return made if isinstance(like, list) else tuple(made)


def _called(name: str) -> str:
    return name or "a row"
