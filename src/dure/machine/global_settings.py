"""Settings of torch and Python for a whole process or a thread, as values.

A user who changes a setting expects it to apply wherever a run computes: in the processes of its
ranks and in its worker threads too. `settings_here` reads all settings, and `GlobalSettings.apply`
applies the differing ones in another process. docs/ranks.md lists the settings, and the exceptions.

A setting that this version of torch lacks, or does not report, stays unchanged.
"""

from __future__ import annotations

import decimal
import faulthandler
import functools
import gc
import importlib
import locale
import multiprocessing
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

Value = TypeVar("Value")


class _Setting(NamedTuple):
    """Functions that read a setting and write its value."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


@dataclass(frozen=True)
class GlobalSettings:
    """Values by the setting's name; they can be pickled."""

    values: dict[str, Any]

    def apply(self) -> None:
        """Apply the settings that differ in this process and thread."""
        # In this order, because the older, coarser precision settings also change finer settings.
        for name, value in self.values.items():
            setting = _ALL.get(name)
            if setting is not None and _read(setting) not in (value, _UNKNOWN):
                setting.write(value)

    def of_computing(self) -> GlobalSettings:
        """Return the settings that change computed values, for an independent process."""
        kinds = ("torch.", "numpy.", "decimal")
        return GlobalSettings(
            {name: v for name, v in self.values.items() if name.startswith(kinds)}
        )


def settings_here() -> GlobalSettings:
    """Return all settings of this process and thread."""
    return GlobalSettings(dict(_known(_ALL)))


def with_current_settings(function: Callable[..., Value]) -> Callable[..., Value]:
    """Wrap a function for another thread, so that it starts with the settings of this thread."""
    settings = GlobalSettings(dict(_known(_OF_A_THREAD)))

    @functools.wraps(function)
    def there(*arguments: Any) -> Value:
        settings.apply()
        return function(*arguments)

    return there


_UNKNOWN = object()


def _known(settings: dict[str, _Setting]) -> Iterator[tuple[str, Any]]:
    for name, setting in settings.items():
        value = _read(setting)
        if value is not _UNKNOWN:
            yield name, value


def _read(setting: _Setting) -> Any:
    try:
        return setting.read()
    # Another version of torch, or a setting that torch refuses to report, such as precision after
    # a mix of old and new settings.
    except (AttributeError, ImportError, RuntimeError, TypeError):
        return _UNKNOWN


def _attribute(path: str) -> _Setting:
    """Return a setting that is an attribute of a module, such as torch.backends.cudnn.benchmark."""
    owner, _, name = path.rpartition(".")

    def holder() -> Any:
        place, _, last = owner.rpartition(".")
        try:
            return importlib.import_module(owner)
        except ImportError:  # an object in a module, such as torch.backends.cuda.matmul
            return getattr(importlib.import_module(place), last)

    return _Setting(lambda: getattr(holder(), name), lambda value: setattr(holder(), name, value))


def _pair(read: str, write: str) -> _Setting:
    """Return a setting with a function of torch that reads it and a function that writes it."""

    def function(path: str) -> Any:
        place, _, name = path.rpartition(".")
        return getattr(importlib.import_module(place), name)

    return _Setting(lambda: function(read)(), lambda value: function(write)(value))


def _flushes_denormals() -> bool:
    """Return whether denormal numbers become zero; torch has no function for this question."""
    least = torch.tensor([5e-324], dtype=torch.float64, device="cpu")
    return bool((least * 1 == 0).item())


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_autocast(value: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_dtype("cpu", value[1])
    torch.set_autocast_enabled("cpu", value[0])


def _warning_filters() -> list[tuple[Any, ...]]:
    return list(warnings.filters)


def _set_warning_filters(filters: list[tuple[Any, ...]]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in filters:
        warnings.filterwarnings(
            action, _pattern(message), category, _pattern(module), line, append=True
        )


def _pattern(part: re.Pattern[str] | str | None) -> str:
    """Return a part of a filter as a pattern for `warnings.filterwarnings`.

    Python's own filters contain plain texts, which are escaped.
    """
    if part is None:
        return ""
    return part.pattern if isinstance(part, re.Pattern) else rf"{re.escape(part)}\Z"


def _set_start_method(method: str | None) -> None:
    multiprocessing.set_start_method(method, force=True)


def _set_faulthandler(enabled: bool) -> None:
    if enabled:
        faulthandler.enable()
    else:
        faulthandler.disable()


_OF_A_THREAD: dict[str, _Setting] = {
    "torch.default_device": _pair("torch.get_default_device", "torch.set_default_device"),
    "torch.grad_enabled": _pair("torch.is_grad_enabled", "torch.set_grad_enabled"),
    "torch.flush_denormal": _Setting(_flushes_denormals, torch.set_flush_denormal),
    "numpy.errors": _Setting(np.geterr, lambda value: np.seterr(**value)),
    "decimal": _Setting(
        lambda: decimal.getcontext().copy(), lambda value: decimal.setcontext(value.copy())
    ),
}

_BACKENDS = (
    "fp32_precision",
    "cuda.matmul.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.benchmark_limit",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "cudnn.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.enabled",
    "mkldnn.deterministic",
    "mkldnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
    "opt_einsum.enabled",
    "opt_einsum.strategy",
    "quantized.engine",
)
"""Attributes of torch.backends."""

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
"""Implementations of scaled dot product attention, each of which can be disabled."""

_ALL: dict[str, _Setting] = {
    **_OF_A_THREAD,
    "torch.default_dtype": _pair("torch.get_default_dtype", "torch.set_default_dtype"),
    "torch.deterministic_algorithms": _Setting(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    "torch.fill_uninitialized_memory": _attribute(
        "torch.utils.deterministic.fill_uninitialized_memory"
    ),
    "torch.float32_matmul_precision": _pair(
        "torch.get_float32_matmul_precision", "torch.set_float32_matmul_precision"
    ),
    **{f"torch.backends.{name}": _attribute(f"torch.backends.{name}") for name in _BACKENDS},
    **{
        f"torch.backends.cuda.{way}_sdp": _pair(
            f"torch.backends.cuda.{way}_sdp_enabled", f"torch.backends.cuda.enable_{way}_sdp"
        )
        for way in _ATTENTION
    },
    "torch.backends.mha.fastpath": _pair(
        "torch.backends.mha.get_fastpath_enabled", "torch.backends.mha.set_fastpath_enabled"
    ),
    "torch.anomaly": _Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    "torch.warn_always": _pair("torch.is_warn_always_enabled", "torch.set_warn_always"),
    "torch.autocast": _Setting(
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")), _set_autocast
    ),
    "torch.overwrite_module_params": _pair(
        "torch.__future__.get_overwrite_module_params_on_conversion",
        "torch.__future__.set_overwrite_module_params_on_conversion",
    ),
    "torch.swap_module_params": _pair(
        "torch.__future__.get_swap_module_params_on_conversion",
        "torch.__future__.set_swap_module_params_on_conversion",
    ),
    "torch.sharing_strategy": _pair(
        "torch.multiprocessing.get_sharing_strategy", "torch.multiprocessing.set_sharing_strategy"
    ),
    "recursion_limit": _Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "int_max_str_digits": _Setting(sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    "switch_interval": _Setting(sys.getswitchinterval, sys.setswitchinterval),
    "stack_size": _Setting(threading.stack_size, threading.stack_size),
    "warnings": _Setting(_warning_filters, _set_warning_filters),
    "gc": _Setting(gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
    "gc.threshold": _Setting(gc.get_threshold, lambda value: gc.set_threshold(*value)),
    "locale": _Setting(
        lambda: locale.setlocale(locale.LC_ALL),
        lambda value: locale.setlocale(locale.LC_ALL, value),
    ),
    "start_method": _Setting(
        lambda: multiprocessing.get_start_method(allow_none=True), _set_start_method
    ),
    "faulthandler": _Setting(faulthandler.is_enabled, _set_faulthandler),
}
"""All settings that are carried over, by name."""
