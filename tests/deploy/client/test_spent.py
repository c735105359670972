"""What a client has helped to unmask is remembered: across kills, damage, and other runs."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_state import ABOUT, model_of, reserve_of

from dure.deploy.client import state as state_module
from dure.deploy.client.spent_models import RECORD, SPENT, SpentModelsFile
from dure.deploy.client.state import ClientState
from dure.errors import RunFolderWriteError, StateError

MODELS = [bytes([number]) * 32 for number in range(1, 6)]


def listed(folder: Path, fewest: int = 0) -> list[bytes]:
    file = SpentModelsFile(folder, fewest)
    return [model for model in MODELS if model in file]


@given(st.data())
def test_a_file_that_was_cut_anywhere_has_all_whole_records_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("spent")
    file = SpentModelsFile(folder, 0)
    for model in MODELS[:4]:
        file.add(model)
    whole = (folder / SPENT).read_bytes()
    assert len(whole) == 4 * RECORD
    length = data.draw(st.integers(0, len(whole)))
    # A power failure may leave a record of zeros, too.
    tail = data.draw(st.sampled_from([b"", bytes(RECORD), bytes(RECORD - 1)]))
    (folder / SPENT).write_bytes(whole[:length] + (tail if length % RECORD == 0 else b""))
    again = SpentModelsFile(folder, 0)
    assert [model for model in MODELS if model in again] == MODELS[: length // RECORD]
    again.add(MODELS[4])
    assert listed(folder) == [*MODELS[: length // RECORD], MODELS[4]]


def test_an_older_copy_of_the_list_beside_a_newer_index_is_refused(tmp_path: Path) -> None:
    with ClientState(tmp_path) as state:
        state.spend(MODELS[0], 1, b"q", b"a")
        older = (tmp_path / SPENT).read_bytes()
        state.spend(MODELS[1], 2, b"q", b"a")
    (tmp_path / SPENT).write_bytes(older)
    with pytest.raises(
        StateError, match=r"lists 1 models, but this client .* sums of 2: the list is an"
    ):
        ClientState(tmp_path)
    (tmp_path / SPENT).unlink()
    with pytest.raises(StateError, match="lists 0 models"):
        ClientState(tmp_path)


def test_a_damaged_record_in_the_middle_is_named(tmp_path: Path) -> None:
    file = SpentModelsFile(tmp_path, 0)
    for model in MODELS[:3]:
        file.add(model)
    content = bytearray((tmp_path / SPENT).read_bytes())
    content[RECORD + 3] ^= 1
    (tmp_path / SPENT).write_bytes(content)
    with pytest.raises(StateError, match="damaged in record 2: with a shorter list a server"):
        SpentModelsFile(tmp_path, 0)


def test_the_record_is_on_the_disk_before_anything_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ClientState(tmp_path) as state:
        state.keep_update(reserve_of(1, 7), model_of(7))

        def full(path: Path, kept: object) -> None:
            raise RunFolderWriteError(f"cannot write {path}")

        with monkeypatch.context() as patched:
            patched.setattr(state_module, "_write", full)
            with pytest.raises(RunFolderWriteError):
                state.spend(MODELS[0], 1, b"q", b"a")
        assert listed(tmp_path) == MODELS[:1]
        # Nothing was answered: with the next question the same is done again.
        assert state.answered(1, b"q") is None
        state.spend(MODELS[0], 1, b"q", b"a")
        assert listed(tmp_path) == MODELS[:1]
    with ClientState(tmp_path) as state:
        assert state.answered(1, b"q") == b"a"


def test_an_unmasked_update_is_deleted_and_its_answer_repeated_until_it_is_settled(
    tmp_path: Path,
) -> None:
    with ClientState(tmp_path) as state:
        state.enter(ABOUT)
        state.keep_update(reserve_of(1, 7), model_of(7))
        state.keep_update(reserve_of(2, 8), model_of(8))
        unmasked = state.update(1)
        state.spend(MODELS[0], 1, b"q", b"a")
        assert not unmasked.exists()
        assert [one.ticket for one in state.updates()] == [2]
    with ClientState(tmp_path) as state:
        assert state.answered(1, b"q") == b"a"
        assert state.answered(1, b"another question") is None
        assert state.answered(2, b"q") is None
        state.settle(1, kept=True)
        assert state.answered(1, b"q") is None
        assert state.is_spent(MODELS[0])


def test_the_list_survives_that_the_run_is_forgotten(tmp_path: Path) -> None:
    with ClientState(tmp_path) as state:
        state.enter(ABOUT)
        state.spend(MODELS[0], 1, b"q", b"a")
        state.forget()
        assert state.is_spent(MODELS[0])
    with ClientState(tmp_path) as state:
        assert state.about is None
        assert state.is_spent(MODELS[0])
        assert state.answered(1, b"q") is None


def test_the_list_grows_by_36_bytes_a_model_and_opens_soon(tmp_path: Path) -> None:
    models = torch.arange(100_000, dtype=torch.int64).repeat(4, 1).T.contiguous()
    content = models.numpy().view("u1").reshape(-1, 32)
    records = [bytes(one) + crc32(bytes(one)).to_bytes(4, "little") for one in content]
    (tmp_path / SPENT).write_bytes(b"".join(records))
    file = SpentModelsFile(tmp_path, 100_000)
    assert len(file) == 100_000
    file.add(MODELS[0])
    assert (tmp_path / SPENT).stat().st_size == 36 * 100_001


def test_others_do_not_read_the_list(tmp_path: Path) -> None:
    SpentModelsFile(tmp_path, 0).add(MODELS[0])
    assert (tmp_path / SPENT).stat().st_mode & 0o077 == 0
