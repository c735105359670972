"""The study of a GPU says in a word that there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts import run_here

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "study_gpu.py"


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a CUDA device")
def test_without_a_gpu_it_is_skipped_with_a_word_and_keeps_what_is_there(tmp_path: Path) -> None:
    result = tmp_path / "study_gpu.json"
    result.write_text("as it was")
    assert run_here(SCRIPT, "--result", str(result)) == "skipped: there is no CUDA device here\n"
    assert result.read_text() == "as it was"
