"""What a server is told of an error in a site's own code."""

from __future__ import annotations

from pathlib import Path

import pytest

from dure.deploy.client.failure import MOST_MESSAGE, failure_report
from dure.errors import WorkerFailedError
from dure.wire.requests import TrainingFailure, from_json, to_json

SOURCE = """\
def load(name):
    raise LookupError(f"no patient called {name}")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task" / "data").mkdir(parents=True)
    (tmp_path / "task" / "data" / "records.py").write_text(SOURCE)
    return tmp_path / "task"


def error_of(folder: Path) -> BaseException:
    """An error raised in a file of the task's."""
    path = folder / "data" / "records.py"
    names: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    try:
        names["load"]("Mary Smith")
    except LookupError as error:
        return error
    raise AssertionError


def test_type_file_and_line_travel_and_nothing_else(folder: Path) -> None:
    failed = failure_report(7, error_of(folder), share=False, folder=folder)
    assert failed == TrainingFailure(7, "LookupError", "data/records.py", 2)
    assert b"Mary" not in to_json(failed)
    assert str(folder).encode() not in to_json(failed)


def test_the_message_and_the_line_of_the_program_travel_where_they_are_shared(folder) -> None:
    failed = failure_report(7, error_of(folder), share=True, folder=folder)
    assert "no patient called Mary Smith" in failed.message
    assert 'raise LookupError(f"no patient called {name}")' in failed.message


def test_no_folder_but_the_tasks_is_named(folder: Path, tmp_path: Path) -> None:
    for elsewhere in (None, tmp_path / "other"):
        failed = failure_report(7, error_of(folder), share=False, folder=elsewhere)
        assert (failed.file, failed.line) == ("records.py", 2)


def test_the_place_is_the_sites_own_where_a_library_raised(folder: Path) -> None:
    path = folder / "model.py"
    path.write_text("import json\n\n\ndef forward():\n    return json.loads('{')\n")
    names: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(ValueError) as raised:  # noqa: PT011, the place matters
        names["forward"]()
    failed = failure_report(7, raised.value, share=False, folder=folder)
    assert (failed.kind, failed.file, failed.line) == ("JSONDecodeError", "model.py", 5)


def test_the_error_is_the_sites_own_and_not_what_was_put_around_it(folder: Path) -> None:
    around = WorkerFailedError("client 3", "round 2", "LookupError: no patient called Mary Smith")
    around.__cause__ = error_of(folder)
    assert failure_report(7, around, share=False, folder=folder).kind == "LookupError"


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert failure_report(7, ValueError("x"), share=False) == TrainingFailure(7, "ValueError")


def test_a_message_has_an_end_and_may_raise_itself() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError

    failed = failure_report(7, MuteError(), share=True)
    assert failed.message == "(its text cannot be printed: ValueError)"
    failed = failure_report(7, ValueError("x" * 10**7), share=True)
    assert len(failed.message) == MOST_MESSAGE
    assert from_json(to_json(failed), TrainingFailure) == failed
