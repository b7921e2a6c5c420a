"""Matrix products, on the CPU by the faster of the two libraries that torch carries.

torch multiplies float32 matrices with MKL. On an AMD processor with AVX-512, MKL was half as fast as oneDNN
(docs/benchmarks.md): on processors with AVX-512 that are not Intel's, large products are oneDNN's. The choice looks at
processor and sizes, never at a clock: the same program gives the same bits on the same machine.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

SMALLEST = 1 << 20
"""Multiplications below which calling oneDNN costs more than it saves."""


def _mkl_lags() -> bool:
    """Whether MKL leaves half of this processor unused."""
    try:
        # an inner operator of torch (torch.compile's output calls it): it may be gone one day
        torch.ops.mkldnn._linear_pointwise.default  # noqa: B018
        vendors = {
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("vendor_id")
        }
    except (AttributeError, OSError):
        return False
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and torch.backends.mkl.is_available() and bool(vendors) and "GenuineIntel" not in vendors


ONEDNN = _mkl_lags()


def by_onednn(tensor: Tensor) -> bool:
    """Whether large products of matrices like this one are oneDNN's."""
    return ONEDNN and tensor.device.type == "cpu" and tensor.dtype == torch.float32


def product(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """a @ b of two matrices of one dtype: (N, M), fresh and contiguous. Not for autograd."""
    if not by_onednn(a_NK) or a_NK.shape[0] * b_KM.numel() < SMALLEST:
        return a_NK @ b_KM
    if not (b_KM.is_contiguous() or b_KM.T.is_contiguous()):
        b_KM = b_KM.contiguous()  # for a part of a wider matrix it has no fast way
    return torch.ops.mkldnn._linear_pointwise(a_NK, b_KM.T, None, "none", [], "")
