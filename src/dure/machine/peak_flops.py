"""Peak rates of common accelerators, in floating-point operations per second, by dtype.

The rates are those of dense matrices: datasheets of NVIDIA also give rates of sparse matrices,
which are twice as high and of no use here. Rates of matrix units are those with sums in float32;
"float32" is the rate without TF32. A device is found by the name that it reports.

Sources, datasheets and white papers of the makers:

    H100, H200, B200     NVIDIA H100, H200 and HGX B200 datasheets (dense: half of what they print)
    A100, A10, V100, T4  NVIDIA A100, A10, V100 and T4 datasheets
    L4, L40, L40S        NVIDIA L4 (dense: half of what it prints), L40 and L40S datasheets
    RTX 3090, 4090, 5090 NVIDIA white papers on the architectures GA102, Ada and RTX Blackwell
    MI300X, MI325X       AMD Instinct MI300X and MI325X datasheets
"""

from __future__ import annotations

import re

import torch

_T = 1e12


def _rates(half: float, tf32: float, single: float) -> dict[str, float]:
    """Return rates by dtype, given in teraflops."""
    return {
        "bfloat16": half * _T,
        "float16": half * _T,
        "tf32": tf32 * _T,
        "float32": single * _T,
    }


def _older(half: float, single: float) -> dict[str, float]:
    """Return rates of a device without bfloat16 and TF32, given in teraflops."""
    return {"float16": half * _T, "tf32": single * _T, "float32": single * _T}


_RATES: tuple[tuple[str, dict[str, float]], ...] = (
    (r"\bB200\b", _rates(2250, 1125, 75)),
    (r"\bH200 NVL\b", _rates(835.5, 417.5, 60)),
    (r"\bG?H200\b", _rates(989.4, 494.7, 67)),
    (r"\bH100 NVL\b", _rates(835.5, 417.5, 60)),
    (r"\bH100 PCIe\b", _rates(756.5, 378, 51)),
    (r"\bH100\b", _rates(989.4, 494.7, 67)),
    (r"\bA100\b", _rates(312, 156, 19.5)),
    (r"\bA10\b", _rates(125, 62.5, 31.2)),
    (r"\bL40S\b", _rates(362.05, 183, 91.6)),
    (r"\bL40\b", _rates(181.05, 90.5, 90.5)),
    (r"\bL4\b", _rates(121, 60, 30.3)),
    (r"\bV100-SXM2\b", _older(125, 15.7)),
    (r"\bT4\b", _older(65, 8.1)),
    (r"\bRTX 5090$", _rates(209.5, 104.8, 104.8)),
    (r"\bRTX 4090$", _rates(165.2, 82.6, 82.6)),
    (r"\bRTX 3090$", _rates(71, 35.6, 35.6)),
    (r"\bMI3(00|25)X\b", _rates(1307.4, 653.7, 163.4)),
)
"""Patterns of names with their rates; the first match counts."""


def peak_flops_of(name: str, dtype: torch.dtype) -> float | None:
    """Return the operations per second of the device called `name`, for matrices of this dtype.

    None for a device that is not in the table, such as a part of one (MIG), or another dtype.
    """
    if "MIG" in name:
        return None
    kind = str(dtype).removeprefix("torch.")
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        kind = "tf32"
    for pattern, rates in _RATES:
        if re.search(pattern, name):
            return rates.get(kind)
    return None
