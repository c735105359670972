"""What a client keeps: across kills, outcomes said twice, damage, and beside other processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dure.deploy.client.state import ClientState, FolderOwner
from dure.errors import RunFolderWriteError, StateError
from dure.wire.requests import UploadRequest
from dure.wire.tensors import digest_of, forms_of, pieces, size_of
from forgetful import ForgetfulDisk

ABOUT = FolderOwner("https://server:8443", "run-1", 3, "north")


def memory_of(value: int) -> list[Tensor]:
    return [torch.full((2, 3), float(value), dtype=torch.float64), torch.tensor([value])]


def value_of(memory: list[Tensor] | None) -> int | None:
    """The inverse of `memory_of`; all of it has to be there."""
    if memory is None:
        return None
    value = int(memory[1])
    assert all(map(torch.equal, memory, memory_of(value)))
    assert len(memory) == 2
    return value


def model_of(value: int) -> dict[str, Tensor]:
    return {"w": torch.full((4,), float(value)), "empty": torch.empty(0, 2)}


def reserve_of(ticket: int, value: int) -> UploadRequest:
    tensors = model_of(value)
    size = size_of(forms_of(tensors))
    return UploadRequest(ticket, size, digest_of(tensors), 10, 20, 0.5)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@dataclass(frozen=True)
class Known:
    """What a client has to know, as plain values."""

    memory: int | None = None
    pending: dict[int, int | None] = field(default_factory=dict)
    updates: dict[int, int] = field(default_factory=dict)
    confirmations: frozenset[int] = frozenset()
    model: tuple[int, int] | None = None

    def after(self, what: str, ticket: int, value: int) -> Known:
        pending, updates = dict(self.pending), dict(self.updates)
        if what in ("keep_pending", "keep_nothing"):
            pending[ticket] = value if what == "keep_pending" else None
            return replace(self, pending=pending)
        if what == "keep_update":
            return replace(self, updates={**updates, ticket: value})
        if what in ("keep_model", "keep_download"):
            return replace(self, model=(ticket, value))
        if what == "confirmed":
            return replace(self, confirmations=self.confirmations - {ticket})
        was = pending.pop(ticket, None)
        updates.pop(ticket, None)
        return replace(
            self,
            memory=was if what == "count" and was is not None else self.memory,
            pending=pending,
            updates=updates,
            confirmations=self.confirmations | {ticket},
        )


def do(state: ClientState, what: str, ticket: int, value: int) -> None:
    if what == "keep_pending":
        state.keep_pending(ticket, memory_of(value))
    elif what == "keep_nothing":
        state.keep_pending(ticket, None)
    elif what == "keep_update":
        state.keep_update(reserve_of(ticket, value), model_of(value))
    elif what == "keep_model":
        state.keep_model(ticket, model_of(value))
    elif what == "keep_download":
        digest = digest_of(model_of(value))
        state.download(digest).write_bytes(b"".join(pieces(model_of(value))))
        state.keep_download(ticket, digest)
    elif what == "confirmed":
        state.confirmed([ticket])
    else:
        state.settle(ticket, kept=what == "count")


def pending_memory(state: ClientState, ticket: int) -> list[Tensor] | None:
    """Shows only once it is valid; here without making it so."""
    file = state._kept.pending[ticket]
    return None if file is None else list(state._tensors(file).values())


def known(state: ClientState) -> Known:
    updates = {}
    for reserve in state.updates():
        content = state.update(reserve.ticket).read_bytes()
        (updates[reserve.ticket],) = [
            value for value in VALUES if content == b"".join(pieces(model_of(value)))
        ]
    model = state.model()
    if model is not None:
        value = int(model[1]["w"][0])
        assert digest_of(model[1]) == digest_of(model_of(value))
        model = (model[0], value)
    return Known(
        value_of(state.memory()),
        {ticket: value_of(pending_memory(state, ticket)) for ticket in state.pending()},
        updates,
        frozenset(state.confirmations()),
        model,
    )


VALUES = range(3)
DEEDS = ["keep_pending", "keep_nothing", "keep_update", "keep_model", "keep_download"]
DEEDS += ["confirmed", "count", "drop"]
STEPS = st.lists(
    st.tuples(st.sampled_from(DEEDS), st.integers(0, 1), st.sampled_from(VALUES)), max_size=8
)


class Killed(BaseException):
    """The process is gone."""


class Disk:
    """Kills at the n-th change of a file, before or after it has happened."""

    def __init__(self, at: int, after: bool) -> None:
        self.left, self.after = at, after

    def patched(self, name: str) -> mock._patch:
        plain = getattr(os, name)

        def call(*given: object, **named: object) -> object:
            self.left -= 1
            if self.left == 0 and not self.after:
                raise Killed
            answer = plain(*given, **named)
            # What is dead does nothing more.
            if self.left <= 0:
                raise Killed
            return answer

        return mock.patch.object(os, name, call)


def prepared(folder: Path, steps: list[tuple]) -> Known:
    """What a client knows after these steps."""
    wanted = Known()
    with ClientState(folder) as state:
        for step in steps:
            do(state, *step)
            wanted = wanted.after(*step)
    return wanted


@given(STEPS)
def test_what_was_kept_is_there_whenever_the_folder_is_opened(steps) -> None:
    with TemporaryDirectory() as place:
        wanted = Known()
        for step in steps:
            with ClientState(Path(place)) as state:
                do(state, *step)
                wanted = wanted.after(*step)
                assert known(state) == wanted
            with ClientState(Path(place)) as state:
                assert known(state) == wanted


def killed_at(folder: Path, step: tuple, at: int, after: bool) -> bool:
    """Does the step and is killed at a change of a file. False if there are not so many."""
    disk = Disk(at, after)
    with (
        ClientState(folder) as state,
        disk.patched("replace"),
        disk.patched("fsync"),
        disk.patched("unlink"),
    ):
        try:
            do(state, *step)
        except Killed:
            return True
    return False


@given(STEPS.filter(bool), st.booleans())
def test_a_kill_leaves_the_state_before_or_after(steps, after) -> None:
    with TemporaryDirectory() as place:
        wanted = prepared(Path(place) / "before", steps[:-1])
        then = wanted.after(*steps[-1])
        for at in count(1):
            folder = Path(shutil.copytree(Path(place) / "before", Path(place) / str(at)))
            killed = killed_at(folder, steps[-1], at, after)
            with ClientState(folder) as state:
                assert known(state) in ([wanted, then] if killed else [then])
                assert not [name for name in names_in(folder) if name.startswith(".")]
                # Said again, nothing is missing and nothing happens twice.
                do(state, *steps[-1])
                assert known(state) == then
            if not killed:
                break


@settings(max_examples=40)
@given(STEPS.filter(bool), st.randoms(use_true_random=False))
def test_a_power_failure_leaves_the_state_before_or_after(steps, random) -> None:
    with TemporaryDirectory() as place:
        wanted = prepared(Path(place) / "before", steps[:-1])
        then = wanted.after(*steps[-1])
        for at in count(1):
            folder = Path(shutil.copytree(Path(place) / "before", Path(place) / str(at)))
            with ForgetfulDisk(folder) as forgetful:
                killed = killed_at(folder, steps[-1], at, after=False)
            forgetful.fail(random)
            with ClientState(folder) as state:
                assert known(state) in ([wanted, then] if killed else [then])
            if not killed:
                break


def test_nothing_is_left_of_what_does_not_count(tmp_path: Path) -> None:
    with ClientState(tmp_path) as state:
        for round in range(4):
            state.keep_model(round, model_of(round))
            state.keep_pending(round, memory_of(round))
            state.keep_update(reserve_of(round, round), model_of(round))
            state.settle(round, kept=round % 2 == 0)
        tensors = {name.split("-")[0] for name in names_in(tmp_path) if name.endswith("tensors")}
        assert tensors == {"model", "memory"}
        assert len(names_in(tmp_path)) == len(tensors) + len(["lock", "kept.json"])


def live(place: Path, until: int) -> None:
    """A client that trains one round after another; what it has done stands on standard output."""
    with ClientState(place) as state:
        for ticket in range(until):
            state.keep_model(ticket, model_of(ticket % 3))
            state.keep_pending(ticket, memory_of(ticket % 3))
            state.keep_update(reserve_of(ticket, ticket % 3), model_of(ticket % 3))
            state.settle(ticket, kept=True)


def test_a_client_that_is_killed_finds_one_round_or_the_next(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        child = context.Process(target=live, args=(tmp_path, 1_000_000))
        child.start()
        assert child.pid is not None
        # Until it is in a later round than the first, however long that takes on a busy machine.
        while not [path for path in tmp_path.glob("model-*") if "model-0-" not in path.name]:
            assert child.is_alive()
            time.sleep(0.001)
        time.sleep(0.05)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        with ClientState(tmp_path) as state:
            found = known(state)
            assert found.model is not None
            newest = found.model[0]
            settled = max(found.confirmations)
            assert settled <= newest <= settled + 1
            assert found.memory == settled % 3
            assert set(found.pending) <= {newest}
            assert set(found.updates) <= set(found.pending)
            state.forget()


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with ClientState(tmp_path):
        with pytest.raises(StateError, match=rf"{tmp_path} is in use by another process"):
            ClientState(tmp_path)
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
    # A child that lives on does not keep it.
    ClientState(tmp_path).close()
    child.kill()
    child.join()


def test_the_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "clients" / "north"
    with ClientState(folder) as state:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert state.key.parent == folder
    folder.chmod(0o755)
    ClientState(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StateError, match=rf"{file} cannot be the folder of a client"):
        ClientState(file)


def test_without_a_folder_nothing_stays() -> None:
    with ClientState() as state:
        state.keep_pending(0, memory_of(1))
        state.settle(0, kept=True)
        assert value_of(state.memory()) == 1
        folder = state.folder
    assert not folder.exists()


def test_the_folder_of_another_client_or_run_is_refused(tmp_path: Path) -> None:
    with ClientState(tmp_path) as state:
        state.enter(ABOUT)
    others = [
        FolderOwner(ABOUT.url, "run-2", 3, "north"),
        FolderOwner(ABOUT.url, "run-1", 4, "north"),
        FolderOwner(ABOUT.url, "run-1", 3, "south"),
    ]
    with ClientState(tmp_path) as state:
        assert state.about == ABOUT
        for other in others:
            with pytest.raises(StateError, match=r"belongs to client 3 \(north\) of run run-1"):
                state.enter(other)
        moved = FolderOwner("https://elsewhere", "run-1", 3, "north")
        state.enter(moved)
    with ClientState(tmp_path) as state:
        assert state.about == moved


DAMAGED = {
    "kept.json": lambda _: None,
    "model-*": ClientState.model,
    "personal-*": ClientState.personal,
    "memory-*": ClientState.memory,
    "update-*": lambda state: state.update(1),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("how", ["a bit", "the end", "gone", "more"])
def test_what_is_damaged_is_named(tmp_path: Path, name: str, how: str) -> None:
    with ClientState(tmp_path) as state:
        state.enter(ABOUT)
        state.keep_model(7, model_of(1))
        state.keep_personal(model_of(2))
        state.keep_pending(0, memory_of(1))
        state.settle(0, kept=True)
        state.keep_update(reserve_of(1, 2), model_of(2))
    (path,) = tmp_path.glob(name)
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    else:
        content[len(content) * 3 // 4] ^= 1
        changed = {"a bit": bytes(content), "the end": content[:-1], "more": content + b"\0"}
        path.write_bytes(changed[how])
    with pytest.raises(StateError, match=rf"{path} is damaged"), ClientState(tmp_path) as state:
        DAMAGED[name](state)


def kept_in(folder: Path) -> list[str]:
    """All that a state holds, as digests and values."""
    with ClientState(folder) as state:
        memory = state.memory()
        model, personal = state.model(), state.personal()
        assert memory is not None
        assert model is not None
        assert personal is not None
        return [
            repr((state.about, state.updates(), state.confirmations(), model[0])),
            *(digest_of(one) for one in (model[1], personal, state.frozen())),
            digest_of({str(place): one for place, one in enumerate(memory)}),
            state.update(1).name,
        ]


@given(data=st.data(), place=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
@settings(deadline=None, max_examples=60)
def test_a_byte_of_any_file_that_has_changed_is_named_or_changes_nothing(
    data: st.DataObject, place: float, bits: int
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        with ClientState(folder) as state:
            state.enter(ABOUT)
            state.keep_model(7, model_of(1))
            state.keep_frozen(model_of(3))
            state.keep_personal(model_of(2))
            state.keep_pending(0, memory_of(1))
            state.settle(0, kept=True)
            state.keep_update(reserve_of(1, 2), model_of(2))
        before = kept_in(folder)
        file = folder / data.draw(st.sampled_from(sorted(names_in(folder))))
        content = bytearray(file.read_bytes())
        if content:
            content[int(place * len(content))] ^= bits
        file.write_bytes(content)
        try:
            assert kept_in(folder) == before
        except StateError as error:
            assert file.name in str(error)  # noqa: PT017 - or it is as it was


def test_a_full_disk_leaves_what_was_kept(tmp_path: Path) -> None:
    with ClientState(tmp_path) as state:
        state.keep_pending(0, memory_of(1))
        state.settle(0, kept=True)
        with (
            mock.patch("os.fsync", side_effect=OSError(28, "No space left on device")),
            pytest.raises(RunFolderWriteError, match="No space left on device"),
        ):
            state.keep_pending(1, memory_of(2))
        assert value_of(state.memory()) == 1
        assert state.pending() == []
        state.keep_pending(1, memory_of(2))
        state.settle(1, kept=True)
        assert value_of(state.memory()) == 2
        assert not [name for name in names_in(tmp_path) if name.startswith(".")]


def test_a_download_goes_on_after_a_restart_and_becomes_the_model(tmp_path: Path) -> None:
    content = b"".join(pieces(model_of(2)))
    digest = digest_of(model_of(2))
    with ClientState(tmp_path) as state:
        state.download(digest).write_bytes(content[:10])
        state.download("0" * 64).write_bytes(b"of before")
    with ClientState(tmp_path) as state:
        path = state.download(digest)
        assert path.read_bytes() == content[:10]
        path.write_bytes(content)
        state.keep_download(4, digest)
        assert not list(tmp_path.glob("download-*"))
    with ClientState(tmp_path) as state:
        state.keep_download(4, digest)
        found = state.model()
        assert found is not None
        assert (found[0], digest_of(found[1])) == (4, digest)
        file = state.model_file()
        assert file is not None
        assert file[:2] == (4, digest)
        assert file[2].read_bytes() == content


def test_a_download_that_is_something_else_is_no_model(tmp_path: Path) -> None:
    digest = digest_of(model_of(2))
    with ClientState(tmp_path) as state:
        state.download(digest).write_bytes(b"".join(pieces(model_of(1))))
        with pytest.raises(StateError, match=r"download-.* is damaged"):
            state.keep_download(4, digest)
        assert state.model() is None
        assert not state.download(digest).exists()


@pytest.mark.parametrize("digest", ["", "../about.json", "a" * 63, "A" * 64, "a" * 64 + "\n"])
def test_what_a_server_calls_a_digest_leads_to_no_other_file(tmp_path: Path, digest: str) -> None:
    with ClientState(tmp_path) as state, pytest.raises(ValueError, match="is not a SHA-256"):
        state.download(digest)


@pytest.mark.parametrize("run", ["", "../x", "a/b", ".", "a\0", "a" * 101, "a\n"])
def test_what_a_server_calls_its_run_leads_to_no_other_file(tmp_path: Path, run: str) -> None:
    with ClientState(tmp_path) as state, pytest.raises(StateError, match="is not a name of a run"):
        state.approve(run)


def test_an_update_is_kept_as_it_is_reserved_or_not_at_all(tmp_path: Path) -> None:
    with ClientState(tmp_path) as state:
        with pytest.raises(ValueError, match="these tensors have"):
            state.keep_update(reserve_of(1, 1), model_of(2))
        nan = msgspec.structs.replace(reserve_of(1, 1), loss=math.nan)
        with pytest.raises(ValueError, match="the body is not a valid UploadRequest"):
            state.keep_update(nan, model_of(1))
        assert state.updates() == []
        with pytest.raises(KeyError):
            state.update(1)
        assert not list(tmp_path.glob("update-*"))


def test_the_user_approves_one_run(tmp_path: Path) -> None:
    with ClientState(tmp_path) as state:
        assert not state.approved("run-1")
        state.approve("run-1")
        assert state.approved("run-1")
        assert not state.approved("run-2")
    (tmp_path / "approved-run-2").touch()
    with ClientState(tmp_path) as state:
        assert state.approved("run-2")


def test_what_is_forgotten_leaves_the_key_alone(tmp_path: Path) -> None:
    with ClientState(tmp_path) as state:
        state.enter(ABOUT)
        state.key.write_text("a key")
        state.keep_model(7, model_of(1))
        state.keep_personal(model_of(2))
        state.keep_pending(0, memory_of(1))
        state.settle(0, kept=True)
        state.keep_update(reserve_of(1, 2), model_of(2))
        state.approve("run-1")
        state.download("0" * 64).write_bytes(b"half")
        state.forget()
        assert names_in(tmp_path) == {"lock", "kept.json", "key.pem"}
        assert state.about is None
        assert known(state) == Known()
        state.enter(FolderOwner(ABOUT.url, "run-2", 0, "south"))
