"""Devices for computation: the CPU, and whatever accelerator torch has.

Names are torch's: "cpu", "cuda", "cuda:1", "xpu:0". No other module knows accelerators by name:
streams, synchronisation, random numbers and memory of a device are reached through
`torch.accelerator` and the device's module (`torch.cuda`, `torch.xpu`, a private backend's). The
device that a user names is checked before any work begins.

Ranks of one machine divide its devices:

    cpu         every rank computes on the CPU
    cuda        local rank r computes on cuda:r; refused with fewer devices than ranks
    cuda:0      every rank of the machine shares this device
    auto        accelerators if there is one for each rank, otherwise the CPU
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")

AUTO = "auto"
"""Name of the choice between accelerators and the CPU."""

_named: set[str] = set()
"""Types of the devices that this process was told to compute on."""


def accelerator() -> str | None:
    """Return the type of the accelerator for which torch was built, such as "cuda", or None.

    The accelerator is not initialised, and may have no device here.
    """
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def device_count(kind: str) -> int:
    """Return the number of devices of this type here; 0 for a type that torch does not have."""
    if kind == "cpu":
        return 1
    module = getattr(torch, kind, None)
    count = getattr(module, "device_count", None)
    return int(count()) if callable(count) else 0


def _offered(kind: str | None) -> int:
    """Return the number of devices of a type that dure may choose by itself."""
    return 0 if kind is None or not _IS_NEW else device_count(kind)


_IS_NEW = hasattr(torch, "accelerator") and hasattr(torch.accelerator, "max_memory_allocated")
"""Whether this torch has all functions of `torch.accelerator` that are used here, as 2.9 has."""


def device_of(name: str) -> torch.device:
    """Return the device called `name`, with its number.

    Raises ValueError if the device does not exist here.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name!r} is not a device: write cpu, cuda, or cuda:1") from None
    if device.type == "cpu":
        return CPU
    if not _IS_NEW:
        raise ValueError(
            f"computing on {name} needs torch 2.9 or newer, and this is torch {torch.__version__}: "
            "install a newer torch, or use cpu"
        )
    there = device_count(device.type)
    kind = _written(device.type)
    if not there:
        raise ValueError(f"this machine has no {kind} device, so {name} cannot be used: use cpu")
    if (device.index or 0) >= there:
        last = f" to {device.type}:{there - 1}" if there > 1 else ""
        raise ValueError(
            f"this machine has no {name}: its {kind} devices are {device.type}:0{last}"
        )
    _named.add(device.type)
    # With its number, so that "cuda" and "cuda:0" are equal.
    return torch.device(device.type, device.index or 0)


def chosen_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is the accelerator if there is one, else the CPU.

    Raises ValueError if the device does not exist here.
    """
    if name != AUTO:
        return device_of(name)
    kind = accelerator()
    return torch.device(kind, 0) if kind is not None and _offered(kind) else CPU


def is_type(name: str) -> bool:
    """Return whether a name is a type of devices, such as "cuda", and no device with a number."""
    return torch.device(name).index is None


def ray_resource(kind: str) -> str:
    """Return the name under which a Ray cluster counts devices of this type.

    Ray finds the devices of these types itself. Of another type it knows what the cluster declares
    under the type's name.
    """
    return {"cuda": "GPU", "xpu": "GPU", "npu": "NPU", "hpu": "HPU"}.get(kind, kind)


def _written(kind: str) -> str:
    """Return a device type as its makers write it."""
    return kind.upper() if kind in ("cuda", "xpu", "mps", "hpu", "npu", "mtia") else kind


def devices_of_ranks(name: str, ranks: int) -> tuple[torch.device, ...]:
    """Return the device of each of the `ranks` local ranks of a machine.

    name: "cpu", a type such as "cuda" for a device a rank, a device such as "cuda:0" that all ranks
    share, or "auto". Raises ValueError if the devices do not exist here.
    """
    if name == AUTO:
        kind = accelerator()
        if kind is None or _offered(kind) < ranks:
            return (CPU,) * ranks
        return tuple(torch.device(kind, rank) for rank in range(ranks))
    device = device_of(name)
    if is_cpu(device) or torch.device(name).index is not None:
        return (device,) * ranks
    there = device_count(device.type)
    if there < ranks:
        raise ValueError(
            f"{ranks} ranks need {ranks} {_written(device.type)} devices, but this machine has "
            f"{there}: use at most {there} {'rank' if there == 1 else 'ranks'}, or let them share "
            f"one with {device.type}:0"
        )
    return tuple(torch.device(device.type, rank) for rank in range(ranks))


def is_cpu(device: torch.device) -> bool:
    """Return whether a device is the CPU, whose operations end before the call returns."""
    return device.type == "cpu"


WITHOUT_FLOAT64 = ("mps",)
"""Types of devices that do not compute in float64 and complex128."""


def check_device_dtypes(kinds: Iterable[str], dtypes: Iterable[torch.dtype]) -> None:
    """Raise ValueError if a type of device does not have numbers of one of these dtypes."""
    doubles = sorted({str(one) for one in dtypes} & {"torch.float64", "torch.complex128"})
    lacking = [kind for kind in kinds if kind in WITHOUT_FLOAT64]
    if doubles and lacking:
        raise ValueError(
            f"{lacking[0]} does not compute in {doubles[0].removeprefix('torch.')}: use float32, "
            "or another device"
        )


# Copies.


def to_device(tree: Any, device: torch.device) -> Any:
    """Return inputs or targets, tensors in any structure, on `device`.

    A tensor that is already on `device` is returned without a copy.
    """
    # A copy to the CPU must be complete before it is read; a copy to a device is ordered by its
    # stream.
    later = not is_cpu(device)
    return tree_map(
        lambda leaf: leaf.to(device, non_blocking=later) if isinstance(leaf, Tensor) else leaf,
        tree,
    )


def to_cpu(tree: Any) -> Any:
    """Return inputs or targets on the CPU: the inverse of `to_device`, for writing to disk."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, tree)


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in the CPU's memory."""
    return tensor.detach().to(CPU, copy=True)


def pinned_like(tensor: Tensor) -> Tensor:
    """Return an uninitialised CPU tensor of the same shape and dtype for copies from and to it.

    For a tensor of an accelerator the memory is pinned, so that copies need no second buffer.
    """
    pin = not tensor.is_cpu and tensor.device.type != "mps"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU, pin_memory=pin)


def device_of_model(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, or else of its first buffer, or the CPU."""
    return next((one.device for one in chain(model.parameters(), model.buffers())), CPU)


def on_device(function: Any, device: torch.device) -> Any:
    """Return a function whose own tensors, such as the class weights of a loss, are on `device`.

    The tensors of a module and the arguments of a `functools.partial` are moved. The result is a
    copy if a tensor has to move, and otherwise the function itself.
    """
    if isinstance(function, nn.Module):
        own = [*function.parameters(), *function.buffers()]
        return function if _are_there(own, device) else copy.deepcopy(function).to(device)
    if isinstance(function, partial):
        inner = on_device(function.func, device)
        given = (function.args, function.keywords)
        if inner is function.func and _are_there(tree_leaves(given), device):
            return function
        args, keywords = to_device(given, device)
        return partial(inner, *args, **keywords)
    return function


def _are_there(leaves: Any, device: torch.device) -> bool:
    return all(leaf.device == device for leaf in leaves if isinstance(leaf, Tensor))


def default_devices(workers: int | None, cores: int) -> tuple[str, ...]:
    """Return a device name for each worker: the accelerators in turn if present, else "cpu".

    workers: number of workers; None means as many as accelerators, or as cores and at least two.
    """
    kind = accelerator()
    there = _offered(kind)
    if workers is None:
        # At least two, so that there is something to divide on a small machine too.
        workers = there or max(2, cores)
    # More workers than devices share them in turn.
    return tuple(f"{kind}:{worker % there}" if there else "cpu" for worker in range(workers))


# Forked processes.


def has_accelerator() -> bool:
    """Return whether this machine has a device of the accelerator for which torch was built."""
    kind = accelerator()
    return kind is not None and device_count(kind) > 0


def fork_objection(*, autograd: bool) -> str | None:
    """Return why a forked process could not compute on the CPU, in words; None if it can.

    autograd: whether the forked process computes by autograd.

    On a machine with an accelerator the first backward pass of a process, also on the CPU, starts
    autograd's threads for the devices. They do not survive a fork, and autograd refuses to compute
    without them. Nor does an accelerator survive that the process has initialised.
    """
    if not hasattr(os, "fork"):
        return "this system does not have"
    if not has_accelerator():
        return None
    kind = _written(accelerator() or "")
    if in_use():
        return f"a process that uses {kind} does not allow"
    if autograd and _has_autograd_threads():
        return f"a process that has computed gradients on a machine with {kind} does not allow"
    return None


def _has_autograd_threads() -> bool:
    """Return whether autograd has started its threads for devices; True without /proc."""
    try:
        names = [one.read_text() for one in Path("/proc/self/task").glob("*/comm")]
    except OSError:
        return True
    return not names or any(name.startswith("pt_autograd") for name in names)


# Time and order.


def synchronize(device: torch.device) -> None:
    """Wait until all that was queued on a device is done; nothing is queued on the CPU."""
    if not is_cpu(device):
        torch.accelerator.synchronize(device)


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return this thread's stream of a device; None for the CPU."""
    return None if is_cpu(device) else torch.accelerator.current_stream(device)


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Context manager: queue work on this stream; None changes nothing."""
    return nullcontext() if stream is None else stream


def as_current(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager: the device is this thread's current device of its type."""
    if is_cpu(device):
        return nullcontext()
    return torch.accelerator.device_index(device.index or 0)


def set_current(device: torch.device) -> None:
    """Make a device this process's current device of its type, for code that names only a type."""
    if not is_cpu(device):
        _named.add(device.type)
        torch.accelerator.set_device_index(device.index or 0)


def marked(device: torch.device) -> torch.Event:
    """Queue an event with a time on an accelerator, and return it; the call does not wait."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def seconds_between(earlier: torch.Event, later: torch.Event) -> float:
    """Return the seconds between two events that have passed."""
    return float(earlier.elapsed_time(later)) / 1000


# Random numbers.


def _module_in_use() -> Any:
    """Return the module of the accelerator that this process has initialised, or None.

    A module that does not say, as of mps, is in use if a device of its type was named.
    """
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    module = torch.get_device_module(found)
    if hasattr(module, "is_initialized"):
        return module if module.is_initialized() else None
    return module if found.type in _named else None


def in_use() -> bool:
    """Return whether this process has initialised its accelerator."""
    return _module_in_use() is not None


def seed_devices(seed: int) -> None:
    """Seed the generators of all accelerators; do nothing in a process that uses none."""
    module = _module_in_use()
    if module is not None:
        # Of a type with a single device, such as mps, the module has no second function.
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


def device_generators() -> dict[str, list[Tensor]]:
    """Return the states of the accelerators' generators, by type; empty if none is in use."""
    module = _module_in_use()
    kind = accelerator()
    if module is None or kind is None:
        return {}
    several = hasattr(module, "get_rng_state_all")
    return {kind: list(module.get_rng_state_all()) if several else [module.get_rng_state()]}


def restore_device_generators(state: Mapping[str, Any]) -> None:
    """Restore a value of `device_generators`, which may have entries of other names.

    A generator that the state or this process lacks stays unchanged.
    """
    module = _module_in_use()
    kind = accelerator()
    if module is None or kind is None or kind not in state:
        return
    if not hasattr(module, "get_rng_state_all"):
        module.set_rng_state(state[kind][0])
        return
    for device, own in zip(range(module.device_count()), state[kind], strict=False):
        module.set_rng_state(own, device)


class DeviceGenerator:
    """Default generator of a device, with the methods of `torch.Generator` for its state."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = None if is_cpu(device) else torch.get_device_module(device)
        # The functions of mps, a type with a single device, take no device.
        self._place = () if device.type == "mps" else (device,)

    def get_state(self) -> Tensor:
        """Return the state, on the CPU."""
        if self._module is None:
            return torch.default_generator.get_state()
        state: Tensor = self._module.get_rng_state(*self._place)
        return state

    def set_state(self, state: Tensor) -> None:
        """Continue from a state that `get_state` returned."""
        if self._module is None:
            torch.default_generator.set_state(state)
        else:
            self._module.set_rng_state(state, *self._place)

    def manual_seed(self, seed: int) -> None:
        """Seed the generator."""
        if self._module is None:
            torch.default_generator.manual_seed(seed)
        else:
            with as_current(self.device):
                self._module.manual_seed(seed)


def indexed(device: torch.device) -> torch.device:
    """Return a device with its number: of a type alone, the current device."""
    if is_cpu(device) or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


# Memory.


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of an accelerator's memory; None if it does not say."""
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device)[0])
    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except (RuntimeError, AttributeError, NotImplementedError):
        return None


def cached_bytes(device: torch.device) -> int:
    """Return the free bytes of an accelerator that this process's allocator has reserved."""
    try:
        reserved = torch.accelerator.memory_reserved(device)
        return max(0, int(reserved - torch.accelerator.memory_allocated(device)))
    except (RuntimeError, NotImplementedError):
        return 0


def peak_bytes(devices: Sequence[torch.device]) -> dict[str, dict[str, int]]:
    """Return the largest allocated and reserved bytes of each accelerator, since the last reset.

    A device without such statistics is left out.
    """
    found = {}
    for device in devices:
        if is_cpu(device):
            continue
        try:
            found[str(device)] = {
                "allocated": int(torch.accelerator.max_memory_allocated(device)),
                "reserved": int(torch.accelerator.max_memory_reserved(device)),
            }
        except (RuntimeError, NotImplementedError):
            continue
    return found


def reset_peak_bytes(devices: Sequence[torch.device]) -> None:
    """Begin a new measurement of `peak_bytes`."""
    for device in devices:
        if not is_cpu(device):
            try:
                torch.accelerator.reset_peak_memory_stats(device)
            except (RuntimeError, NotImplementedError):
                continue


# Names.


def hardware_name(device: torch.device) -> str:
    """Return the name that an accelerator reports, such as "NVIDIA H200"; "" without a name."""
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(ask(device)) if callable(ask) else ""
