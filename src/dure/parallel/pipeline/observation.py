"""Inputs and outputs of modules that are not traced, observed in a run of the model.

The model runs forward once, on copies of its parameters and buffers, with the inputs on which it is
traced; generators are restored. The run needs the memory of a second model and the time of a
forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from dure.machine.devices import device_generators
from dure.parallel.pipeline.opaque_modules import (
    ObservedCall,
    OpaqueTensorSpec,
    UntraceableError,
    left_in,
    put_back,
    tensors_by_place,
)
from dure.parallel.pipeline.patching import patched_modules
from dure.parallel.pipeline.side_effects import unseeded_state
from dure.randomness.seeds import generators_state, restore_generators


def run_copy(model: nn.Module, inputs: Any) -> Any:
    """Return the model's output for copies of its parameters, its buffers and the inputs."""
    before = generators_state()
    left = left_in(model)
    try:
        with _on_copies(model):
            return model(tree_map_only(Tensor, torch.clone, inputs))
    finally:
        put_back(model, left)
        restore_generators(before)


@contextmanager
def _on_copies(model: nn.Module) -> Iterator[None]:
    """Context manager: parameters and buffers are copies, as forward passes may change both."""
    copies: dict[int, Tensor] = {}
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in kinds:
            before.append((held, dict(held)))
            for name, tensor in held.items():
                if tensor is not None:
                    # A tensor with several names has a single copy.
                    held[name] = copies.setdefault(id(tensor), _copy(tensor))
    try:
        yield
    finally:
        for held, was in before:
            held.clear()
            held.update(was)


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def observe_calls(
    model: nn.Module, inputs: Any, names: Collection[str], entirely: Collection[str]
) -> list[ObservedCall]:
    """Return the calls of these modules in a forward pass, in order, without nested calls.

    entirely: the modules of which all methods are observed, not forward alone
    (`dure.parallel.pipeline.patching`).
    """
    calls: list[ObservedCall] = []
    own = {
        name: [known for known, _ in _tensors_of(model.get_submodule(name), name)] for name in names
    }
    first = {id(tensor): name for name, tensor in _tensors_of(model)}
    # every name of a tensor maps to the tensor's first name
    alias = {name: first[id(tensor)] for name, tensor in _tensors_of(model, every=True)}
    known: dict[int, str] = dict(first)
    inside: list[str] = []

    def around(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return function(*args, **kwargs)
            if len(known) == len(first):
                # added here, because the copies are in the model only while it runs
                known.update((id(tensor), at) for at, tensor in _tensors_of(model))
            inside.append(name)
            try:
                module = model.get_submodule(name)
                call, outputs = _noted(name, module, partial(function, *args, **kwargs), known)
            finally:
                inside.pop()
            uses = dict.fromkeys([*(alias[each] for each in own[name]), *call.uses])
            call.uses = tuple(uses)
            calls.append(call)
            return outputs

        return noted

    with patched_modules(model, names, around, entirely):
        run_copy(model, inputs)
    return calls


def is_steady(model: nn.Module, inputs: Any, names: Collection[str]) -> bool:
    """Return whether these modules return values of equal form and number for other examples.

    False for example for an expert, which takes and returns as many rows as its router chooses.
    True if the model fails on the other examples.
    """
    first = observe_calls(model, inputs, names, ())
    try:
        others = observe_calls(model, tree_map_only(Tensor, _other, inputs), names, ())
    except Exception:  # a model may reject examples that are not from the data set
        return True
    return [call.form for call in first] == [call.form for call in others]


def _other(leaf: Tensor) -> Tensor:
    """Return a tensor of the same shape in which every example is the first example reversed."""
    first = leaf[:1].flip(-1) if leaf.dim() > 1 else leaf[:1]
    return first.expand_as(leaf) if leaf.dim() else leaf


def _tensors_of(
    model: nn.Module, prefix: str = "", every: bool = False
) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers by name. every: also further names of the same tensor."""
    unique: Any = {"prefix": prefix, "remove_duplicate": not every}
    return [*model.named_parameters(**unique), *model.named_buffers(**unique)]


def _noted(
    name: str, module: nn.Module, call: partial[Any], known: Mapping[int, str]
) -> tuple[ObservedCall, Any]:
    """Call a module and record its effects. known: parameters and buffers by id."""
    given = tensors_by_place(call.args, call.keywords)
    versions = {place: tensor._version for place, tensor in given.items()}
    used = _Used(known)
    state = _generators()
    foreign = unseeded_state()
    before = left_in(module)
    with used, FlopCounterMode(display=False) as counter:
        outputs = call()
    if unseeded_state() != foreign:
        raise UntraceableError(
            type(module).__name__,
            f"module {name} draws random numbers from Python or numpy, which dure does not seed; "
            "draw them from torch",
            modules=[],
            of_data=False,
        )
    leaves, structure = tree_flatten(outputs)
    noted = ObservedCall(
        name=name,
        leaves=tuple(
            OpaqueTensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ),
        structure=structure,
        left={
            place: OpaqueTensorSpec.of(tensor)
            for place, tensor in left_in(module).items()
            if before.get(place) is not tensor
        },
        uses=tuple(used.names),
        written=tuple(used.written()),
        changed=tuple(
            place for place, tensor in given.items() if tensor._version != versions[place]
        ),
        shared=tuple(
            place
            for place, tensor in given.items()
            if any(_share(tensor, leaf) for leaf in leaves if isinstance(leaf, Tensor))
        ),
        draws=not all(map(torch.equal, state, _generators())),
        flops=float(counter.get_total_flops()),
    )
    return noted, outputs


def _generators() -> list[Tensor]:
    """Return the states of torch's generators."""
    return [torch.get_rng_state(), *chain.from_iterable(device_generators().values())]


def _share(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


class _Used(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records the parameters and buffers that operations use and change."""

    def __init__(self, known: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.names: dict[str, None] = {}
        self._parameters: dict[str, tuple[Tensor, int]] = {}
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            name = self.known.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if name is not None and name not in self.names:
                self.names[name] = None
                if isinstance(leaf, nn.Parameter):
                    self._parameters[name] = leaf, leaf._version
                else:
                    # Not the version counter: batch norm changes its buffers without increasing it.
                    self._buffers[name] = leaf, leaf.clone()
        return func(*args, **(kwargs or {}))

    def written(self) -> list[str]:
        """Return the names of the changed parameters and buffers."""
        changed = [
            name for name, (now, before) in self._parameters.items() if now._version != before
        ]
        buffers = self._buffers.items()
        return changed + [name for name, (now, was) in buffers if not torch.equal(now, was)]
