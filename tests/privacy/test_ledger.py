"""What is spent stays spent, whatever a run goes on from."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.errors import RunFolderError
from dure.privacy.accountant import Releases, epsilon
from dure.privacy.ledger import FILE, Ledger
from dure.privacy.step_count import FILE as STEPS
from dure.privacy.step_count import StepCount

ROUND = Releases(0.5, 1.0)


def test_what_was_charged_is_on_the_disk_at_once(tmp_path: Path) -> None:
    ledger = Ledger(1e-5, tmp_path)
    for number in (1, 2, 3):
        ledger.charge(number, ROUND)
        # Another process, while this one lives.
        assert len((tmp_path / FILE).read_text().splitlines()) == number
    again = Ledger(1e-5, tmp_path)
    assert again.spent == [Releases(0.5, 1.0, 3)]
    assert again.epsilon() == epsilon([Releases(0.5, 1.0, 3)], 1e-5)
    assert again.epsilon(ROUND) == epsilon([Releases(0.5, 1.0, 4)], 1e-5)


def test_a_run_that_goes_on_from_an_older_copy_finds_its_ledger_ahead(tmp_path: Path) -> None:
    ledger = Ledger(1e-5, tmp_path, repeats=True)
    ledger.charge(1, ROUND)
    early = ledger.state()
    ledger.charge(2, ROUND)
    ledger.charge(3, ROUND)
    ledger.close()
    again = Ledger(1e-5, tmp_path, repeats=True)
    again.restore(early)
    assert again.spent == [ROUND._replace(times=3)]
    # The same noise again tells nothing new.
    assert again.paid(2)
    again.charge(2, ROUND)
    assert again.spent == [ROUND._replace(times=3)]
    again.charge(4, ROUND)
    assert again.spent == [ROUND._replace(times=4)]


def test_noise_that_is_drawn_anew_is_paid_for_again(tmp_path: Path) -> None:
    ledger = Ledger(1e-5, tmp_path)
    ledger.charge(1, ROUND)
    assert not ledger.paid(1)
    with pytest.warns(UserWarning, match="round 1 is already in the ledger"):
        ledger.charge(1, ROUND)
    assert ledger.spent == [ROUND._replace(times=2)]


def test_who_removes_the_file_wins_nothing(tmp_path: Path) -> None:
    ledger = Ledger(1e-5, tmp_path)
    ledger.charge(1, ROUND)
    ledger.charge(2, ROUND)
    state = ledger.state()
    ledger.close()
    (tmp_path / FILE).unlink()
    again = Ledger(1e-5, tmp_path)
    again.restore(state)
    assert again.spent == [ROUND._replace(times=2)]
    assert len((tmp_path / FILE).read_text().splitlines()) == 2


def test_a_line_that_was_cut_off_was_never_charged(tmp_path: Path) -> None:
    ledger = Ledger(1e-5, tmp_path)
    ledger.charge(1, ROUND)
    ledger.close()
    path = tmp_path / FILE
    path.write_text(path.read_text() + '{"number": 2, "ra')
    assert Ledger(1e-5, tmp_path).spent == [ROUND]


LINE = {"number": 1, "rate": 0.5, "noise": 1.0, "times": 1}


@pytest.mark.parametrize(
    "line",
    [
        b"hello",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"more":' + b"[" * 100_000,
        *(
            json.dumps({**LINE, name: value}).encode()
            for name, value in [
                *[("rate", value) for value in (-1, 2.5, float("nan"), "x", None, 10**400)],
                *[("noise", value) for value in (-1, 10**400, [])],
                *[("times", value) for value in (-1, 10**30, 1.5)],
                *[("number", value) for value in (-1, 10**400, "1")],
                ("checksul", "00000000"),
            ]
        ),
    ],
    ids=lambda line: line[:60].decode(errors="replace"),
)
def test_a_file_that_is_no_ledger_is_refused_by_its_line(line: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(json.dumps(LINE).encode() + b"\n" + line + b"\n")
    with pytest.raises(RunFolderError, match="line 2"):
        Ledger(1e-5, tmp_path)


@given(place=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
def test_a_ledger_with_a_byte_changed_is_no_ledger_or_says_the_same(
    place: float, bits: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ledger = Ledger(1e-5, folder)
        for number in (1, 2, 3):
            ledger.charge(number, ROUND)
        ledger.close()
        lines = (folder / FILE).read_bytes()
        content = bytearray(lines)
        # Half a line at the end is what a kill leaves, and was never relied upon.
        content[int(place * (len(content) - 1))] ^= bits
        (folder / FILE).write_bytes(content)
        try:
            spent = Ledger(1e-5, folder).spent
        except RunFolderError as error:
            assert FILE in str(error)  # noqa: PT017 - or it says the same
        else:
            assert spent == [Releases(0.5, 1.0, 3)]


def test_a_ledger_of_an_older_dure_has_no_checksums_and_is_read(tmp_path: Path) -> None:
    line = {"number": 1, "rate": 0.5, "noise": 1.0, "times": 1}
    (tmp_path / FILE).write_text(json.dumps(line) + "\n")
    assert Ledger(1e-5, tmp_path).spent == [ROUND]


def test_a_count_of_steps_with_another_number_is_refused(tmp_path: Path) -> None:
    count = StepCount(tmp_path, 10)
    count.begin()
    file = tmp_path / STEPS
    file.write_text(file.read_text().replace("10", "11"))
    with pytest.raises(RunFolderError, match=STEPS):
        StepCount(tmp_path, 10)
