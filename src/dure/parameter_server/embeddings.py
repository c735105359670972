"""Tables of a model: its sparse embeddings, of which a worker has only the rows of its batch.

The rows of a part are determined before the pull, by a forward pass without gradients in which
every table returns zeros and records its ids. The pass ends as soon as every table has been read,
so mostly before any computation. In the training pass:

    ids -> their positions among the pulled rows -> the embedding's own forward, on those

so the gradient has these rows. Other ids raise an error: if ids depend on the weights of a table,
no rows can be pulled in time.

Outside of the embedding's forward a table's weight is NaN, without memory: any other reader, such
as an output layer that shares the weight without naming it, computes NaN in place of a wrong
number.

The row of `padding_idx` never changes, so it is neither pulled nor pushed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dure.contracts.task import Task
from dure.machine.devices import device_of, is_cpu
from dure.parameter_server.first_rows import first_rows, key_of
from dure.parameter_server.keys import KeyRange
from dure.parameter_server.tables import (
    EmbeddingTable,
    RowRule,
    SparseRows,
    TableRows,
    distinct,
    rule_of,
)
from dure.tensors.buffers import load_weights
from dure.tensors.flat import trainable_parameters

FIRST_STATE = {"initial_accumulator_value"}
"""Settings that torch's optimizers use for their first state alone."""

Embedding: TypeAlias = nn.Embedding | nn.EmbeddingBag


def embeddings_of(model: nn.Module) -> dict[str, Embedding]:
    """Return the trained sparse embeddings, each once, by the name of their weight."""
    return {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.sparse
        and module.weight.requires_grad
    }


def dense_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters that are not tables, each once, in the model's order."""
    tables = {id(module.weight) for module in embeddings_of(model).values()}
    return [parameter for parameter in trainable_parameters(model) if id(parameter) not in tables]


def check_no_tables(model: nn.Module) -> None:
    """Check that a model has no sparse embeddings; raises ValueError if it has."""
    name = next(iter(embeddings_of(model)), None)
    if name is not None:
        raise ValueError(
            f"{name} is a sparse embedding, which this system does not support: use sparse=False, "
            "or ParameterServer"
        )


def check_tables_on(model: nn.Module, device: str | None) -> None:
    """Check that workers on a device need no rows of tables; raises ValueError if they do."""
    name = next(iter(embeddings_of(model)), None)
    if name is not None and device is not None and not is_cpu(device_of(device)):
        raise ValueError(
            f"{name} is a sparse embedding, whose rows workers read in the CPU's memory, so they "
            f"cannot be computed on {device}: use sparse=False, or the device cpu"
        )


def check_tables(task: Task, model: nn.Module) -> None:
    """Check that servers can store the rows of the sparse embeddings; raises ValueError if not."""
    rules_of(task, model)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, module in embeddings_of(model).items():
        also = [other for other in names.get(id(module.weight), ()) if other != name]
        reason = _refusal(module, also)
        if reason is not None:
            raise ValueError(f"{name} {reason}: leave that out, or use sparse=False")


def _refusal(module: Embedding, also: Sequence[str]) -> str | None:
    """Return the reason that an embedding cannot be a table; None if it can."""
    for field in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, field):
            return f"has {field}={getattr(module, field)}, which a table cannot have"
    if also:
        return f"is also {also[0]}, so more than the rows of a batch are read"
    own = type(module).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward)
    if not own or "forward" in vars(module):
        return f"belongs to a {type(module).__name__} with its own forward"
    if module._forward_hooks or module._forward_pre_hooks:
        return "belongs to an embedding with hooks, which would receive other ids"
    if "weight" not in module._parameters:
        return "is computed from other parameters"
    if module.weight.device.type not in ("cpu", "meta"):
        return f"is on {module.weight.device}, and servers hold rows in the CPU's memory"
    if module.weight.is_complex():
        return "is complex"
    return None


def rules_of(task: Task, model: nn.Module) -> list[RowRule]:
    """Return the update rule of each table, by the task's optimizer.

    Raises ValueError as `rule_of`.
    """
    found = embeddings_of(model)
    if not found:
        return []
    optimizer = task.optimizer(model.parameters())
    groups = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    rules = []
    for name, module in found.items():
        if id(module.weight) not in groups:
            raise ValueError(
                f"the optimizer does not have {name}: freeze it, or pass it to the optimizer"
            )
        # As in torch, the first state depends on the optimizer's defaults, not on the group.
        settings = dict(groups[id(module.weight)])
        for setting in FIRST_STATE & optimizer.defaults.keys():
            settings[setting] = optimizer.defaults[setting]
        rules.append(rule_of(type(optimizer), settings, name))
    return rules


def tables_of(task: Task, model: nn.Module, seed: int) -> list[EmbeddingTable]:
    """Return the tables of a model.

    Unchanged rows are those of the embedding. An embedding without memory (device="meta") may be
    larger than any memory; its unchanged rows are `first_rows`, with zeros for padding.
    """
    rules = rules_of(task, model)
    tables = []
    for number, (name, module) in enumerate(embeddings_of(model).items()):
        weight = module.weight.detach()
        rows, dim = weight.shape
        first = partial(_rows_of, weight)
        if weight.is_meta:
            key = key_of(seed, number)
            first = partial(_made_rows, key, dim, weight.dtype, module.padding_idx)
        tables.append(EmbeddingTable(name, rows, dim, weight.dtype, rules[number], first))
    return tables


def _rows_of(weight: Tensor, rows: Tensor) -> Tensor:
    return weight.index_select(0, rows)


def _made_rows(key: int, dim: int, dtype: torch.dtype, padding: int | None, rows: Tensor) -> Tensor:
    made = torch.from_numpy(first_rows(key, rows.numpy(), dim)).to(dtype)
    if padding is not None:
        made[rows == padding] = 0
    return made


class Tables:
    """Tables of a worker's model; the constructor replaces the embeddings' weights.

    Args:
        model: the worker's model.
        tables: tables of the model, from `tables_of`.
        shards: ranges of rows, by shard; `vector` is the number of the table.
    """

    def __init__(
        self, model: nn.Module, tables: Sequence[EmbeddingTable], shards: Sequence[KeyRange]
    ) -> None:
        self.tables = tables
        self.shards = shards
        self._readers = [
            _Reader(table, module)
            for table, module in zip(tables, embeddings_of(model).values(), strict=True)
        ]
        self._alone = False
        """Whether a forward pass is known to read every table exactly once."""

    def __len__(self) -> int:
        return len(self.tables)

    # Which rows

    @torch.no_grad()
    def asked(self, forward: Callable[[], Any]) -> list[Tensor]:
        """Return the rows that a forward pass reads, by table, ascending without duplicates."""
        for reader in self._readers:
            reader.watch(self._look)
        try:
            forward()
        except _EnoughError:
            pass
        else:
            self._alone = all(len(reader.seen) == 1 for reader in self._readers)
        finally:
            found = [reader.rows_seen() for reader in self._readers]
            for reader in self._readers:
                reader.leave()
        return found

    def _look(self) -> None:
        """End a forward pass that will read no further rows."""
        if self._alone and all(reader.seen for reader in self._readers):
            raise _EnoughError

    def by_shard(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Divide ascending rows of each table by shard."""
        return [rows[keys.vector][slice(*_ends(rows[keys.vector], keys))] for keys in self.shards]

    # Training pass

    @contextmanager
    def holding(
        self, values: Sequence[SparseRows]
    ) -> Iterator[Callable[[], list[SparseRows | None]]]:
        """Context manager: the model computes with these rows, given by shard.

        Yields a function that returns the gradients by shard, with None for a table without a
        gradient.
        """
        for number, reader in enumerate(self._readers):
            own = [
                one for keys, one in zip(self.shards, values, strict=True) if keys.vector == number
            ]
            reader.hold(
                SparseRows(
                    torch.cat([one.rows for one in own]), torch.cat([one.values for one in own])
                )
            )
        try:
            yield self._gradients
        finally:
            for reader in self._readers:
                reader.leave()

    def leaves(self) -> list[Tensor]:
        """Return the tensors in `holding` whose gradients are those of the rows."""
        return [reader.leaf for reader in self._readers if reader.leaf is not None]

    def _gradients(self) -> list[SparseRows | None]:
        by_table = [reader.gradient() for reader in self._readers]
        found: list[SparseRows | None] = []
        for keys in self.shards:
            whole = by_table[keys.vector]
            if whole is None:
                found.append(None)
                continue
            part = slice(*_ends(whole.rows, keys))
            found.append(SparseRows(whole.rows[part], whole.values[part]))
        return found

    def empty(self) -> list[SparseRows]:
        """Return gradients without rows, by shard."""
        tables = [self.tables[keys.vector] for keys in self.shards]
        rows = torch.empty(0, dtype=torch.int64)
        return [SparseRows(rows, torch.empty(0, table.dim, dtype=table.dtype)) for table in tables]

    # Evaluation

    @contextmanager
    def reading(self, pulls: Sequence[Callable[[Tensor], Tensor]]) -> Iterator[None]:
        """Context manager: the model reads any rows.

        `pulls` are functions from rows to values, by shard.
        """
        for number, reader in enumerate(self._readers):
            own = [
                (keys, pull)
                for keys, pull in zip(self.shards, pulls, strict=True)
                if keys.vector == number
            ]
            reader.pull_from(own)
        try:
            yield
        finally:
            for reader in self._readers:
                reader.leave()

    # Weights as a whole

    def whole(self, changed: Sequence[SparseRows]) -> dict[str, Tensor]:
        """Return the weights of the tables, by name. `changed` are the changed rows, by shard."""
        found = {}
        for table in self.tables:
            found[table.name] = table.first(torch.arange(table.rows))
        for keys, (rows, values) in zip(self.shards, changed, strict=True):
            found[self.tables[keys.vector].name][rows] = values
        return found

    @contextmanager
    def given(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Context manager: the tables use the memory of these weights, for loading a state."""
        for table, reader in zip(self.tables, self._readers, strict=True):
            reader.weight.data = weights[table.name]
        try:
            yield
        finally:
            for reader in self._readers:
                reader.release()


@contextmanager
def reading(tables: Tables | None, rows: Sequence[TableRows]) -> Iterator[None]:
    """Context manager: a model with these tables can be evaluated. `rows` are by shard."""
    if tables is None:
        yield
        return
    with tables.reading([one.pull for one in rows]):
        yield


def weights_of(
    model: nn.Module, tables: Tables | None, changed: Sequence[SparseRows]
) -> dict[str, Tensor]:
    """Return the state of a model with complete tables.

    `changed` are the changed rows, by shard.
    """
    weights = dict(model.state_dict())
    return weights if tables is None else {**weights, **tables.whole(changed)}


def load_with_tables(
    model: nn.Module, tables: Tables | None, weights: Mapping[str, Tensor]
) -> None:
    """Load weights into a model, the inverse of `weights_of`; servers load the rows themselves."""
    if tables is None:
        load_weights(model, weights)
        return
    with tables.given(weights):
        load_weights(model, weights)


class _EnoughError(BaseException):
    """End of a forward pass; a BaseException, which a model's `except Exception` does not catch."""


class _Reader:
    """Embedding whose weight consists of a few rows while it computes."""

    def __init__(self, table: EmbeddingTable, module: Embedding) -> None:
        self.table = table
        self.module = module
        self.weight = module.weight
        self.padding = module.padding_idx
        self.seen: list[Tensor] = []
        """Ids of each call."""
        self._look: Callable[[], None] | None = None
        self._held: SparseRows | None = None
        self.leaf: nn.Parameter | None = None
        """Rows of `hold`, as the tensor that gets their gradient."""
        self._pulls: Sequence[tuple[KeyRange, Callable[[Tensor], Tensor]]] = ()
        self.release()
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)

    def release(self) -> None:
        """Free the memory of the weight; its elements become NaN."""
        nothing = torch.full((), math.nan, dtype=self.table.dtype)
        nothing = nothing.expand(self.table.rows, self.table.dim)
        if self.weight.is_meta:  # which cannot be given memory
            self.weight = nn.Parameter(nothing)
            self._put(self.weight, self.padding)
        self.weight.data = nothing

    # Modes of a call

    def watch(self, look: Callable[[], None]) -> None:
        """Return zeros and record the ids of each call, from now on."""
        self.seen = []
        self._look = look

    def hold(self, rows: SparseRows) -> None:
        """Compute with these ascending rows, from now on."""
        self._held = rows
        self.leaf = self._with_padding(rows.values)

    def pull_from(self, pulls: Sequence[tuple[KeyRange, Callable[[Tensor], Tensor]]]) -> None:
        """Pull the rows of each call, from now on."""
        self._pulls = pulls

    def leave(self) -> None:
        """Leave the current mode."""
        self._look = self._held = self.leaf = None
        self._pulls = ()
        self._put(self.weight, self.padding)

    def rows_seen(self) -> Tensor:
        """Return the recorded ids, ascending, without duplicates and padding."""
        if not self.seen:
            return torch.empty(0, dtype=torch.int64)
        return self._distinct(torch.cat(self.seen))

    def gradient(self) -> SparseRows | None:
        """Return the gradient of the rows of `hold`; None without a gradient."""
        assert self._held is not None
        assert self.leaf is not None
        if self.leaf.grad is None:
            return None
        sparse = self.leaf.grad.coalesce()
        return SparseRows(self._held.rows[sparse.indices()[0]], sparse.values())

    # A call

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = args[0] if args else kwargs["input"]
        if self._look is not None:
            self._check(ids)
            self.seen.append(ids.reshape(-1).long())
            self._look()
            return self._all_alike(0.0, ids, args, kwargs)
        if self._held is not None:
            assert self.leaf is not None
            rows = self._held.rows
            leaf = self.leaf
        elif self._pulls:
            self._check(ids)
            rows = self._distinct(ids.reshape(-1).long())
            leaf = self._with_padding(self._pull(rows))
        else:
            # A call outside of all modes, such as for counting operations.
            return self._all_alike(math.nan, ids, args, kwargs)
        padding = None if self.padding is None else len(rows)
        return self._instead(leaf, padding, self._places(ids, rows), args, kwargs)

    def _all_alike(
        self, value: float, ids: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let the embedding compute with a single row in place of all rows."""
        row = torch.full((1, self.table.dim), value, dtype=self.table.dtype)
        return self._instead(row, None, torch.zeros_like(ids), args, kwargs)

    def _instead(
        self,
        weight: Tensor,
        padding: int | None,
        places: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let the embedding compute with this weight and these positions."""
        self._put(weight, padding)
        if args:
            return (places, *args[1:]), kwargs
        return args, {**kwargs, "input": places}

    def _after(self, module: nn.Module, given: Any, returned: Any) -> None:
        self._put(self.weight, self.padding)

    def _put(self, weight: Tensor, padding: int | None) -> None:
        kept: Any = self.module._parameters
        kept["weight"] = weight
        self.module.padding_idx = padding

    def _check(self, ids: Tensor) -> None:
        """Check that the table has these ids; raises IndexError as torch does."""
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.table.rows):
            raise IndexError(
                f"{self.table.name} has {self.table.rows} rows, but was asked for those from "
                f"{int(ids.min())} to {int(ids.max())}"
            )

    def _distinct(self, ids: Tensor) -> Tensor:
        rows = distinct(ids)
        return rows if self.padding is None else rows[rows != self.padding]

    def _with_padding(self, values: Tensor) -> nn.Parameter:
        """Return the values of rows, followed by the padding row if there is padding."""
        if self.padding is not None:
            values = torch.cat([values, self.table.first(torch.tensor([self.padding]))])
        return nn.Parameter(values)

    def _places(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return positions of ids among ascending rows. Raises ValueError for a missing id."""
        wanted = ids.long()
        places = torch.searchsorted(rows, wanted)
        there = places < len(rows)
        if len(rows):
            there &= rows[places.clamp(max=len(rows) - 1)] == wanted
        if self.padding is not None:
            is_padding = wanted == self.padding
            places = torch.where(is_padding, len(rows), places)
            there |= is_padding
        if not bool(there.all()):
            raise ValueError(
                f"{self.table.name} was asked for row {int(wanted[~there][0])}, which was not "
                "known from the batch: the ids of a sparse embedding must depend on the batch "
                "alone (use sparse=False if they depend on weights)"
            )
        return places.to(ids.dtype)

    def _pull(self, rows: Tensor) -> Tensor:
        parts = [pull(rows[slice(*_ends(rows, keys))]) for keys, pull in self._pulls]
        return torch.cat(parts)


def _ends(rows: Tensor, keys: KeyRange) -> tuple[int, int]:
    """Return the first and the last + 1 position of a range among ascending rows."""
    first, stop = torch.searchsorted(rows, torch.tensor([keys.start, keys.stop])).tolist()
    return first, stop
