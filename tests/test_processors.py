"""Equal bits are equal on every x86 processor, with one thread and with two: proofs.

Kernels of torch, oneDNN and MKL are built for several instruction sets, and environment variables
choose among those that the processor has. All tests whose names speak of bits run under each.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOLDERS = (
    "averaging",
    "data",
    "equivalence",
    "federated",
    "fleet",
    "memory",
    "parallel",
    "parameter_server",
    "privacy",
    "run",
    "split",
    "tasks",
    "tensors",
    "worlds/test_simulated.py",
    "worlds/test_simulated_resume.py",
)
CHOSEN = {
    "sse": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
}
"""Values of ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and MKL_ENABLE_INSTRUCTIONS."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have no such sets")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CHOSEN)
def test_tests_of_equal_bits_hold_under_every_instruction_set(name: str, threads: int) -> None:
    aten, onednn, mkl = CHOSEN[name]
    if name not in Path("/proc/cpuinfo").read_text() and name != "sse":
        pytest.skip(f"this processor has no {name}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-k", "bit or bits", "-m", "not proof", *FOLDERS],
        cwd=TESTS,
        env={
            **os.environ,
            # A folder in the folder of these tests: Ray's sockets have names of 107 bytes at most.
            "TMPDIR": os.environ.get("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()),
            "ATEN_CPU_CAPABILITY": aten,
            "ONEDNN_MAX_CPU_ISA": onednn,
            "MKL_ENABLE_INSTRUCTIONS": mkl,
            "DURE_TESTS_THREADS": str(threads),
        },
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-8000:]
