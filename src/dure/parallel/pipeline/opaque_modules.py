"""Modules that are a single, opaque operation of a trace.

Some modules cannot be traced: a mixture of experts whose router decides which rows each expert
gets, or a module with a custom gradient. The model around them can. During tracing, each such
module is recorded as a single operation on its input tensors, parameters and buffers; when a stage
computes, the operation calls the module itself. So a model can be cut before and after such a
module, but not inside it.

    dure::untraced(given, weights, written, changed, shared, decisions, draws, number) -> tensors

    given      the input tensors
    weights    its parameters and buffers, except those that it changes, which are `written`
    changed    indices of the input tensors that it writes into
    shared     indices of the input tensors that share memory with its outputs
    decisions  whether it is called at all (`dure.parallel.pipeline.layer_drop`); mostly empty
    draws      whether it draws random numbers
    number     of the call in the trace

The outputs have the shapes that they had when the model ran (`dure.parallel.pipeline.observation`).
If a later call returns other shapes, the run ends with an error that names the module.

Arguments that are not tensors have the values of the trace: numbers, flags, None. An object, such
as a cache that is still empty, is copied for each call. An object that holds tensors is rejected,
because a trace would keep the tensors of the first pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from dure.parallel.pipeline.patching import patched_modules

_ATOMS = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)

Skip = Literal["given", "zeros"]
"""Replacement of a skipped module's result: its first input of fitting shape, or zeros."""


@dataclass(frozen=True)
class OpaqueTensorSpec:
    """Shape, strides, dtype and device of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> OpaqueTensorSpec:
        """Return the description of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """Return an uninitialised tensor with this description."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor has this shape and dtype."""
        return tuple(self.shape) == tuple(tensor.shape) and self.dtype == tensor.dtype


@dataclass
class ObservedCall:
    """Call of a module, as observed in a run of the model.

    Args:
        name: name of the module.
        leaves: leaves of its outputs, with `OpaqueTensorSpec` for tensors.
        structure: structure of its outputs.
        left: tensors that the call left in attributes (`left_in`).
        uses: names of the parameters and buffers that it uses.
        written: names of the parameters and buffers that it changes.
        changed: paths of the argument tensors that it changes.
        shared: paths of the argument tensors that share memory with its outputs.
        draws: whether it draws random numbers.
        flops: floating-point operations of its forward pass.
    """

    name: str
    leaves: tuple[Any, ...]
    structure: TreeSpec
    left: Mapping[tuple[str, str], OpaqueTensorSpec]
    uses: tuple[str, ...]
    written: tuple[str, ...]
    changed: tuple[str, ...]
    shared: tuple[str, ...]
    draws: bool
    flops: float

    @property
    def tensors(self) -> list[OpaqueTensorSpec]:
        """Descriptions of the tensors that the call returned and left in attributes."""
        return [
            *(leaf for leaf in self.leaves if isinstance(leaf, OpaqueTensorSpec)),
            *self.left.values(),
        ]

    @property
    def form(self) -> tuple[Any, ...]:
        """Parts of the result that must be equal in all calls."""
        leaves = [
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, OpaqueTensorSpec) else leaf
            for leaf in self.leaves
            if isinstance(leaf, (OpaqueTensorSpec, *_ATOMS))
        ]
        return self.name, self.structure, leaves


class Decision(NamedTuple):
    """Decision whether to call a module: if `value` is `called_if`; otherwise `skip` it."""

    value: Tensor
    skip: Skip
    called_if: bool


Decided = Callable[[ObservedCall], Decision | None]


@dataclass
class OpaqueBlock:
    """Module behind an operation of a trace, and the form of its call.

    Args:
        call: the observed call.
        module: the module.
        function: the function that calls the module.
        leaves: leaves of its arguments, with `OpaqueTensorSpec` for tensors.
        structure: structure of its arguments.
        decision: the decision on which the call depends; None if it is always called.
    """

    call: ObservedCall
    module: nn.Module
    function: Callable[..., Any]
    leaves: list[Any]
    structure: TreeSpec
    decision: Decision | None

    def __post_init__(self) -> None:
        # A trace is valid for the mode in which it was made, and so are its blocks.
        self._modes = [(module, module.training) for module in self.module.modules()]

    def run(
        self,
        given: Sequence[Tensor],
        weights: Sequence[Tensor],
        written: Sequence[Tensor],
        changed: Sequence[int],
        shared: Sequence[int],
        decisions: Sequence[Tensor],
        draws: bool,
        number: int,
    ) -> list[Tensor]:
        """Call the module itself, which uses its own parameters; return its output tensors.

        The arguments are those of `dure::untraced`. Raises ValueError if the form of the result
        changed.
        """
        if self.decision is not None and bool(decisions[0]) != self.decision.called_if:
            return skipped(self.call, self.decision.skip, given)
        tensors = iter(given)
        leaves = [
            next(tensors) if isinstance(leaf, OpaqueTensorSpec) else _own(leaf)
            for leaf in self.leaves
        ]
        args, kwargs = tree_unflatten(leaves, self.structure)
        with self._in_its_mode():
            return self._checked(self.function(*args, **kwargs))

    @contextmanager
    def _in_its_mode(self) -> Iterator[None]:
        others = [(module, mode) for module, mode in self._modes if module.training is not mode]
        for module, mode in others:
            module.training = mode
        try:
            yield
        finally:
            for module, mode in others:
                module.training = not mode

    def _checked(self, outputs: Any) -> list[Tensor]:
        """Return the output tensors after a check of the result's form."""
        leaves, structure = tree_flatten(outputs)
        call = self.call
        if structure != call.structure:
            raise ValueError(f"module {call.name} returns a result of another form than at first")
        for leaf, known in zip(leaves, call.leaves, strict=True):
            if isinstance(known, OpaqueTensorSpec):
                if not isinstance(leaf, Tensor) or not known.fits(leaf):
                    what = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                    raise ValueError(
                        f"module {call.name} returns {what}, but returned {list(known.shape)} at "
                        "first: tensors between stages need shapes that do not depend on the data"
                    )
            elif isinstance(known, _ATOMS) and leaf != known:
                raise ValueError(
                    f"module {call.name} returns {leaf!r}, but returned {known!r} at first"
                )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return [*tensors, *self._left()] if call.left else tensors

    def _left(self) -> Iterator[Tensor]:
        """Return the tensors that the call left in attributes."""
        left = left_in(self.module)
        for place, like in self.call.left.items():
            if place not in left or not like.fits(left[place]):
                raise ValueError(
                    f"module {self.call.name} leaves no tensor of shape {list(like.shape)} in "
                    f"{place[1]}, as it did at first"
                )
            yield left[place]


def skipped(call: ObservedCall, skip: Skip, given: Sequence[Tensor]) -> list[Tensor]:
    """Return the replacement of the result of a module that is not called."""
    first, *others = call.tensors
    like = next((tensor for tensor in given if first.fits(tensor)), None)
    if skip == "given" and like is not None:
        return [like, *(torch.zeros_like(other.empty()) for other in others)]
    return [torch.zeros_like(each.empty()) for each in call.tensors]


def _own(leaf: Any) -> Any:
    """Return a non-tensor argument for a single call: a copy, unless immutable or callable."""
    return leaf if isinstance(leaf, _ATOMS) or callable(leaf) else copy.deepcopy(leaf)


_under_way: list[list[OpaqueBlock]] = []
"""Blocks of the traces in progress, the innermost trace last."""


@torch.library.custom_op("dure::untraced", mutates_args=())
def _untraced(
    given: list[Tensor],
    weights: list[Tensor],
    written: list[Tensor],
    changed: list[int],
    shared: list[int],
    decisions: list[Tensor],
    draws: bool,
    number: int,
) -> list[Tensor]:
    raise RuntimeError("an untraced operation stands for a module, which is called in its place")


@_untraced.register_fake
def _(
    given: list[Tensor],
    weights: list[Tensor],
    written: list[Tensor],
    changed: list[int],
    shared: list[int],
    decisions: list[Tensor],
    draws: bool,
    number: int,
) -> list[Tensor]:
    return [like.empty() for like in _under_way[-1][number].call.tensors]


def is_untraced(node: fx.Node) -> bool:
    """Return whether a node stands for an opaque module."""
    return node.target is torch.ops.dure.untraced.default


def block_of(node: fx.Node, blocks: Sequence[OpaqueBlock]) -> OpaqueBlock:
    """Return the block of such a node. blocks: the blocks of its trace."""
    return blocks[int(str(node.args[7]))]


def block_function(node: fx.Node, blocks: Sequence[OpaqueBlock]) -> Callable[..., list[Tensor]]:
    """Return a function with the arguments of `dure::untraced` that calls the module itself."""
    block = block_of(node, blocks)

    def untraced(*arguments: Any) -> list[Tensor]:
        return block.run(*arguments)

    return untraced


def changed_of(node: fx.Node) -> list[fx.Node]:
    """Return the values that the operation changes: buffers, and inputs."""
    given: Any = node.args[0]
    written: Any = node.args[2]
    places: Any = node.args[3]
    return [*written, *(given[place] for place in places)]


def shared_of(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that share memory with the operation's result."""
    given: Any = node.args[0]
    places: Any = node.args[4]
    return [given[place] for place in places]


def draws_of(node: fx.Node) -> bool:
    """Return whether the operation draws random numbers."""
    return bool(node.args[6])


def tensors_by_place(args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Return the tensors among a module's arguments, by their path in the arguments."""
    leaves, _ = tree_flatten_with_path((args, kwargs))
    return {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


class UntraceableError(ValueError):
    """Error: a model cannot be traced. said: the reason, as the end of a sentence.

    modules: the modules whose code is the reason, the innermost last. of_data: whether control flow
    on numbers in tensors is the reason.
    """

    def __init__(self, kind: str, said: str, modules: list[str], of_data: bool) -> None:
        super().__init__(f"a {kind} cannot be cut, because {said}")
        self.said = said
        self.modules = modules
        self.of_data = of_data


class CallMismatchError(ValueError):
    """Error: a trace calls a module differently from the observed run."""


@contextmanager
def as_single_operations(
    model: nn.Module, calls: Sequence[ObservedCall], decided: Decided, entirely: Collection[str]
) -> Iterator[list[OpaqueBlock]]:
    """Context manager: the modules of these calls are single operations; yields their blocks.

    calls: in order. decided: returns the decision on which a call depends. entirely: the modules
    whose whole call is the operation, not forward alone.
    """
    blocks: list[OpaqueBlock] = []
    names = list(dict.fromkeys(call.name for call in calls))
    # Tensors that a module stores during tracing have no data, so restore the earlier tensors.
    before = {name: left_in(model.get_submodule(name)) for name in names}
    _under_way.append(blocks)
    stub = partial(_stub, model, blocks, calls, decided)
    try:
        with patched_modules(model, names, stub, entirely):
            yield blocks
    finally:
        _under_way.pop()
        for name in names:
            put_back(model.get_submodule(name), before[name])


def _stub(
    model: nn.Module,
    blocks: list[OpaqueBlock],
    calls: Sequence[ObservedCall],
    decided: Decided,
    name: str,
    function: Callable[..., Any],
) -> Callable[..., Any]:
    module = model.get_submodule(name)

    def stub(*args: Any, **kwargs: Any) -> Any:
        number = len(blocks)
        leaves, structure = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = list(tensors_by_place(args, kwargs))
        if number >= len(calls) or calls[number].name != name:
            raise CallMismatchError(
                f"module {name} is called in a trace, but not where the trace runs"
            )
        call = calls[number]
        if not all(type(length) is int for tensor in given for length in tensor.shape):
            raise CallMismatchError(f"module {name} is given shapes that depend on the data")
        decision = decided(call)
        kept = [_kept(name, leaf) for leaf in leaves]
        blocks.append(OpaqueBlock(call, module, function, kept, structure, decision))
        tensors = iter(
            torch.ops.dure.untraced(
                given,
                _tensors(model, call.uses, without=call.written),
                _tensors(model, call.written),
                [places.index(place) for place in call.changed],
                [places.index(place) for place in call.shared],
                [] if decision is None else [decision.value],
                call.draws,
                number,
            )
        )
        outputs = [
            next(tensors) if isinstance(leaf, OpaqueTensorSpec) else leaf for leaf in call.leaves
        ]
        leave_in(module, {place: next(tensors) for place in call.left})
        return tree_unflatten(outputs, call.structure)

    return stub


def left_in(module: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return the tensors in attributes of a module tree, except parameters and buffers.

    A pass may leave values there that the enclosing model reads, such as a router's loss.
    """
    return {
        (path, name): value
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if isinstance(value, Tensor)
    }


def put_back(module: nn.Module, before: Mapping[tuple[str, str], Tensor]) -> None:
    """Restore the attributes that `left_in` found before."""
    for path, name in left_in(module).keys() - before.keys():
        del vars(module.get_submodule(path))[name]
    leave_in(module, before)


def leave_in(module: nn.Module, values: Mapping[tuple[str, str], Tensor]) -> None:
    """Write tensors into attributes."""
    for (path, name), value in values.items():
        # Not by `setattr`, which the user's class may override.
        vars(module.get_submodule(path))[name] = value


def _kept(name: str, leaf: Any) -> Any:
    """Return an argument of a module in the form in which it is stored for later calls."""
    if isinstance(leaf, Tensor):
        return OpaqueTensorSpec.of(leaf)
    if isinstance(leaf, _ATOMS) or callable(leaf):
        return leaf
    if _holds_tensors(leaf):
        raise ValueError(
            f"module {name} is given a {type(leaf).__name__} that holds tensors, which a trace "
            "would store; give it the tensors themselves, in tuples, lists or dicts"
        )
    return copy.deepcopy(leaf)


def _holds_tensors(value: Any) -> bool:
    """Return whether an object contains a tensor, directly or in other objects."""
    waiting = [value]
    seen: dict[int, Any] = {}
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            return True
        if id(each) in seen or isinstance(each, (*_ATOMS, type)):
            continue
        seen[id(each)] = each
        if isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            waiting += each
        else:
            waiting += getattr(each, "__dict__", {}).values()
    return False


def _tensors(model: nn.Module, names: Sequence[str], without: Sequence[str] = ()) -> list[Tensor]:
    # By now the tracer has replaced parameters and buffers by its own tensors.
    found = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    return [found[name] for name in names if name not in without]
