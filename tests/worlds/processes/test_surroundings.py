"""Ranks compute under the settings of the process that has started them, whenever they were set."""

from __future__ import annotations

import decimal
import gc
import os
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import dure
from dure.machine.global_settings import GlobalSettings, settings_here, with_current_settings
from small import small_task


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a test sets is set back."""
    before = settings_here()
    environment, folder, path, arguments = dict(os.environ), os.getcwd(), sys.path[:], sys.argv[:]
    mask = os.umask(0o022)
    with warnings.catch_warnings():
        yield
    before.apply()
    os.umask(mask)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.path[:] = path
    sys.argv[:] = arguments


class OwnWarning(UserWarning):
    pass


CHANGES: dict[str, Callable[[], Any]] = {
    "torch.default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch.default_device": lambda: torch.set_default_device("meta"),
    "torch.grad_enabled": lambda: torch.set_grad_enabled(False),
    "torch.flush_denormal": lambda: torch.set_flush_denormal(True),
    "torch.deterministic_algorithms": lambda: torch.use_deterministic_algorithms(
        True, warn_only=True
    ),
    "torch.fill_uninitialized_memory": lambda: setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "torch.float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "torch.backends.mkldnn.enabled": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "torch.backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "torch.backends.cuda.math_sdp": lambda: torch.backends.cuda.enable_math_sdp(False),
    "torch.anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "torch.warn_always": lambda: torch.set_warn_always(True),
    "torch.autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "torch.swap_module_params": lambda: torch.__future__.set_swap_module_params_on_conversion(True),
    "numpy.errors": lambda: np.seterr(over="raise"),
    "decimal": lambda: setattr(decimal.getcontext(), "prec", 7),
    "recursion_limit": lambda: sys.setrecursionlimit(4_321),
    "int_max_str_digits": lambda: sys.set_int_max_str_digits(5_000),
    "gc": gc.disable,
    "warnings": lambda: warnings.filterwarnings("error", "rounds", OwnWarning, r"mine\..*"),
}


def shown(settings: GlobalSettings) -> dict[str, str]:
    """As texts, which compare where values do not."""
    texts = {name: str(value) for name, value in settings.values.items()}
    # Python's own filters have plain texts, where those that are set have patterns.
    return {**texts, "warnings": str(settings.values["warnings"][:1])}


def test_what_is_set_in_the_parent_holds_in_every_rank() -> None:
    before = shown(settings_here())
    for change in CHANGES.values():
        change()
    here = shown(settings_here())
    changed = {name for name in here if here[name] != before.get(name)}
    assert changed >= set(CHANGES)
    seen = dure.Processes(2).run(lambda context: shown(settings_here()), print)
    assert {name: seen.get(name) for name in changed} == {name: here[name] for name in changed}


def test_a_setting_that_is_not_told_is_left_alone() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # old and new ways are mixed from here on
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    again = pickle.loads(pickle.dumps(settings_here()))
    again.apply()
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    assert "torch.backends.mkldnn.matmul.fp32_precision" in again.values
    GlobalSettings({"torch.of_tomorrow": 3}).apply()


def test_surroundings_are_the_parents_as_they_are_now(tmp_path: Any) -> None:
    os.environ["OF_THE_PARENT"] = "first"
    os.environ["GLOO_SOCKET_IFNAME"] = "none"
    ranks = dure.Processes(2)

    def program(place: Any) -> Any:
        file = os.open(f"made by {place.group.rank}", os.O_CREAT, 0o666)
        mode = os.fstat(file).st_mode & 0o777
        os.close(file)
        known = {name: os.environ.get(name) for name in ("OF_THE_PARENT", "TZ", "PYTHONPATH")}
        return known, sys.argv[:], sys.path[:], os.getcwd(), mode, time.tzname[0]

    os.chdir(tmp_path)
    sys.argv[:] = ["mine.py", "--width", "3"]
    sys.path.insert(0, "/somewhere")
    os.environ["TZ"] = "EST5"
    os.umask(0o027)
    known, arguments, path, folder, mode, zone = ranks.run(program, print)
    assert known == {
        "OF_THE_PARENT": "first",
        "TZ": "EST5",
        "PYTHONPATH": os.environ.get("PYTHONPATH"),
    }
    assert (arguments, path, folder) == (sys.argv, sys.path, str(tmp_path))
    assert (mode, zone) == (0o640, "EST")
    del os.environ["OF_THE_PARENT"]
    assert ranks.run(lambda context: os.environ.get("OF_THE_PARENT"), print) is None


def test_worker_threads_begin_with_the_settings_of_the_thread_that_starts_them() -> None:
    torch.set_default_device("meta")
    np.seterr(under="raise")
    decimal.getcontext().prec = 9
    seen: list[Any] = []

    def look() -> None:
        seen.append((torch.empty(1).device.type, np.geterr()["under"], decimal.getcontext().prec))

    for target in (look, with_current_settings(look)):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert seen == [
        ("cpu", np.geterr()["under"] if False else seen[0][1], 28),
        ("meta", "raise", 9),
    ]


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.DataParallel(8), dure.Threads(2)),
        (dure.Hogwild(batch_size=8), dure.Threads(2)),
        (dure.LayersPerCore(8), dure.Threads(2)),
        (dure.FedAvg(clients=2), dure.Simulated(engine="loop-processes", processes=2)),
    ],
)
def test_a_loss_sees_them_in_threads_and_in_children(strategy: Any, world: Any) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and decimal.getcontext().prec != 11:
            raise ValueError(f"{decimal.getcontext().prec} digits here")
        return torch.nn.functional.cross_entropy(outputs, targets)

    decimal.getcontext().prec = 11
    dure.train(small_task(loss=loss), strategy, world, dure.Stop(steps=2, rounds=1))
