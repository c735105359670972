"""Modules that are one operation of a trace: what they compute is not looked into.

Some modules cannot be traced: a mixture of experts whose router decides which rows each expert
gets, a gradient of one's own. The model around them can. While it is traced, each of them is
written down as one operation on the tensors that it is given, with its parameters and buffers; when
a stage computes, the module itself is called in its place. So a model can be cut before and after
such a module, and not inside.

    dure::untraced(given, weights, written, changed, decisions, draws, number) -> tensors

    weights    its parameters and buffers, but for those that it changes, which are `written`
    changed    which of the tensors that it is given it writes into
    decisions  whether it is called at all (`dure.parallel.pipeline.choosing`); mostly none
    draws      whether it draws random numbers
    number     of the call in the trace

What it gives has the shapes that it gave when the model ran (`dure.parallel.pipeline.observed`). If
it ever gives others, the run ends with an error that names it.

Everything that is no tensor is given as it was in the trace: numbers, flags, None. An object, such
as a cache that is empty yet, is copied for each call; one that holds tensors is refused, as a trace
would keep those of the first pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

_ATOMS = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)

Skip = Literal["given", "zeros"]
"""What stands for a module's result where it is not called: what it is given first, or zeros."""


@dataclass(frozen=True)
class Like:
    """A tensor without its data."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """That of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """A tensor like it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has its shape and dtype."""
        return tuple(self.shape) == tuple(tensor.shape) and self.dtype == tensor.dtype


@dataclass
class Call:
    """A call of a module, as a run of the model has seen it.

    name: of the module. leaves, structure: of what it gave, with `Like` for tensors. uses, written:
    the names of the parameters and buffers that it uses and changes. changed: where among its
    arguments the tensors are that it changes. flops: of its forward pass.
    """

    name: str
    leaves: tuple[Any, ...]
    structure: TreeSpec
    uses: tuple[str, ...]
    written: tuple[str, ...]
    changed: tuple[str, ...]
    draws: bool
    flops: float

    @property
    def tensors(self) -> list[Like]:
        """Of what it gave."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Like)]


@dataclass
class Block:
    """What an operation of a trace stands for: a module, and how it is called.

    function: its forward. leaves, structure: of its arguments, with `Like` for tensors. skip, called_if: where a decision is given, the module is called if that is `called_if`, and
    else `skip` stands for what it gives.
    """

    call: Call
    module: nn.Module
    function: Callable[..., Any]
    leaves: list[Any]
    structure: TreeSpec
    skip: Skip | None = None
    called_if: bool = False

    def __post_init__(self) -> None:
        # A trace holds for the mode in which it was made, and so does what stands in it.
        self._modes = [(module, module.training) for module in self.module.modules()]

    def run(
        self,
        given: Sequence[Tensor],
        weights: Sequence[Tensor],
        written: Sequence[Tensor],
        changed: Sequence[int],
        decisions: Sequence[Tensor],
        draws: bool,
        number: int,
    ) -> list[Tensor]:
        """Calls the module itself, which has its own parameters. Raises ValueError for a shape."""
        if decisions and bool(decisions[0]) != self.called_if:
            return skipped(self.call, self.skip, given)
        tensors = iter(given)
        leaves = [next(tensors) if isinstance(leaf, Like) else _own(leaf) for leaf in self.leaves]
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
        leaves, structure = tree_flatten(outputs)
        call = self.call
        if structure != call.structure:
            raise ValueError(f"module {call.name} gives a result of another form than at first")
        for leaf, known in zip(leaves, call.leaves, strict=True):
            if isinstance(known, Like):
                if not isinstance(leaf, Tensor) or not known.fits(leaf):
                    what = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                    raise ValueError(
                        f"module {call.name} gives {what}, and gave {list(known.shape)} at first: "
                        "what travels between stages needs shapes that do not depend on the data"
                    )
            elif isinstance(known, _ATOMS) and leaf != known:
                raise ValueError(f"module {call.name} gives {leaf!r}, and gave {known!r} at first")
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def skipped(call: Call, skip: Skip | None, given: Sequence[Tensor]) -> list[Tensor]:
    """What stands for a module's result where it is not called."""
    first, *others = call.tensors
    like = next((tensor for tensor in given if first.fits(tensor)), None)
    if skip == "given" and like is not None:
        return [like, *(torch.zeros_like(other.empty()) for other in others)]
    return [torch.zeros_like(each.empty()) for each in call.tensors]


def _own(leaf: Any) -> Any:
    """A leaf that is no tensor, for one call."""
    return leaf if isinstance(leaf, _ATOMS) or callable(leaf) else copy.deepcopy(leaf)


_under_way: list[list[Block]] = []
"""Of the traces that are being made."""


@torch.library.custom_op("dure::untraced", mutates_args=())
def _untraced(
    given: list[Tensor],
    weights: list[Tensor],
    written: list[Tensor],
    changed: list[int],
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
    decisions: list[Tensor],
    draws: bool,
    number: int,
) -> list[Tensor]:
    return [like.empty() for like in _under_way[-1][number].call.tensors]


def is_untraced(node: fx.Node) -> bool:
    """Whether a node stands for a module that is not looked into."""
    return node.target is torch.ops.dure.untraced.default


def block_of(node: fx.Node, blocks: Sequence[Block]) -> Block:
    """What such a node stands for. blocks: of its trace."""
    return blocks[int(str(node.args[6]))]


def in_place_of(node: fx.Node, blocks: Sequence[Block]) -> Callable[..., list[Tensor]]:
    """The module itself, to be called in the place of such an operation."""
    block = block_of(node, blocks)

    def untraced(*arguments: Any) -> list[Tensor]:
        return block.run(*arguments)

    return untraced


def changed_of(node: fx.Node) -> list[fx.Node]:
    """The values that it changes: buffers, and what it was given."""
    given: Any = node.args[0]
    written: Any = node.args[2]
    places: Any = node.args[3]
    return [*written, *(given[place] for place in places)]


def draws_of(node: fx.Node) -> bool:
    """Whether it draws random numbers."""
    return bool(node.args[5])


def tensors_by_place(args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The tensors that a module is given, by where among its arguments they are."""
    leaves, _ = tree_flatten_with_path((args, kwargs))
    return {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


class NotTheSameError(ValueError):
    """A trace calls a module otherwise than the run that was observed."""


@contextmanager
def in_one_piece(
    model: nn.Module,
    calls: Sequence[Call],
    decided: Callable[[Call], tuple[Tensor, Skip, bool] | None],
) -> Iterator[list[Block]]:
    """Inside, the modules of these calls are operations; what they stand for is in the list.

    calls: in order. decided: whether it depends on a decision that a call is made, the skip that
    stands for it, and the outcome with which it is made.
    """
    blocks: list[Block] = []
    _under_way.append(blocks)
    modules = {name: model.get_submodule(name) for name in {call.name for call in calls}}
    before = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = _stub(model, name, module.forward, blocks, calls, decided)
    try:
        yield blocks
    finally:
        _under_way.pop()
        for name, module in modules.items():
            del module.forward
            if before[name] is not None:
                module.forward = before[name]


def _stub(
    model: nn.Module,
    name: str,
    function: Callable[..., Any],
    blocks: list[Block],
    calls: Sequence[Call],
    decided: Callable[[Call], tuple[Tensor, Skip, bool] | None],
) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        number = len(blocks)
        leaves, structure = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = list(tensors_by_place(args, kwargs))
        if number >= len(calls) or calls[number].name != name:
            raise NotTheSameError(f"module {name} is called in a trace, and not where it is run")
        call = calls[number]
        if not all(type(length) is int for tensor in given for length in tensor.shape):
            raise NotTheSameError(f"module {name} is given shapes that depend on the data")
        kept = [_kept(name, leaf) for leaf in leaves]
        block = Block(call, model.get_submodule(name), function, kept, structure)
        decision = decided(call)
        if decision is not None:
            _, block.skip, block.called_if = decision
        blocks.append(block)
        tensors = iter(
            torch.ops.dure.untraced(
                given,
                _tensors(model, call.uses, without=call.written),
                _tensors(model, call.written),
                [places.index(place) for place in call.changed],
                [] if decision is None else [decision[0]],
                call.draws,
                number,
            )
        )
        outputs = [next(tensors) if isinstance(leaf, Like) else leaf for leaf in call.leaves]
        return tree_unflatten(outputs, call.structure)

    return stub


def _kept(name: str, leaf: Any) -> Any:
    """A leaf of what a module is given, as it is kept for later calls."""
    if isinstance(leaf, Tensor):
        return Like.of(leaf)
    if isinstance(leaf, _ATOMS) or callable(leaf):
        return leaf
    if _holds_tensors(leaf):
        raise ValueError(
            f"module {name} is given a {type(leaf).__name__} that holds tensors, which a trace "
            "would keep; give it the tensors themselves, in tuples, lists or dicts"
        )
    return copy.deepcopy(leaf)


def _holds_tensors(value: Any) -> bool:
    """Whether there is a tensor in an object or what it holds."""
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
    # The tracer has put its own tensors in their places by now.
    found = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    return [found[name] for name in names if name not in without]
