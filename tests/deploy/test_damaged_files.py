"""A byte of any file of a served run has changed: whoever reads the file says so by its name, or
comes to the same bits. Nobody comes to other bits in silence."""

from __future__ import annotations

import functools
import shutil
import signal
import sqlite3
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from federation import Federation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dure
from dure.deploy import world
from dure.deploy.server.model_digests import ModelDigests, Of, _lines_in, _written
from dure.errors import DamagedUpdateError, DureError, LineageError, RunFolderError
from dure.record.run import RunFolder
from dure.record.settings import with_sums
from dure.report.read import read_run
from dure.run.lineage import verify
from dure.run.replay import replay
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

        run = Federation(2, copied).run(
            self.ended, ROUNDS, checkpoint_every, held_out=0.0, record=True
        )
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


def flip(file: Path, place: float, bits: int = 1) -> None:
    """place: of the byte, as a share of the file."""
    content = bytearray(file.read_bytes())
    if content:
        content[int(place * len(content))] ^= bits
    file.write_bytes(content)


def cut(file: Path, place: float) -> None:
    file.write_bytes(file.read_bytes()[: int(place * file.stat().st_size)])


def empty(file: Path, place: float) -> None:
    file.write_bytes(b"")


def add(file: Path, place: float) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def remove(file: Path, place: float) -> None:
    file.unlink()


Damage = Callable[[Path, float], None]
flips = st.integers(1, 255).map(lambda bits: functools.partial(flip, bits=bits))
damages = st.one_of(flips, st.sampled_from([cut, empty, add, remove]))


@contextmanager
def damaged(folder: Path, name: str, place: float, damage: Damage) -> Iterator[Path]:
    """A copy of which one file is not what it was."""
    with tempfile.TemporaryDirectory() as where:
        copy = Path(shutil.copytree(folder, Path(where) / "run"))
        damage(copy / name, place)
        yield copy


DAMAGE = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
places = st.floats(0, 1, exclude_max=True)


def test_a_killed_server_goes_on_with_the_same_bits_from_a_copy(
    served: Served, tmp_path: Path
) -> None:
    shutil.copytree(served.killed, tmp_path / "run")
    assert same(go_on(tmp_path / "run"), served.weights)


def outcome(work: Callable[[], object], name: str) -> str:
    """What comes of it: "refused" or "warned" where the file is named, else what `work` gives."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = str(work())
        except (DureError, ValueError) as error:
            return "refused" if told(name, [str(error)]) else f"not by its name: {error}"
    return "warned" if told(name, [str(one.message) for one in warned]) else found


FINE = ("refused", "warned", "True")


def told(name: str, said: list[str]) -> bool:
    """Whether somebody has said which file, or which checkpoint, it is."""
    return any(Path(name).name in one or Path(name).parts[0] in one for one in said)


@DAMAGE
@given(data=st.data(), place=places, damage=damages)
def test_a_server_that_goes_on_names_a_damaged_file_or_makes_the_same_bits(
    served: Served, data: st.DataObject, place: float, damage: Damage
) -> None:
    name = data.draw(st.sampled_from(served.files(served.killed)))
    with damaged(served.killed, name, place, damage) as folder:
        assert outcome(lambda: same(go_on(folder), served.weights), name) in FINE


@DAMAGE
@given(data=st.data(), place=places, damage=damages)
def test_a_replay_names_a_damaged_file_or_comes_to_the_same_bits(
    served: Served, data: st.DataObject, place: float, damage: Damage
) -> None:
    name = data.draw(st.sampled_from(served.files(served.ended)))
    with damaged(served.ended, name, place, damage) as folder, within(30.0):
        found = outcome(lambda: replay(folder, task=small_task()).same, name)
    assert found in FINE


@DAMAGE
@given(data=st.data(), place=places, damage=damages)
def test_a_backup_names_a_damaged_file_or_is_one_of_the_same_bits(
    served: Served, data: st.DataObject, place: float, damage: Damage
) -> None:
    name = data.draw(st.sampled_from([*served.files(served.killed)]))
    with damaged(served.killed, name, place, damage) as folder:
        copy = folder.with_name("copy")
        found = outcome(lambda: dure.backup(folder, copy), name)
        if found == "refused":
            assert not copy.exists() or not any(copy.iterdir())
            return
        # What a copy does not need, resuming may miss.
        assert outcome(lambda: same(go_on(copy), served.weights), name) in FINE


def swapped(folder: Path) -> None:
    one, other = (folder / "updates" / f"{ticket}.safetensors" for ticket in (8, 9))
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


def unsigned_config(folder: Path) -> None:
    """Somebody changes what was asked, and the checksums with it."""
    config = RunFolder(folder).config()
    config["strategy"]["local_epochs"] = 9
    RunFolder(folder).write_json("config.json", with_sums(config))


@pytest.mark.parametrize("how", ["a byte", "garbage", "missing", "exchanged"])
@pytest.mark.parametrize("use", [go_on, lambda run: replay(run, task=small_task())])
def test_a_damaged_update_ends_it_with_file_round_and_client(
    served: Served, tmp_path: Path, how: str, use: Callable[[Path], object]
) -> None:
    run = Path(shutil.copytree(served.killed, tmp_path / "run"))
    file = run / "updates" / "8.safetensors"
    if how == "a byte":
        flip(file, 0.99)
    elif how == "garbage":
        file.write_bytes(b"garbage")
    elif how == "missing":
        file.unlink()
    else:
        swapped(run)
    said = r"updates/[89]\.safetensors.*: .*update of client \d \('c\d'\) in round 5.*restore"
    with pytest.raises(DamagedUpdateError, match=said) as caught:
        use(run)
    assert caught.value.exit_code == 1


def test_a_journal_that_has_lost_its_end_is_named(served: Served, tmp_path: Path) -> None:
    run = Path(shutil.copytree(served.killed, tmp_path / "run"))
    with closing(sqlite3.connect(run / "journal.db")) as journal, journal:
        # Those of the two last rounds.
        journal.execute(
            "DELETE FROM events WHERE seq >= (SELECT max(seq) FROM events WHERE ticket = 6)"
        )
    # The checkpoint is of a later row, where there is one.
    said = r"journal\.db (is damaged: it ends at model|ends with row)"
    with pytest.raises(RunFolderError, match=said):
        go_on(run)


@pytest.mark.parametrize("name", ["journal.db", "clients.db", "cohort.json"])
def test_a_file_without_which_nothing_was_written_is_missed(
    served: Served, tmp_path: Path, name: str
) -> None:
    run = Path(shutil.copytree(served.killed, tmp_path / "run"))
    (run / name).unlink()
    if name == "cohort.json" and not (run / "checkpoint").exists():
        # Its journal has it, from the beginning.
        assert same(go_on(run), served.weights)
        return
    with pytest.raises(RunFolderError, match=rf"{name}.* is missing"):
        go_on(run)


def test_files_that_are_not_the_run_s_are_left_alone(served: Served, tmp_path: Path) -> None:
    run = Path(shutil.copytree(served.killed, tmp_path / "run"))
    for name in ("notes.txt", "updates/7.safetensors.bak", "updates/mine", "once-more"):
        (run / name).write_text("mine")
    shutil.copy(run / "updates" / "1.safetensors", run / "updates" / "977.safetensors")
    assert same(go_on(run), served.weights)


def test_a_replay_compares_the_model_of_every_round(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replay(served.ended, task=small_task())
    assert (found.same, found.compared, found.ended) == (True, ROUNDS + 1, True)
    note = ModelDigests.note

    def other(self: ModelDigests, model: int, of: Of, sha256: str) -> None:
        note(self, model, of, "0" * 64 if model == 3 else sha256)

    monkeypatch.setattr(ModelDigests, "note", other)
    with pytest.warns(UserWarning, match="model 3 has other bits"):
        again = replay(served.ended, task=small_task())
    assert (again.same, again.differ) == (False, (3,))


def test_a_server_that_goes_on_with_other_bits_says_so(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(served.killed, tmp_path / "run"))
    monkeypatch.setattr(ModelDigests, "sha256", lambda self: None)
    file = run / "models.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    changed = msgspec.structs.replace(_lines_in(lines[-1], file)[0], sha256="0" * 64)
    file.write_bytes(b"".join([*lines[:-1], _written(changed)]))
    with (
        pytest.warns(UserWarning, match="has other bits than the model whose digest"),
        within(30.0),
    ):
        ended = dure.resume(run, task=small_task())
    (facts,) = ended.summary["facts"]
    assert facts["bits"] == "close"
    assert "with other bits" in facts["differs"][-1]


@pytest.mark.parametrize("name", ["config.json", "summary.json", "models.jsonl"])
def test_what_was_signed_of_a_run_is_verified(served: Served, tmp_path: Path, name: str) -> None:
    assert verify(served.ended).compared == ("config.json", "summary.json", "models.jsonl")
    run = Path(shutil.copytree(served.ended, tmp_path / "run"))
    if name == "config.json":
        unsigned_config(run)
    elif name == "summary.json":
        summary = RunFolder(run).read_json(name)
        summary["lineage"]["rounds"] = 99
        RunFolder(run).write_json(name, summary)
    else:
        (run / name).write_bytes(b"".join((run / name).read_bytes().splitlines(True)[:-1]))
    with pytest.raises(LineageError, match=f"{name} differs from the signed version"):
        verify(run)
    with pytest.raises(LineageError, match=f"{name} differs from the signed version"):
        replay(run, task=small_task())


def test_a_config_that_was_signed_otherwise_is_marked(served: Served, tmp_path: Path) -> None:
    run = Path(shutil.copytree(served.ended, tmp_path / "run"))
    assert not read_run(run).notes
    unsigned_config(run)
    assert "config.json differs from the signed version" in " ".join(read_run(run).notes)
    (run / "model.lineage.json").unlink()
    assert "this run is not signed" in " ".join(read_run(run).notes)


def test_a_run_that_goes_on_is_not_signed_any_more(served: Served, tmp_path: Path) -> None:
    run = Path(shutil.copytree(served.killed, tmp_path / "run"))
    shutil.copy(served.ended / "model.lineage.json", run)
    go_on(run)
    # It was signed anew, at its end.
    assert verify(run).lineage["rounds"] == ROUNDS
