"""Where a run took place: device, versions, clocks, the state of the sources, and the two ceilings of the hardware."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import torch

import cutlass_bn

from .cases import DTYPES, matmul_precision
from .timing import Timing, interleave

ROOT = Path(__file__).resolve().parent.parent


def _output_of(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def clocks() -> dict[str, str]:
    """What nvidia-smi says of the first GPU right now; empty without it."""
    query = ["clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "driver_version"]
    line = _output_of(["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader", "--id=0"])
    return dict(zip(query, map(str.strip, line.splitlines()[0].split(",")), strict=False)) if line else {}


def clocks_under_load(device: torch.device) -> dict[str, str]:
    """The same in the middle of about a second of bf16 products: an idle GPU's clocks say nothing."""
    a = torch.rand(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(600):
        torch.mm(a, a)
    return clocks()


def fingerprint() -> str | None:
    """The hash over the contents of the sources (tools/fingerprint.py)."""
    return _output_of([sys.executable, str(ROOT / "tools" / "fingerprint.py")])


def describe(device: torch.device) -> dict:
    cuda = device.type == "cuda"
    return {
        "device_type": device.type,
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "cutlass_bn": cutlass_bn.__version__,
        "build": {key: value for key, value in cutlass_bn.build_info().items() if key not in ("library", "error")},
        "fingerprint": fingerprint(),
    }


def measure_ceilings(device: torch.device, quick: bool) -> dict:
    """GB/s of a large copy (read plus written), and TFLOP/s of a large product in every precision, both by PyTorch."""
    if device.type != "cuda":
        return {}
    source = torch.rand(1 << (28 if quick else 30), device=device)
    target = torch.empty_like(source)
    copy = interleave({"copy": lambda _: target.copy_(source)}, device, 0.2)["copy"]
    ceilings = {"copy": 2 * source.nbytes / copy.median / 1e6}
    n = 4096 if quick else 8192
    for precision, dtype in DTYPES.items():
        with matmul_precision(precision):
            a, b = (torch.rand(n, n, device=device).to(dtype) for _ in range(2))
            product: Timing = interleave({"mm": lambda _, a=a, b=b: torch.mm(a, b.t())}, device, 0.2)["mm"]
        ceilings[precision] = 2 * n**3 / product.median / 1e9
    return ceilings
