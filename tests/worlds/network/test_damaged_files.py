"""A byte of any file of a served run has changed: whoever reads the file says so by its name, or
comes to the same bits. Nobody comes to other bits in silence."""

from __future__ import annotations

import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Federation
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import dure
from dure.errors import DamagedUpdateError, DureError, LineageError, RunFolderError
from dure.run.lineage import verify
from dure.run.replay import Replayed, replay
from dure.worlds.network import world
from small import small_task

ROUNDS = 5

Weights = dict[str, torch.Tensor]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Nothing in it may wait longer: a server whose journal lacks a row would wait for clients."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"it waits after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Served:
    """A recorded run: its folder at the end, and as a kill would leave it just before."""

    def __init__(self, folder: Path, checkpoint_every: int | None) -> None:
        self.ended = folder / "ended"
        self.killed = folder / "killed"

        def copied(one: Federation, event: dict[str, Any]) -> None:
            if event.get("step") == ROUNDS and not self.killed.exists():
                dure.backup(self.ended, self.killed)

        run = Federation(2, copied).run(self.ended, ROUNDS, checkpoint_every, record=True)
        self.weights = weights_of(run)

    def files(self, folder: Path) -> list[str]:
        return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


def weights_of(run: dure.Run) -> Weights:
    return {name: one.clone() for name, one in run.model.state_dict().items()}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module", params=[None, 2], ids=["no checkpoint", "a checkpoint"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"), request.param)


@pytest.fixture(autouse=True)
def nobody_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of the run have gone: nobody waits until they have heard of its end."""
    monkeypatch.setattr(world, "FAREWELL", 0.0)


def go_on(folder: Path) -> Weights:
    """What a server that goes on makes of a journal that has all updates: no client comes."""
    with within(30.0):
        return weights_of(dure.resume(folder, task=small_task()))


def flip(file: Path, place: float, bits: int) -> None:
    """place: of the byte, as a share of the file."""
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= bits
    file.write_bytes(content)


@contextmanager
def damaged(folder: Path, name: str, place: float, bits: int) -> Iterator[Path]:
    """A copy of which a byte has changed."""
    with tempfile.TemporaryDirectory() as where:
        copy = Path(shutil.copytree(folder, Path(where) / "run"))
        if (copy / name).stat().st_size:
            flip(copy / name, place, bits)
        yield copy


def told(name: str, error: BaseException, warned: list[warnings.WarningMessage]) -> bool:
    """Whether somebody has said which file, or which checkpoint, it is."""
    said = [str(error), *(str(one.message) for one in warned)]
    return any(Path(name).name in one or Path(name).parts[0] in one for one in said)


DAMAGE = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
places = st.floats(0, 1, exclude_max=True)
bits = st.integers(1, 255)


def test_a_killed_server_goes_on_with_the_same_bits_from_a_copy(
    served: Served, tmp_path: Path
) -> None:
    shutil.copytree(served.killed, tmp_path / "run")
    assert same(go_on(tmp_path / "run"), served.weights)


@DAMAGE
@given(data=st.data(), place=places, bits=bits)
def test_a_server_that_goes_on_names_a_changed_file_or_makes_the_same_bits(
    served: Served, data: st.DataObject, place: float, bits: int
) -> None:
    name = data.draw(st.sampled_from(served.files(served.killed)))
    with damaged(served.killed, name, place, bits) as folder:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                weights = go_on(folder)
            except (DureError, ValueError) as error:
                assert told(name, error, warned), f"{name}: {error}"
                return
        assert same(weights, served.weights) or told(name, ValueError(), warned), name


@DAMAGE
@given(data=st.data(), place=places, bits=bits)
def test_a_replay_names_a_changed_file_or_comes_to_what_was_so(
    served: Served, data: st.DataObject, place: float, bits: int
) -> None:
    name = data.draw(st.sampled_from(served.files(served.ended)))
    with damaged(served.ended, name, place, bits) as folder, within(30.0):
        try:
            found = replay(folder, task=small_task())
        except (DureError, ValueError) as error:
            assert told(name, error, []), f"{name}: {error}"
            return
        assert found.same
        assert found.compared == ROUNDS + 1
