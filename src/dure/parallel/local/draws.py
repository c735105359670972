"""Random numbers of worker threads: each draws from generators of its own, whatever the others do.

All threads of a process share torch's global generators, so that dropout in two threads would
depend on who is first. Inside `own_draws` a thread's random operators draw from generators seeded
for it alone: those that take a generator are given one, for the others the global generator is
lent, its state exchanged under a lock. The numbers are those that the global generator would have
given after the same seed.

Looking at every operator costs tens of microseconds each, so only models that draw are run like
this: `Draws` runs workers without it until the global generator has moved, and from then on with
it. Python's and numpy's generators are not looked after.
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

Value = TypeVar("Value")

_LENT = threading.Lock()
"""Held by the thread to which a global generator is lent."""


def own_draws(seed: int, devices: Sequence[torch.device]) -> AbstractContextManager[Any]:
    """Inside, this thread's random operators draw from fresh generators of `seed`.

    That is so on the CPU and on `devices`.
    """
    mode: AbstractContextManager[Any] = _OwnDraws(seed, devices)
    return mode


@contextmanager
def _flags_restored() -> Iterator[None]:
    """Puts back what torch notes about dispatch modes.

    It notes for the whole process whether a thread is in such a mode, and each thread puts back
    what it has found there. Where threads take turns it would look as if one had never left, and
    torch would compile nothing any more.
    """
    before = {
        name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")
    }
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(_python_dispatch, name, value)


def global_generators(devices: Sequence[torch.device]) -> dict[torch.device, torch.Generator]:
    """torch's own generators of the CPU and of those of `devices` that are GPUs."""
    found = {torch.device("cpu"): torch.default_generator}
    for device in devices:
        if device.type == "cuda":
            found[device] = torch.cuda.default_generators[device.index or 0]
    return found


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
        # A generator that the caller has given is the caller's affair.
        own = self.own.get(device)
        if own is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        # It takes a generator, and was given none: ours.
        for place, argument in enumerate(func._schema.arguments):
            if argument.name == "generator" and (argument.kwarg_only or len(args) <= place):
                return func(*args, **{**kwargs, "generator": own})
        return self._with_the_common_one(self.common[device], own, lambda: func(*args, **kwargs))

    def _with_the_common_one(
        self, common: torch.Generator, own: torch.Generator, work: Callable[[], Value]
    ) -> Value:
        # One thread at a time has its own state in the common generator, and leaves the generator
        # as it was.
        with _LENT:
            before = common.get_state()
            common.set_state(own.get_state())
            try:
                return work()
            finally:
                own.set_state(common.get_state())
                common.set_state(before)


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Where an operator draws: on the device that it is told, or on that of its first tensor."""
    named = kwargs.get("device")
    if named is not None:
        device = torch.device(named)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device
    return next((one.device for one in args if isinstance(one, Tensor)), torch.device("cpu"))


class Draws:
    """Finds out whether a model draws random numbers, and gives each worker its own if it does.

    devices: where workers compute. models: of the workers, whose buffers are put back if a forward
    pass is repeated.
    """

    def __init__(self, devices: Sequence[torch.device], models: Sequence[nn.Module]) -> None:
        self.devices = devices
        self.models = models
        self.found = False

    def run(self, work: Callable[[Callable[[int], AbstractContextManager[Any]]], Value]) -> Value:
        """What work(own) returns: a pass of all workers, each of them inside `own(seed)`.

        It is done twice where it turns out that the model draws.
        """
        if self.found:
            with _flags_restored():
                return work(lambda seed: own_draws(seed, self.devices))
        # The pass is done on trial: if it has drawn, it is done again from the same state.
        common = global_generators(self.devices).values()
        before = [generator.get_state() for generator in common]
        # by module and name, since a forward pass may put another tensor in a buffer's place
        buffers: list[tuple[nn.Module, str, Tensor | None]] = []
        for model in self.models:
            for module in model.modules():
                buffers += [(module, name, buffer) for name, buffer in module._buffers.items()]
        kept = [buffer.clone() if buffer is not None else None for _, _, buffer in buffers]
        value = work(lambda seed: nullcontext())
        # No generator has moved: nothing draws, and the value stands.
        if all(torch.equal(a.get_state(), b) for a, b in zip(common, before, strict=True)):
            return value
        self.found = True
        for generator, state in zip(common, before, strict=True):
            generator.set_state(state)
        with torch.no_grad():
            for (module, name, buffer), old in zip(buffers, kept, strict=True):
                # Forward may have put another one in its place.
                module._buffers[name] = buffer
                if buffer is not None and old is not None and not torch.equal(buffer, old):
                    buffer.copy_(old)
        # now with `found`
        return self.run(work)
