"""What holds for every test: no process is left behind, and the fork server ends with the
session."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from dure.worlds.processes.fork_server import server
from process_tree import descendants, has_children
from proofs import PROOFS
from two_hosts import TwoHosts, two_hosts

# How long an example takes is the machine's business. Every run draws others, so half of the usual
# number will do.
settings.register_profile("dure", deadline=None, max_examples=50)
settings.load_profile("dure")
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # so does a shell start what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What runs leave on their machine is not to be left on this one: their temporary files neither. A
# worker of the tests has the folder of the process that has started it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where they always are
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="dure-tests-")
    atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)
os.environ["DURE_STATE_HOME"] = tempfile.mkdtemp(prefix="dure-state-")
atexit.register(shutil.rmtree, os.environ["DURE_STATE_HOME"], ignore_errors=True)
server.preload("pytest", "hypothesis")  # which ranks import that play a function of a test module
# The tensors here are tiny: a second thread only waits, on a busy machine for long.
torch.set_num_threads(int(os.environ.get("DURE_TESTS_THREADS", "1")))


@pytest.fixture
def accelerator() -> Iterator[str]:
    """The stand-in device: its name, while it is present."""
    stand_in_device = pytest.importorskip(
        "stand_in_device", reason="no C++ compiler: apt-get install g++", exc_type=ImportError
    )
    with stand_in_device.present():
        yield stand_in_device.NAME


SLOW = {
    "worlds",
    "parallel",
    "pipeline",
    "tensor",
    "devices",
    "test_federated_on_device.py",
    "test_split_on_device.py",
    "test_example_scripts.py",
    "test_resume.py",
    "test_snippets.py",
    "test_snippets_shell.py",
}
"""Files and folders that run first where no durations are known."""
DURATIONS = Path(__file__).parents[1] / ".durations.json"
"""Seconds of each test file in the last run of `make test`; the longest files run first in the
next run, so that at the end no worker waits long for another."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}

    def place(item: pytest.Item) -> tuple[float, bool]:
        seconds = known.get(item.path.relative_to(here).as_posix(), 0.0)
        return -seconds, SLOW.isdisjoint(item.path.parts)

    items.sort(key=place)
    for item in items:
        slow = PROOFS.get(item.path.relative_to(here).as_posix(), ())
        if item.name.startswith(slow):
            item.add_marker(pytest.mark.proof)
    if not torch.cuda.device_count():
        for item in items:
            if item.get_closest_marker("needs_cuda"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the seconds of each test file, if the whole suite has run."""
    config = session.config
    if not config.getoption("--keep-durations") or hasattr(config, "workerinput"):
        return
    seconds: Counter[str] = Counter()
    for reports in config.pluginmanager.get_plugin("terminalreporter").stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.fspath.removeprefix("tests/")] += report.duration
    rounded = {file: round(spent, 1) for file, spent in seconds.most_common()}
    DURATIONS.write_text(json.dumps(rounded, indent=1) + "\n")


def pytest_collection_finish() -> None:
    # Thousands of tests and all that they import are there until the end: the collector of garbage
    # need not look at them again and again.
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sequences", type=int, default=40, help="random schedules of collectives for each backend"
    )
    parser.addoption(
        "--keep-durations", action="store_true", help="write the seconds of each test file"
    )
    parser.addoption("--first-sequence", type=int, default=0, help="the seed of the first of them")


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    try:
        with two_hosts() as made:
            yield made
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Whatever the tests before have set: a sum by two threads has other bits."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fails a test that leaves a rank running; the fork server itself may stay."""
    yield
    until = time.monotonic() + 5
    while (left := _ranks_left()) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left, f"processes left behind: {left}"


def _ranks_left() -> set[int]:
    """What the fork server has forked and still lives, with all below it."""
    # All processes of the machine are looked through only where there is one to be found: after
    # each of thousands of tests it would take as long as many of them.
    if server.pid is None or not has_children(server.pid):
        return set()
    return descendants(server.pid)


@pytest.fixture(scope="session", autouse=True)
def fork_server_ends() -> Iterator[None]:
    yield
    server.stop()
