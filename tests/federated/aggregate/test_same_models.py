"""The same updates make the same model, to the bit, on every x86 processor.

torch's kernels are built for several of them, and an environment variable chooses: child processes
fold the same updates with each kind that this processor has.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

CAPABILITIES = ("default", "avx2", "avx512")

FOLDS = """
import hashlib, json
import torch
from dure.federated.aggregate import parse
from dure.federated.aggregate.rows import UpdateRows
from dure.federated.algorithms.fed_async import staleness_weight
from dure.federated.algorithms.fed_buff import StalenessDiscount
from dure.federated.algorithms.scaffold import ControlVariates
from dure.federated.server.global_model import GlobalModel
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.protocol.messages import Update

draws = torch.Generator().manual_seed(0)
def drawn(n, dtype=torch.float32):
    # Uniform: normal ones are made with logarithms, which depend on the processor themselves.
    return (torch.rand(n, generator=draws, dtype=torch.float64) - 0.5).to(dtype)

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
WEIGHTS = [drawn(140_001, torch.float32), drawn(501, torch.float64), drawn(77, torch.bfloat16)]
BUFFERS = [drawn(33)]
UPDATES = [
    Update(k, k, 0, 3 + 7 * k, 3 + 7 * k, 0.5, [drawn(len(w), w.dtype) for w in WEIGHTS],
           [drawn(33)], [drawn(501)])
    for k in range(8)
]

def model(rule, optimizer, scale):
    made = GlobalModel(list(WEIGHTS), list(BUFFERS), parse(rule), optimizer)
    for _ in range(2):
        for update in UPDATES:
            made.fold(update, scale, update.weight)
        extra = made.finish(seed=1)
    return [*made.weights, *made.buffers, *extra]

def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()

results = {}
for rule in ("mean", "median", "trimmed-mean:0.2", "krum:1", "krum:1:5", "bulyan:1",
             "clipped:1e9/mean", "bucketing:2/mean", "bucketing:3/median"):
    results[rule] = digest(model(rule, ServerOptimizer(lr=0.7), 1.0))
for optimizer in (ServerOptimizer(), ServerOptimizer(lr=0.3, beta1=0.9),
                  ServerOptimizer("adam", 0.1, 0.9), ServerOptimizer("yogi", 0.1, 0.9),
                  ServerOptimizer("adagrad", 0.1)):
    results[str(optimizer)] = digest(model("mean", optimizer, 0.37))
control = ControlVariates(WEIGHTS, 7, 0.1)
control.control = [w * 2 for w in WEIGHTS]
control.absorb(list(UPDATES[0].delta), 3)
results["scaffold"] = digest(control.control)
stale = range(3000)
results["staleness"] = repr([
    *(staleness_weight("polynomial", s, a, 0.0) for s in stale for a in (0.5, 0.3, 1.7)),
    *(StalenessDiscount().share(UPDATES[0], s) for s in stale),
])
capability = torch.backends.cpu.get_cpu_capability().lower()
# What a fused multiply-add makes of the same numbers, so that the comparison is one.
fused = digest([torch.add(WEIGHTS[0], UPDATES[0].delta[0], alpha=0.1)])
print(json.dumps({"capability": capability, "results": results, "fused": fused}))
"""

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="of x86 processors"
)


@cache
def folded(capability: str) -> dict[str, dict[str, str]]:
    """The digest of each result, from a process whose torch has kernels of this kind."""
    # Its matrix products and the C library, too, are to be those of such a processor.
    vectors = {"default": "SSE4_2", "avx2": "AVX2", "avx512": "AVX512"}
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": capability,
        "MKL_ENABLE_INSTRUCTIONS": vectors[capability],
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4" if capability == "default" else "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[3] / "src"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [sys.executable, "-c", FOLDS]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, str]] = json.loads(said.stdout)
    return found


@pytest.mark.parametrize("capability", CAPABILITIES[1:])
def test_a_model_has_the_same_bits_with_and_without_fused_multiply_add(capability: str) -> None:
    # torch believes the environment, and would compute with instructions that are not there.
    if capability not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {capability}")
    found, plain = folded(capability), folded("default")
    assert found["capability"] == capability
    assert found["fused"] != plain["fused"]
    assert found["results"] == plain["results"]
