"""Stand-in accelerator for tests without a GPU: torch device "acc", whose memory is the CPU's.

`import stand_in_device` builds and registers the device (stand_in_device.cpp, which says what it
does); the import raises ImportError where there is no C++ compiler. No device is present until
`present` or the variable STAND_IN_DEVICES says so, which ranks inherit: other tests in the same
process must not find an accelerator. The fixture `accelerator` (tests/conftest.py) does both.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NAME = "acc"
SOURCE = Path(__file__).with_suffix(".cpp")
BUILT = Path(__file__).parents[1] / "build" / "stand-in"


def built() -> Path:
    """Return the compiled device, which is built if its source or torch has changed."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise ImportError("the stand-in device needs a C++ compiler: apt-get install g++")
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    found = BUILT / f"stand_in_core_{version}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    # Several workers of the tests may arrive at once.
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            torch_folder = Path(torch.__file__).parent
            includes = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include"]
            made = found.with_suffix(".new")
            subprocess.run(
                [
                    *(compiler, "-O0", "-std=c++20", "-shared", "-fPIC", "-w"),
                    "-DTORCH_EXTENSION_NAME=stand_in_core",
                    *(f"-I{folder}" for folder in (*includes, sysconfig.get_path("include"))),
                    *(str(SOURCE), "-o", str(made), f"-L{torch_folder / 'lib'}"),
                    *("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
                ],
                check=True,
            )
            made.rename(found)
    return found


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("stand_in_core", built())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VARIABLE = "STAND_IN_DEVICES"

torch.utils.rename_privateuse1_backend(NAME)
core = _loaded()
core.set_device_count(int(os.environ.get(VARIABLE, "0")))


@contextmanager
def present(count: int = 4) -> Iterator[None]:
    """Context manager: so many devices are present, in this process and in those that it starts."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(count)
    core.set_device_count(count)
    try:
        yield
    finally:
        core.set_device_count(int(before or 0))
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


class DeviceModule:
    """Counterpart of `torch.cuda` for the device."""

    Stream = torch.Stream
    Event = torch.Event

    @staticmethod
    def is_available() -> bool:
        return core.device_count() > 0

    @staticmethod
    def is_initialized() -> bool:
        return bool(core.device_count() > 0)

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def _lazy_init() -> None:
        pass

    @staticmethod
    def device_count() -> int:
        return int(core.device_count())

    @staticmethod
    def current_device() -> int:
        return int(core.current_device())

    @staticmethod
    def set_device(device: Any) -> None:
        core.set_device(torch.device(device).index or 0)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def manual_seed(cls, seed: int) -> None:
        core.default_generator(cls.current_device()).manual_seed(seed)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        for device in range(cls.device_count()):
            core.default_generator(device).manual_seed(seed)

    @staticmethod
    def get_rng_state(device: Any = NAME) -> torch.Tensor:
        return core.default_generator(_index(device)).get_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
        core.default_generator(_index(device)).set_state(state)

    @classmethod
    def get_rng_state_all(cls) -> list[torch.Tensor]:
        return [cls.get_rng_state(device) for device in range(cls.device_count())]

    @classmethod
    def set_rng_state_all(cls, states: list[torch.Tensor]) -> None:
        for device, state in enumerate(states):
            cls.set_rng_state(state, device)


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return DeviceModule.current_device() if index is None else index


torch._register_device_module(NAME, DeviceModule)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


@dataclass
class Crossings:
    """Copies between the memories, with their bytes, and waits for the device."""

    to_device: int = 0
    to_device_bytes: int = 0
    to_host: int = 0
    to_host_bytes: int = 0
    synchronisations: int = 0


@contextmanager
def crossings() -> Iterator[Crossings]:
    """Context manager: count what crosses the border inside; the result is filled at the end."""
    found = Crossings()
    before = core.counts()
    try:
        yield found
    finally:
        for name, value in core.counts().items():
            setattr(found, name, value - before[name])
