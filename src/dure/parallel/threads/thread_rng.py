"""Random numbers of worker threads: each thread has its own generators.

All threads of a process share torch's global generators, so that dropout in two threads would
depend on their timing. Inside `thread_generators` the random operators of a thread use generators
that are seeded for this thread alone. An operator with a `generator` argument gets the thread's
generator; for other operators the state of the global generator is exchanged under a lock. The
numbers are those that the global generator would return after the same seed.

The inspection of each operator costs tens of microseconds, so it is only used for models that draw:
`ThreadDraws` runs workers without it until the global generator has moved, and with it from then
on. Python's and numpy's generators are not handled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from dure.machine.devices import CPU, DeviceGenerator, indexed

Value = TypeVar("Value")

_LENT = threading.Lock()
"""Lock of the global generators while a thread uses them with its own state."""


def thread_generators(seed: int, devices: Sequence[torch.device]) -> AbstractContextManager[Any]:
    """Return a context manager in which this thread draws from new generators of `seed`.

    The generators are those of the CPU and of `devices`.
    """
    mode: AbstractContextManager[Any] = _OwnDraws(seed, devices)
    return mode


@contextmanager
def _flags_restored() -> Iterator[None]:
    """Context manager that restores torch's flags of dispatch modes.

    The flags belong to the process: each thread sets a flag and restores the value that it found.
    With threads that interleave, a flag could stay set, and torch would not compile any more.
    """
    before = {
        name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")
    }
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(_python_dispatch, name, value)


def global_generators(devices: Sequence[torch.device]) -> dict[torch.device, DeviceGenerator]:
    """Return torch's global generators of the CPU and of `devices`."""
    return {device: DeviceGenerator(device) for device in (CPU, *devices)}


class _OwnDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seed: int, devices: Sequence[torch.device]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.common = global_generators(devices)
        self.own = {device: torch.Generator(device).manual_seed(seed) for device in self.common}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        # A generator that the caller gives is used as it is.
        own = self.own.get(device)
        if own is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        # The operator has a generator argument without a value: pass this thread's.
        for place, argument in enumerate(func._schema.arguments):
            if argument.name == "generator" and (argument.kwarg_only or len(args) <= place):
                return func(*args, **{**kwargs, "generator": own})
        return self._with_the_common_one(self.common[device], own, lambda: func(*args, **kwargs))

    def _with_the_common_one(
        self, common: DeviceGenerator, own: torch.Generator, work: Callable[[], Value]
    ) -> Value:
        # One thread at a time puts its state into the common generator, and restores it afterwards.
        with _LENT:
            before = common.get_state()
            common.set_state(own.get_state())
            try:
                return work()
            finally:
                own.set_state(common.get_state())
                common.set_state(before)


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Return an operator's device: its `device` argument, or the device of its first tensor."""
    named = kwargs.get("device")
    if named is not None:
        return indexed(torch.device(named))
    return next((one.device for one in args if isinstance(one, Tensor)), torch.device("cpu"))


class ThreadDraws:
    """Detection of models that draw random numbers; their workers get separate generators.

    devices: devices of the workers. models: models of the workers, whose buffers are restored if a
    forward pass is repeated.
    """

    def __init__(self, devices: Sequence[torch.device], models: Sequence[nn.Module]) -> None:
        self.devices = devices
        self.models = models
        self.found = False

    def run(self, work: Callable[[Callable[[int], AbstractContextManager[Any]]], Value]) -> Value:
        """Return work(own), a pass of all workers, each inside `own(seed)`.

        The pass runs twice if the first run shows that the model draws.
        """
        if self.found:
            with _flags_restored():
                return work(lambda seed: thread_generators(seed, self.devices))
        # The pass is a trial: if it has drawn, it is repeated from the same state.
        common = global_generators(self.devices).values()
        before = [generator.get_state() for generator in common]
        # by module and name, because a forward pass may replace a buffer's tensor
        buffers: list[tuple[nn.Module, str, Tensor | None]] = []
        for model in self.models:
            for module in model.modules():
                buffers += [(module, name, buffer) for name, buffer in module._buffers.items()]
        kept = [buffer.clone() if buffer is not None else None for _, _, buffer in buffers]
        value = work(lambda seed: nullcontext())
        # No generator has moved: the pass has not drawn, and the value is final.
        if all(torch.equal(a.get_state(), b) for a, b in zip(common, before, strict=True)):
            return value
        self.found = True
        for generator, state in zip(common, before, strict=True):
            generator.set_state(state)
        with torch.no_grad():
            for (module, name, buffer), old in zip(buffers, kept, strict=True):
                # The forward pass may have replaced the tensor.
                module._buffers[name] = buffer
                if buffer is not None and old is not None and not torch.equal(buffer, old):
                    buffer.copy_(old)
        # now with `found`
        return self.run(work)
