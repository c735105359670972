"""`dure draw` on the command line."""

from __future__ import annotations

import io
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from dure.cli.drawing import SUBJECTS, _print_styled, usage
from dure.cli.main import main
from dure.drawing.options import PipelineDrawing
from dure.drawing.pipeline import pipeline_picture


def test_a_picture_is_printed_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", "pipeline", "--ranks", "2"]) == 0
    printed = capsys.readouterr()
    assert "rank 1 │" in printed.out
    out = tmp_path / "a.svg"
    assert main(["draw", "all-reduce", "one-shot", "--ranks", "3", "--out", str(out)]) == 0
    written = capsys.readouterr()
    assert written.out == ""
    assert str(out) in written.err.replace("\n", "")
    assert ElementTree.fromstring(out.read_text()).tag.endswith("svg")


def test_the_help_lists_subjects_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "--help"]) == 0
    assert capsys.readouterr().out == usage()
    assert all(f"  {name} " in usage() for name in SUBJECTS)
    for name in SUBJECTS:
        assert main(["draw", name, "--help"]) == 0
        assert "--out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a subject: pipeline"),
        (["pipelin"], "did you mean 'pipeline'"),
        (["pipeline", "gpipe"], "takes options alone, and no name 'gpipe'"),
        (["all-reduce"], "give one name of ring"),
        (["all-reduce", "ring", "tree"], "give one name of ring"),
        (["all-reduce", "rin"], "did you mean 'ring'"),
        (["all-reduce", "ring", "--hosts", "2"], "--hosts is for hierarchical alone"),
        (["pipeline", "--schedule"], "give at least one"),
        (["pipeline", "--stages-per-rank", "2"], "for the interleaved schedule alone"),
        (["pipeline", "--out", "a.png"], "use a name NAME.svg"),
        (["pipeline", "--ranks", "two"], "--ranks"),
        (["pipeline", "--out", "missing/a.svg"], "missing/a.svg"),
    ],
)
def test_a_wrong_value_gets_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["draw", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_terminal_shows_the_same_text_with_colours() -> None:
    picture = pipeline_picture(PipelineDrawing())
    plain = io.StringIO()
    _print_styled(Console(file=plain, width=200, highlight=False), picture.lines)
    assert plain.getvalue().splitlines() == [
        "".join(part.text for part in line) for line in picture.lines
    ]
    coloured = io.StringIO()
    _print_styled(
        Console(file=coloured, width=200, force_terminal=True, color_system="256"), picture.lines
    )
    assert "\x1b[" in coloured.getvalue()
