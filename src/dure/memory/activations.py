"""A model's activations: tensors that autograd saves in forward for backward.

`observe_call` measures them by module, with the inputs and outputs of each call.

Each storage counts once, with its whole size, because a view keeps all of it alive. Parameters and
buffers do not count, because they exist in any case; the inputs count if an operation saves them.

The pass runs on a copy without data (torch's fake tensors), which takes no memory and hardly any
time, and saves the same tensors as a real pass: the same shapes, dtypes and kernels. If this is not
possible, because the model reads values, or has a recurrent layer whose kernel has a workspace of
unknown size, the pass runs on a real copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from dure.machine.compiler import deferred_compiler, load_compiler_settings
from dure.randomness.seeds import generators_state, restore_generators
from dure.tensors.compiled import without_compilation
from dure.tensors.copies import copy_of

Result = TypeVar("Result")

Storages = dict[int, int]
"""Storages by number, with their bytes."""


@dataclass
class ModuleCall:
    """Call of a module in a forward pass.

    name: of the module; "" is the model. given: its inputs. saved: tensors that autograd saved
    during the call, calls of children included. left: its outputs. flops: of its forward pass.
    calls: calls of children, in order. changes: whether an input was changed in place by the end of
    the pass.
    """

    name: str
    module: nn.Module
    given: Storages = field(default_factory=dict)
    saved: Storages = field(default_factory=dict)
    left: Storages = field(default_factory=dict)
    flops: float = 0.0
    calls: list[ModuleCall] = field(default_factory=list)
    changes: bool = False

    def walk(self) -> Iterator[ModuleCall]:
        """Yield this call and the calls in it, in the order in which they began."""
        yield self
        for call in self.calls:
            yield from call.walk()


def observe_call(model: nn.Module, inputs: Any, spare: bool = False) -> ModuleCall:
    """Return the call `model(inputs)` on a copy of the model, with its saved tensors.

    spare: whether the pass may use the model itself if it cannot be copied.

    Raises ValueError if the model cannot be copied and is not spare, and any error of the model.
    """

    def on_fakes() -> ModuleCall:
        with fake_copy(model, inputs) as (twin, given):
            return _watched(twin, given)

    def on_data() -> ModuleCall:
        with spare_copy(model, spare) as twin:
            return _watched(twin, inputs)

    return fake_or_real(model, on_fakes, on_data)


def fake_or_real(
    model: nn.Module, on_fakes: Callable[[], Result], on_data: Callable[[], Result]
) -> Result:
    """Return the result of `on_fakes`, or of `on_data` if fake tensors cannot compute it."""
    # The kernels of recurrent layers have a workspace of a size that only the kernels know.
    if not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        try:
            return on_fakes()
        # No result: the model may use operations that fake tensors do not support.
        except Exception:
            pass
    return on_data()


@contextmanager
def spare_copy(model: nn.Module, spare: bool = False) -> Iterator[nn.Module]:
    """Context manager for a copy of the model to run, or the model itself if it cannot be copied.

    Afterwards torch's generators continue as if nothing had been computed. Raises ValueError if the
    model cannot be copied and is not `spare`.
    """
    # With separate parameters: forward passes may change them, as max_norm does.
    twin = copy_of(model)
    if twin is None and not spare:
        raise ValueError(
            "the model's activations cannot be measured, because the model cannot be copied"
        )
    before = generators_state()
    try:
        yield model if twin is None else twin
    finally:
        restore_generators(before)


@contextmanager
def fake_copy(model: nn.Module, inputs: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Context manager for a copy of the model and the inputs without data, inside their mode.

    Raises ValueError if the model cannot be copied.
    """
    with deferred_compiler(), ExitStack() as modes:
        load_compiler_settings()
        # Tensors that are no parameters or buffers, such as constants, are used as they are.
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        modes.enter_context(mode)
        known = {id(tensor): _like(tensor) for tensor in (*model.parameters(), *model.buffers())}
        twin = copy_of(model, known=known)
        if twin is None:
            raise ValueError("there is no copy of the model")
        yield twin, tree_map_only(Tensor, _like, inputs)


def _like(tensor: Tensor) -> Tensor:
    """Return a tensor without data with this shape, created in a fake mode."""
    own = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(own, tensor.requires_grad)
    return own.requires_grad_(tensor.requires_grad)


def _watched(model: nn.Module, inputs: Any) -> ModuleCall:
    """Run a model with hooks on its modules, and return its call."""
    watch = _Watch(model)
    with watch.watching():
        model(inputs)
    watch.settle()
    return watch.root


class _Watch:
    """Recorder of the inputs and saved tensors of the calls of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.root = ModuleCall("", model)
        self._under_way: list[ModuleCall] = []
        self._numbers: dict[StorageWeakRef, int] = {}
        # For each call its input tensors, with their versions at the beginning.
        self._given: list[tuple[ModuleCall, list[tuple[Callable[[], Tensor | None], int]]]] = []
        # Parameters and buffers have the numbers 0, 1, ... and are not counted.
        for tensor in (*model.parameters(), *model.buffers()):
            self._number(tensor)
        self._own = len(self._numbers)

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks = []
        for name, module in self.model.named_modules():
            hooks += [
                module.register_forward_pre_hook(
                    partial(self._begin, name), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(self._end),
            ]
        counter: AbstractContextManager[Any] = FlopCounterMode(display=False)
        saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        try:
            written = without_compilation(self.model)
            with (
                deferred_compiler(),
                written,
                counter as self._counter,
                torch.enable_grad(),
                saving,
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def settle(self) -> None:
        """Find the calls whose inputs have changed by the end of the pass."""
        for call, tensors in self._given:
            for find, version in tensors:
                tensor = find()
                # A released tensor cannot have changed since; recomputation would keep it alive.
                call.changes |= tensor is not None and tensor._version != version

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        inside = bool(self._under_way)
        call = ModuleCall(name, module) if inside else self.root
        if inside:
            self._under_way[-1].calls.append(call)
        self._under_way.append(call)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        call.given = self._counted(tensors)
        self._given.append((call, [(weakref.ref(each), each._version) for each in tensors]))
        call.flops = -self._flops()

    def _end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        call = self._under_way.pop()
        call.flops += self._flops()
        call.left = self._counted(
            [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        )

    def _flops(self) -> float:
        return float(self._counter.get_total_flops())

    def _save(self, tensor: Tensor) -> Tensor:
        for number, size in self._counted([tensor]).items():
            for call in self._under_way:
                call.saved[number] = size
        return tensor

    def _counted(self, tensors: list[Tensor]) -> Storages:
        found = {self._number(tensor): _bytes(tensor) for tensor in tensors}
        return {number: size for number, size in found.items() if number >= self._own}

    def _number(self, tensor: Tensor) -> int:
        # A weak reference: the storage may be released, but its key is not reused.
        try:
            key = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        # Sparse tensors have no storage.
        except (NotImplementedError, RuntimeError):
            key = tensor  # type: ignore[assignment]
        return self._numbers.setdefault(key, len(self._numbers))


def _bytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.nbytes
