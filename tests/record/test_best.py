"""The best model's file: a byte that has changed is found before the model is used."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.errors import RunFolderError
from dure.record.best import BEFORE, BEST, best_weights, keep_best, restore_best
from dure.record.weights import weights_to_bytes

WEIGHTS = {"w": torch.arange(300.0), "b": torch.ones(3, dtype=torch.complex128)}


@given(place=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
def test_a_byte_that_has_changed_is_named_or_changes_no_weight(place: float, bits: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keep_best(folder, WEIGHTS, 3)
        content = bytearray((folder / BEST).read_bytes())
        content[int(place * len(content))] ^= bits
        (folder / BEST).write_bytes(content)
        try:
            found = best_weights(folder)
        except RunFolderError as error:
            named = str(error)
        else:
            # The name of the checksum itself, without which there is none.
            assert found is not None
            assert all(torch.equal(found[key], WEIGHTS[key]) for key in WEIGHTS)
            named = BEST
        assert BEST in named


def test_a_run_goes_back_to_no_damaged_model(tmp_path: Path) -> None:
    keep_best(tmp_path, WEIGHTS, 3)
    keep_best(tmp_path, WEIGHTS, 5)
    content = (tmp_path / BEFORE).read_bytes()
    (tmp_path / BEFORE).write_bytes(content[:-1] + b"!")
    with pytest.raises(RunFolderError, match=rf"{BEFORE} is damaged"):
        restore_best(tmp_path, 3)


def test_a_best_model_of_an_older_dure_has_no_checksum_and_is_read(tmp_path: Path) -> None:
    (tmp_path / BEST).write_bytes(weights_to_bytes(WEIGHTS, {"dure.step": "3"}))
    found = best_weights(tmp_path)
    assert found is not None
    assert torch.equal(found["w"], WEIGHTS["w"])
