"""Models of transformers 4.57 are divided as those of the current version are, and its trainers
are clients.

Not among the tests of trainers are those that compare losses of causal models: this version divides
them by the number of all labels, and not of those that are predicted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

FOUR = (
    *("transformers==4.57.6", "huggingface-hub==0.36.2", "tokenizers==0.22.2"),
    *("accelerate==1.12.0", "datasets==4.4.1", "peft==0.18.0"),
    *("httpx==0.28.1", "httpcore==1.0.9", "sniffio==1.3.1"),
)
"""Installed without what else they need, which this environment has."""

TRAINERS = "tests/trainers/test_hugging_face.py::test_"

TESTS = (
    "tests/parallel/pipeline/test_pipeline_models.py::test_language_models_of_hugging_face",
    "tests/parallel/tensor/test_tensor_hugging_face.py",
    "tests/parallel/mesh/test_mesh_strategy.py::test_a_language_model_of_hugging_face_on_meshes",
    "tests/contracts/test_weights_from.py",
    *(
        TRAINERS + name
        for name in (
            "dropout_is_drawn_as_by_fed_avg",
            "a_patched_trainer_has_the_bits_of_the_simulation",
            "with_reset_counters_schedule_and_checkpoints_are_the_rounds",
            "with_keep_counters_and_schedule_go_on",
            "one_client_that_keeps_its_state_is_the_trainer_alone",
            "of_a_model_with_adapters_the_adapters_travel",
            "a_killed_client_goes_on_with_its_round",
            "metrics_are_those_of_compute_metrics",
        )
    ),
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment of its own, behind whose packages are those of this one."""
    folder = tmp_path_factory.mktemp("four") / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", "--quiet", "--no-input", "--no-deps", *FOUR],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        pytest.skip(f"pip cannot install {FOUR[0]} here: {said}")
    (packages,) = folder.glob("lib/python*/site-packages")
    here = sysconfig.get_path("purelib")
    (packages / "behind.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    return python


def test_models_of_the_version_before_are_divided_too(environment: Path) -> None:
    said = "import transformers; print(transformers.__version__)"
    version = subprocess.run([environment, "-c", said], capture_output=True, text=True, check=True)
    assert version.stdout.strip() == FOUR[0].partition("==")[2]
    done = subprocess.run(
        [environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )
    assert done.returncode == 0, done.stdout[-4000:]
