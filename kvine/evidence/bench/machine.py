"""What the machine can do at most: read its memory, and multiply matrices. Every floor is made of these two rates."""

import os
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvine import kernels
from kvine.engine.resources import free_memory
from kvine.evidence.experiments.trial import synchronize
from kvine.evidence.plan.machine import measure_bandwidth
from kvine.kernels.machine import read_rate
from kvine.models.placement import DTYPES

READ_SECONDS = 1.5
MATRIX_SECONDS = 0.7  # for each dtype
CACHES_PER_BUFFER = 8  # far more than a shared cache holds, so that nearly nothing of it is found there
LEAST_BUFFER, MOST_BUFFER = 256 << 20, 4 << 30
LARGEST_MATRIX = 4096
LONG_PRODUCT = 0.05  # seconds; a product that takes longer shows a rate as well as a larger one would


@dataclass(frozen=True)
class Machine:
    """What floors are made of.

    Attributes:
        cpu: its name, or the GPU's.
        threads: that compute, and that these rates were measured with.
        read_bytes_per_s: from memory, past the last-level cache; all threads together.
        flops_per_s: of a product of matrices in `matrix_dtype`.
        matrix_dtype: the compute dtype, or fp32 where a product is faster in that.
    """

    cpu: str
    threads: int
    read_bytes_per_s: float
    flops_per_s: float
    matrix_dtype: str

    def best_of(self, other: "Machine") -> "Machine":
        """The higher of both rates: whatever else is at work can only lower them."""
        faster = max((self, other), key=lambda machine: machine.flops_per_s)
        read = max(self.read_bytes_per_s, other.read_bytes_per_s)
        return replace(faster, read_bytes_per_s=read)


def measure_machine(dtype: str, device: str, threads: int) -> Machine:
    """Measures this machine, in a few seconds.

    Args:
        dtype: compute dtype, `fp32`, `bf16` or `fp16`.
        device: `cpu`, `cuda` or `mps`.
        threads: that compute.
    """
    torch.set_num_threads(threads)
    place = torch.device(device)
    # Where a CPU has no instructions for a dtype, products are computed in fp32: the faster of the two is the limit.
    rates = {name: matrix_rate(DTYPES[name], place) for name in dict.fromkeys((dtype, "fp32"))}
    fastest = max(rates, key=lambda name: rates[name])
    return Machine(_name(place), threads, _read_rate(place, threads), rates[fastest], fastest)


def matrix_rate(dtype: torch.dtype, device: torch.device, seconds: float = MATRIX_SECONDS) -> float:
    """Floating-point operations a second of torch's product of square matrices: the fastest of ever larger ones."""
    best, size, end = 0.0, 256, time.perf_counter() + seconds
    while True:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.mm(a, b)  # warms up
        taken = 0.0
        for _ in range(3):
            synchronize(device)
            began = time.perf_counter()
            torch.mm(a, b, out=out)
            synchronize(device)
            taken = time.perf_counter() - began
            best = max(best, 2 * size**3 / taken)
        if taken < LONG_PRODUCT and size < LARGEST_MATRIX:
            size *= 2
        elif time.perf_counter() > end:
            return best


def buffer_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes to read so that they come from memory: several times the largest cache, where the system tells its size."""
    sizes = [_kib(path.read_text()) for path in caches.glob("index*/size")]
    wanted = CACHES_PER_BUFFER * max(sizes, default=0) * 1024
    return max(1 << 20, min(max(wanted, LEAST_BUFFER), MOST_BUFFER, free_memory() // 4))


def _kib(text: str) -> int:
    digits = text.strip().rstrip("KM")
    return int(digits) * (1024 if text.strip().endswith("M") else 1) if digits.isdecimal() else 0


def _read_rate(device: torch.device, threads: int) -> float:
    if device.type != "cpu" or not kernels.available():
        return measure_bandwidth(device.type, READ_SECONDS).value
    return read_rate(buffer_bytes(), threads, READ_SECONDS)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine() or os.name
