"""A folder from somebody else leads no command to another file, and no command waits for it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dure
from dure.cli.main import main
from dure.errors import DureError, RunFolderError
from dure.record.untrusted_files import UnfitFileError, check_links, contents, opened, pinned
from dure.report.live.state import PageStates
from small import small_task

SECRET = "a-secret-of-the-reader"
SECONDS = 20

Trick = Callable[[Path, Path], None]


def _hard_link(path: Path, secret: Path) -> None:
    os.link(secret, path)


TRICKS: dict[str, Trick] = {
    "a link": lambda path, secret: path.symlink_to(secret),
    "a hard link": _hard_link,
    "a pipe": lambda path, secret: os.mkfifo(path),
    "a device": lambda path, secret: path.symlink_to("/dev/zero"),
    "a folder": lambda path, secret: path.mkdir(),
    "not contain a JSON": lambda path, secret: path.write_text(f"{SECRET} [") and None,
}

COMMANDS: dict[str, list[str]] = {
    "show": ["show", "RUN"],
    "list": ["list", "RUN"],
    "report": ["report", "RUN", "--out", "OUT/report.html"],
    "verify": ["verify", "RUN"],
    "predict": ["predict", "RUN", "test:0"],
    "resume": ["train", "--resume", "RUN", "--quiet"],
    "serve": ["serve", "--resume", "RUN", "--quiet"],
    "backup": ["backup", "RUN", "OUT/copy"],
    "replay": ["replay", "RUN"],
    "audit": ["audit", "RUN"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    strategy = dure.FedAvg(clients=2)
    dure.train(small_task(), strategy, stop=dure.Stop(rounds=2), out=folder, checkpoint_every=1)
    return folder


@contextmanager
def in_time() -> Iterator[None]:
    """Raises TimeoutError inside, where something waits for ever."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it still waits after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def tricked(run: Path, name: str, trick: str, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run in which a file is something else."""
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (tmp_path / "out").mkdir()
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    path = copy / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    TRICKS[trick](path, secret)
    yield copy
    assert secret.read_text() == f"{SECRET}\n", "the reader's file was written to"


NAMES = [
    "config.json",
    "summary.json",
    "history.jsonl",
    "trace.json",
    "now.json",
    "audit.json",
    "comparison.json",
    "model.safetensors",
    "model.lineage.json",
    "journal.db",
    "journal.db-wal",
    "clients.db",
    "privacy.jsonl",
    "updates/0.safetensors",
    "checkpoint/00000002/state.json",
    "checkpoint/00000002/model.safetensors",
]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(NAMES),
    trick=st.sampled_from(sorted(TRICKS)),
    command=st.sampled_from(sorted(COMMANDS)),
)
def test_no_command_hangs_or_quotes_what_a_file_leads_to(
    name: str,
    trick: str,
    command: str,
    run: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with tricked(run, name, trick, tmp_path) as folder, in_time():
        places = {"RUN": str(folder), "OUT": str(tmp_path / "out")}
        words = [
            word.replace("RUN", places["RUN"]).replace("OUT", places["OUT"])
            for word in COMMANDS[command]
        ]
        main(words)
    shown = capfd.readouterr()
    written = [
        path.read_bytes().decode(errors="replace")
        for path in (tmp_path / "out").rglob("*")
        if path.is_file() and trick != "not contain a JSON"
    ]
    for text in (shown.out, shown.err, *written):
        assert SECRET not in text
        assert "Traceback" not in text


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NAMES), trick=st.sampled_from(sorted(TRICKS)))
def test_neither_python_nor_the_live_page_hangs_or_quotes(
    name: str, trick: str, run: Path, tmp_path: Path
) -> None:
    def reads(folder: Path) -> Iterator[Callable[[], object]]:
        yield lambda: dure.load_run(folder, small_task().model)
        yield lambda: dure.resume(folder, task=small_task(), stop=dure.Stop(rounds=3))
        yield lambda: dure.backup(folder, tmp_path / "out" / "copy")
        yield lambda: PageStates([folder], dict).newest().whole()

    with tricked(run, name, trick, tmp_path) as folder, in_time():
        for read in reads(folder):
            said = ""
            try:
                read()
            except (DureError, ValueError, TypeError) as error:
                said = str(error)
            assert SECRET not in said


@pytest.mark.parametrize("trick", sorted(TRICKS))
@pytest.mark.parametrize("name", ["kept.json", "key.pem", "policy.toml", "audit.jsonl"])
def test_a_clients_folder_from_somebody_else(name: str, trick: str, tmp_path: Path) -> None:
    from dure.deploy.client.audit_log import verify
    from dure.deploy.client.policy import Policy
    from dure.deploy.client.state import ClientState

    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    folder = tmp_path / "state"
    with ClientState(folder):
        pass
    path = folder / name
    path.unlink(missing_ok=True)
    TRICKS[trick](path, secret)

    def keys() -> object:
        with ClientState(folder) as state:
            return state.key

    with in_time():
        for read in (
            lambda: dure.personal_model(folder, small_task()),
            lambda: Policy.read(path),
            lambda: verify(path),
            keys,
        ):
            said = ""
            try:
                read()
            except (DureError, ValueError) as error:
                said = str(error)
            assert SECRET not in said
    assert secret.read_text() == SECRET


@pytest.mark.parametrize("trick", [name for name in TRICKS if name != "not contain a JSON"])
def test_one_function_opens_what_is_a_file_of_the_folder_alone(trick: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    folder = tmp_path / "folder"
    folder.mkdir()
    TRICKS[trick](folder / "file", secret)
    with in_time():
        for read in (opened, contents, lambda path: pinned(path).__enter__()):
            with pytest.raises(OSError, match="file"):
                read(folder / "file")
        if trick != "a folder":
            with pytest.raises(RunFolderError, match=r"folder/file"):
                check_links(folder)


def test_a_folder_on_the_way_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text(SECRET)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "in").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnfitFileError):
        opened(folder / "in" / "file", folder)
    with pytest.raises(UnfitFileError, match="outside"):
        opened(folder / ".." / "elsewhere" / "file", folder)
    with pytest.raises(RunFolderError, match="is a link"):
        check_links(folder)
    # The folder itself was named by the reader.
    with opened(folder / "in" / "file") as file:
        assert file.read() == SECRET.encode()


def test_a_file_is_as_long_as_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnfitFileError, match="more than 10 bytes"):
        contents(path, most=10)
    with pytest.raises(UnfitFileError, match="more than"):
        contents(path)


def test_names_that_a_killed_process_has_left_in_the_folder_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "signing.key").write_text("key")
    os.link(tmp_path / "signing.key", tmp_path / ".signing.key.17.4")
    check_links(tmp_path)
    with suppress(OSError):
        os.link(tmp_path / "signing.key", tmp_path.parent / "outside")
        with pytest.raises(RunFolderError, match="hard link"):
            check_links(tmp_path)


def test_weights_of_a_cache_may_be_links(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from dure.memory.weight_files import stored_in

    save_file(dict(small_task().model().state_dict()), tmp_path / "blob")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob")
    assert stored_in(tmp_path / "snapshot")
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "model.safetensors")
    with in_time(), pytest.raises(DureError):
        stored_in(tmp_path / "pipes" / "model.safetensors")
