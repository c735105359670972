"""The documentation builds, needs no network, and speaks of what there is."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dure import catalog
from dure.cli.main import _dispatch as dispatched
from dure.cli.main import main, usage
from dure.collectives.compression import COMPRESSIONS
from dure.data.partition import PARTITIONS
from dure.errors import DataError
from dure.federated.aggregate import AGGREGATORS
from dure.federated.engines.engine_choice import NAMES as ENGINES
from dure.federated.server.sampling import SELECTIONS
from dure.fleet.arrival import ARRIVALS
from dure.fleet.attacks import ATTACKS
from dure.fleet.availability import AVAILABILITIES
from dure.fleet.devices import DEVICES
from dure.split.leakage import DEFENCES
from page_blocks import PAGES
from scripts import run_here

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LOADED_FROM_ELSEWHERE = re.compile(
    r'<(?:script|img|iframe)[^>]+src="?(?:https?:)?//|<link[^>]+href="?(?:https?:)?//'
)

OPERANDS = {
    "watch": 1,
    "serve": 2,
    "join": 2,
    "verify": 1,
    "personalise": 2,
    "replay": 1,
    "backup": 0,
    "audit": 0,
    "predict": 2,
    "draw": 1,
}
"""What these commands name before their options, as far as the options depend on it."""


def commands(page: Path) -> Iterator[list[str]]:
    """The `dure …` commands in the fenced blocks of a page, without `dure`."""
    for language, body in FENCE.findall(page.read_text()):
        for line in body.splitlines():
            if language == "sh" and line.startswith("dure "):
                yield shlex.split(line, comments=True)[1:]


def test_the_pages_build_without_a_warning_and_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        found = LOADED_FROM_ELSEWHERE.search(page.read_text())
        assert found is None, f"{page.name}: {found and found[0]}"


@pytest.mark.parametrize("system", catalog.SYSTEMS)
def test_every_system_has_a_page(system: str) -> None:
    text = (DOCS / f"{system}.md").read_text()
    assert f"`{system}`" in text
    assert f"dure.{catalog.SYSTEMS[system].kind}(" in text


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("tasks.md", list(catalog.TASKS)),
        ("partitions.md", list(PARTITIONS)),
        ("compression.md", list(COMPRESSIONS)),
        ("federated.md", list(SELECTIONS)),
        ("simulation.md", [*DEVICES, *AVAILABILITIES, *ARRIVALS, "auto", *ENGINES]),
        ("aggregation.md", list(AGGREGATORS)),
        ("attacks.md", list(ATTACKS)),
        ("split-leakage.md", list(DEFENCES)),
        ("command-line.md", [*catalog.TASKS, *catalog.SYSTEMS, *catalog.WORLDS]),
    ],
)
def test_every_name_is_explained(page: str, names: list[str]) -> None:
    text = (DOCS / page).read_text()
    assert [name for name in names if not re.search(rf"`{name}[`:]", text)] == []


def test_every_world_is_explained() -> None:
    text = (DOCS / "getting-started.md").read_text()
    assert [world.kind for world in catalog.WORLDS.values() if f"`{world.kind}(" not in text] == []


def test_the_page_of_the_command_line_has_the_help_as_it_is() -> None:
    text = (DOCS / "command-line.md").read_text()
    assert f"<!-- dure --help -->\n```text\n{usage()}```" in text


def test_every_error_is_explained() -> None:
    import dure.errors

    text = (DOCS / "failures.md").read_text()
    names = [
        name
        for name, value in vars(dure.errors).items()
        if isinstance(value, type) and name != "DureError"
    ]
    assert [name for name in names if name.endswith("Error") and f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_name_what_there_is(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files_of(page)
    for command in commands(page):
        trains = command[0] in ("train", "compare", "sweep")
        # The next test parses their flags, but those behind a folder of data that is missing.
        if trains and "--data" in command and "--resume" not in command:
            first_flag = next(
                (i for i, word in enumerate(command) if word.startswith("-")), len(command)
            )
            flags = [
                word.partition("=")[0] for word in command[first_flag:] if word.startswith("--")
            ]
            at = command.index("--world") if "--world" in command else len(command)
            with contextlib.suppress(SystemExit):  # which flags there are depends on the world
                main([*command[:first_flag], *command[at : at + 2], "--help"])
            listed = capsys.readouterr().out
            assert "--seed" in listed, shlex.join(command)
            assert [flag for flag in flags if flag not in listed] == [], shlex.join(command)
        elif command[0] in ("bench", "certificates", "clients", "roster"):
            with contextlib.suppress(SystemExit):
                main([*command[:2], "--help"])
            listed = capsys.readouterr().out
            assert [
                word for word in command if word.startswith("--") and word not in listed
            ] == [], shlex.join(command)
        elif command[0] in OPERANDS:
            names = [word for word in command if not word.startswith("-")]
            named = names[: 1 + OPERANDS[command[0]]]
            if "--resume" in command:
                named = [command[0], "--resume", "RUN"]
            with contextlib.suppress(SystemExit):
                assert main([*named, "--help"]) == 0, shlex.join(command)
            listed = capsys.readouterr().out
            assert [
                word for word in command if word.startswith("--") and word not in listed
            ] == [], shlex.join(command)
        else:
            known = (
                "train",
                "compare",
                "sweep",
                "report",
                "list",
                "show",
                "systems",
                "--help",
                "--version",
            )
            assert command[0] in known, shlex.join(command)


class Asked(BaseException):
    """What a command asks for was understood: here nothing is trained."""


def asked(*given: Any, **how: Any) -> None:
    """In place of `dure.train`: what is checked before any work, but for the model."""
    task, strategy, world, stop = given
    # The noise for an epsilon is sought for seconds.
    if getattr(strategy, "epsilon", None) is None:
        strategy.check(task, world)
    stop.check(strategy.traits.unit)
    raise Asked


def compared(task: Any, entries: Sequence[Any], **how: Any) -> None:
    """In place of `dure.compare`, likewise."""
    for strategy, world, *own in entries:
        strategy.check(own[0] if own else task, world)
    raise Asked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_begin_to_train(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand there; where they name a folder of data, it is missing."""
    monkeypatch.chdir(tmp_path)
    for module in ("main", "comparing", "sweeping"):
        monkeypatch.setattr(f"dure.cli.{module}.start_fork_server", lambda: None)
    monkeypatch.setattr("dure.run.train.train", asked)
    monkeypatch.setattr("dure.run.compare.compare", compared)
    write_files_of(page)
    for command in commands(page):
        asks = {"--resume", "--help"} & set(command)
        if command[0] in ("train", "compare", "sweep") and not asks:
            with pytest.raises((Asked, DataError)) as caught:
                dispatched(command)
            if isinstance(caught.value, DataError):
                assert "--data" in command, shlex.join(command)


def write_files_of(page: Path) -> None:
    """The Python blocks of a page that say in their first line which file they are."""
    for language, body in FENCE.findall(page.read_text()):
        named = re.match(r"# (\w+\.py)\n", body)
        if language in ("python", "py") and named:
            Path(named[1]).write_text(body)


BENCHMARK = re.compile(r"(?:^|`)python (benchmarks/\w+\.py[^`\n]*)", re.MULTILINE)
COMMANDS_OF_BENCHMARKS = [
    (page.name, command) for page in PAGES for command in BENCHMARK.findall(page.read_text())
]


class Understood(BaseException):
    """A script has read its arguments: here nothing is measured."""


@pytest.mark.parametrize(("page", "command"), COMMANDS_OF_BENCHMARKS)
def test_the_command_of_a_benchmark_is_understood_and_empties_no_older_result(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands there, to the point at which it would begin to measure."""
    parse = argparse.ArgumentParser.parse_known_args

    def understood(parser: argparse.ArgumentParser, *given: Any, **how: Any) -> None:
        parse(parser, *given, **how)
        raise Understood

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", understood)
    # A shell empties the file that > names before the program begins; a backslash goes on.
    assert not {">", "\\"} & set(command)
    script, *words = shlex.split(command)
    with pytest.raises(Understood):
        run_here(ROOT / script, *words)
    assert list(tmp_path.iterdir()) == []


def test_benchmarks_say_nowhere_that_a_shell_is_to_write_their_result() -> None:
    scripts = sorted((ROOT / "benchmarks").glob("*.py"))
    assert [one.name for one in scripts if "> benchmarks/results" in one.read_text()] == []
