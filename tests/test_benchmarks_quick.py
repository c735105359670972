"""Every script of benchmarks/ runs to its end, in its shortest form: proofs, one after another.

What is measured that way says nothing about speed. It shows that the script still calls the dure
that it is kept beside, and writes a result.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path

import pytest

from stand_ins import images, patients, plays

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MINUTES = 10

HELPERS = {"figures", "gpu_steps", "measured", "outcome", "pages", "rounds", "waiting"}
"""Modules that scripts import; they measure nothing."""

QUICK = {
    "accountant": "",
    "adapters": "--quick",
    "admm": "--data DATA/mnist --rounds 2 --rates 0.1 --rhos 0.1",
    "alignment": "--ids 20",
    "all_reduce": "--quick --ranks 2 --sizes 4K 64K 1M",
    "asynchronous": "--data DATA/mnist --quick --updates 20 --seeds 1",
    "averaging": "--data DATA/mnist --epochs 1 --rates 0.1 --workers 2",
    "byzantine": "--data DATA/mnist --quick",
    "communication": "--systems local-sgd --task digits --repeat 1 --quick",
    "compression": "--rounds 1 --epochs 1 --width 16",
    "convolution": "--rounds 1 --batch 2 --threads 1 --sweeps kernels",
    "data_larger_than_memory": "--limit 1 --times 0.1 --repeat 1 --steps 5 --models mlp",
    "data_parallel": "--rounds 2 --steps 2 --small",
    "deployment": "--quick",
    "deployment_fuzz": "--requests 200",
    "diloco_shakespeare": (
        "--data DATA/shakespeare/plays.txt --steps 50 --every 50 --rates 1e-3 --batch 8 --workers 2"
    ),
    "dp_sgd": "--quick",
    "fault_matrix": "--only pipeline.*backward:1.*kill",
    "fedavg_paper": "--data DATA --rows 2nn/iid/0.1/1/none --rates 0.1 --seconds 5",
    "federated_simulation": "--quick --only digits",
    "gradient_descent": "--quick --seeds 1",
    "hugging_face_plans": "--quick",
    "local_training": "--repeat 1 --scale 0.01",
    "offload": "--limit 600MB --width 64 --layers 2 --steps 2",
    "parameter_server": "--quick --only host",
    "parameter_server_faults": "--runs 1 --rounds 2",
    "parameter_server_staleness": "--quick --seeds 1 --rounds 1 --real-rounds 1",
    "parameter_server_tables": "--keys 100 --rounds 2 --dims 4",
    "part_memory": "--megabytes 4 --systems 'tensor 2'",
    "pipeline": "--width 32 --batch 8 --microbatches 4 --rounds 1 --steps 1",
    "pipeline_bubble": "--ranks 2 --microbatches 4 --forward 2 --backward 4 --rounds 1",
    "privacy": "--quick",
    "recompute": "--layers 2 --width 32 --batch 4 --steps 1",
    "registered_clients": "--clients 100 --repeats 1",
    "repeatability": "--systems single-worker",
    "report_opening": "--runs 5 --steps 40",
    "sealing": "--megabytes 1 --repeats 1",
    "single_worker": "--repeat 1",
    "split": "--quick",
    "split_leakage": "--rounds 1",
    "trainers": "--millions 1 --steps 2 --repeats 2 --travels 1",
    "start_up": "--repeats 1 --sizes 0.1 --systems 'pipeline 2'",
    "study_chain": "--rounds 2 --steps 1 --small",
    "study_convex": "--data DATA --tasks heart-disease --passes 1 --rates 0.1 --rhos 0.1",
    "study_families": "--parts reliability --seeds 1",
    "study_gpu": "--device cpu --small --batches 4 --examples 64 --batch 8 --rounds 1",
    "study_interleaving": "--ranks 2 --microbatches 4 --forward 2 --backward 4 --rounds 1",
    "study_memory": "--systems 'single worker' --large 64",
    "study_privacy": "--data DATA --quick --settings mnist heart",
    "study_split": "--data DATA --quick",
    "study_updates": "--data DATA --quick",
    "tensor_parallel": "--rounds 2 --steps 1 --small",
    "torch_training": "--rounds 2 --steps 2",
    "way_of_a_step": "",
    "zero": "--rounds 2 --steps 1 --small",
    "zinkevich": "--data DATA/mnist --pairs 1",
}
"""For each script the arguments of its shortest form. DATA: the folder of `data`."""


NO_RESULT = {"study_privacy"}
"""Scripts that write no file of results in their shortest form."""


def test_every_script_is_here() -> None:
    assert QUICK.keys() == {file.stem for file in BENCHMARKS.glob("*.py")} - HELPERS


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small data sets, laid out as their publishers' are."""
    folder = tmp_path_factory.mktemp("data")
    images(folder / "mnist")
    images(folder / "fashion-mnist")
    patients(folder / "heart-disease")
    (folder / "shakespeare" / "plays_moby").mkdir(parents=True)
    plays(folder / "shakespeare" / "plays_moby" / "play.txt")
    plays(folder / "shakespeare" / "plays.txt")
    tiny = plays(folder / "shakespeare" / "tinyshakespeare.txt")
    # The published file has 65 symbols, as many as benchmarks/split_study/burden.py measures.
    symbols = f"THIRD LORD:\n!$&',-.3:;? {string.ascii_letters}\n"
    tiny.write_text(f"{symbols}\n{40 * re.sub('[0-9]', '3', tiny.read_text())}")
    return folder


@pytest.mark.parametrize("script", sorted(QUICK))
def test_a_script_runs_in_its_shortest_form(script: str, data: Path, tmp_path: Path) -> None:
    file = BENCHMARKS / f"{script}.py"
    asked = [word.replace("DATA", str(data)) for word in shlex.split(QUICK[script])]
    result = tmp_path / "result.json"
    option = next((name for name in ("--result", "--into") if name in file.read_text()), None)
    if option is None and "takes_result" in file.read_text():
        option = "--result"
    if script in NO_RESULT:
        option = None
    if option is not None:
        asked += [option, str(result)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, str(file), *asked],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60 * MINUTES,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if option is not None:
        assert json.loads(result.read_text())
