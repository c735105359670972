"""Calls in the forms of torch.distributed: a long form and a short form, with profiler events.

A method of ProcessGroup takes lists of tensors and options. Some take a single tensor as well, with
the root, the operation and the timeout as separate arguments. While torch's profiler runs, a call
is two events, like gloo's calls: `c10d::allreduce_` is the call itself, `dure:all_reduce` lasts
until its work is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from dure.collectives.shared_memory.work import CallHandle

_record = torch._C._profiler._RecordFunctionFast
profiler_enabled = torch._C._autograd._profiler_enabled
"""Whether a profiler of torch runs on this thread."""

Short = Callable[..., tuple[Any, ...]]
"""Converter from the arguments of the short form to the arguments of the long form."""


def torch_call(
    operation: str, event: str, names: str, short: Short | None = None, tensor_at: int | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Turn a method that takes the long form into a call for torch.

    Args:
        operation: torch's name of it.
        event: name of the operation for the profiler.
        names: torch's names of the arguments of the long form.
        short: converter of the short form, if there is a short form.
        tensor_at: position of an argument that is a list in the long form and a tensor in the short
            form.
    """
    long = names.split()
    all_of_them = len(long)

    def is_short(given: Sequence[Any], named: Mapping[str, Any]) -> bool:
        if named and not named.keys() <= set(long):
            return True
        if (
            tensor_at is not None
            and len(given) > tensor_at
            and isinstance(given[tensor_at], Tensor)
        ):
            return True
        return len(given) >= all_of_them and type(given[all_of_them - 1]) not in _OPTIONS

    def decorate(method: Callable[..., Any]) -> Any:
        @functools.wraps(method)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            if short is not None and is_short(given, named):
                given, named = short(*given, **named), {}
            if named:
                given = (*given, *_taken(named, long[len(given) :], method.__name__))
            if not profiler_enabled():
                return method(self, *given)
            return _profiled(operation, event, lambda: method(self, *given), given)

        return call

    return decorate


def _taken(named: dict[str, Any], names: Sequence[str], function: str) -> list[Any]:
    """Return arguments given by name, in their order."""
    taken = [named.pop(name) for name in names if name in named]
    if named:
        raise TypeError(f"{function} takes no argument {next(iter(named))!r}")
    return taken


# The profiler.


def _profiled(operation: str, event: str, call: Callable[[], Any], arguments: Sequence[Any]) -> Any:
    """Make a call and record its events for the profiler."""
    record = _record(f"dure:{event}", _tensors_of(arguments))
    with _record(f"c10d::{operation}"):
        record.__enter__()
        try:
            work = call()
        except BaseException:
            _end(record)
            raise
        if isinstance(work, CallHandle):
            work.before_the_end(lambda: _end(record))
        else:
            _end(record)
        return work


def _end(record: Any) -> None:
    """End an event, on any thread."""
    record.__exit__(None, None, None)


def _tensors_of(arguments: Sequence[Any]) -> list[Tensor]:
    """Return the inputs of a call, or its outputs without inputs: its last tensors."""
    for argument in reversed(arguments):
        while isinstance(argument, (list, tuple)) and argument and not _of_tensors(argument):
            argument = argument[0]
        if isinstance(argument, Tensor):
            return [argument]
        if isinstance(argument, (list, tuple)) and argument and _of_tensors(argument):
            return list(argument)
    return []


def _of_tensors(values: Sequence[Any]) -> bool:
    return isinstance(values[0], Tensor)


# Options, and short forms with the names that torch gives to their arguments.


_OPTIONS = {
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    type(None),
}
_NOT_SAID = AllreduceOptions().timeout


def limit_of(opts: Any) -> float | None:
    """Return the timeout in the options of a call in seconds, or None."""
    limit = _NOT_SAID if opts is None else opts.timeout
    return None if limit == _NOT_SAID else float(limit.total_seconds())


def _options(kind: Callable[[], Any], timeout: timedelta | None, **values: Any) -> Any:
    opts = kind()
    if timeout is not None:
        opts.timeout = timeout
    for name, value in values.items():
        setattr(opts, name, value)
    return opts


def short_all_reduce(
    tensors: Any = (),
    op: Any = ReduceOp.SUM,
    timeout: timedelta | None = None,
    tensor: Tensor | None = None,
) -> tuple[Any, ...]:
    """Return the long form's arguments for a tensor, or a list of tensors."""
    given = tensors if tensor is None else tensor
    listed = [given] if isinstance(given, Tensor) else list(given)
    return listed, _options(AllreduceOptions, timeout, reduceOp=op)


def short_broadcast(tensor: Tensor, root: int, timeout: timedelta | None = None) -> tuple[Any, ...]:
    return [tensor], _options(BroadcastOptions, timeout, rootRank=root)


def short_reduce(
    tensor: Tensor, root: int, op: Any = ReduceOp.SUM, timeout: timedelta | None = None
) -> tuple[Any, ...]:
    return [tensor], _options(ReduceOptions, timeout, rootRank=root, reduceOp=op)


def short_all_gather(
    output_tensors: list[Tensor], input_tensor: Tensor, timeout: timedelta | None = None
) -> tuple[Any, ...]:
    return [output_tensors], [input_tensor], _options(AllgatherOptions, timeout)


def short_gather(
    output_tensors: list[Tensor], input_tensor: Tensor, root: int, timeout: timedelta | None = None
) -> tuple[Any, ...]:
    outputs = [output_tensors] if output_tensors else []
    return outputs, [input_tensor], _options(GatherOptions, timeout, rootRank=root)


def short_scatter(
    output_tensor: Tensor, input_tensors: list[Tensor], root: int, timeout: timedelta | None = None
) -> tuple[Any, ...]:
    inputs = [input_tensors] if input_tensors else []
    return [output_tensor], inputs, _options(ScatterOptions, timeout, rootRank=root)


def short_reduce_scatter(
    output: Tensor,
    input: list[Tensor],
    op: Any = ReduceOp.SUM,
    timeout: timedelta | None = None,
) -> tuple[Any, ...]:
    return [output], [input], _options(ReduceScatterOptions, timeout, reduceOp=op)


def short_all_to_all(*tensors_and_splits: Any, timeout: timedelta | None = None) -> tuple[Any, ...]:
    *rest, last = tensors_and_splits
    if timeout is None and isinstance(last, timedelta):
        return (*rest, _options(AllToAllOptions, last))
    return (*tensors_and_splits, _options(AllToAllOptions, timeout))


def short_barrier(timeout: timedelta | None = None) -> tuple[Any, ...]:
    return (_options(BarrierOptions, timeout),)
