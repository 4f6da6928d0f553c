"""What this machine has: memory to fill, and how fast it reads it. torch is loaded only where there is a GPU to ask."""

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from kvine.config import check_device, parse_bytes
from kvine.engine.resources import default_threads, free_memory
from kvine.errors import ConfigError

PROBE_BYTES = 1 << 30
PROBE_SECONDS = 2.0
MOST_GIGABYTES = 1e6  # a second
_KERNELS = Path(__file__).parents[2] / "kernels"


@dataclass(frozen=True)
class Quantity:
    """A number of bytes, or of bytes a second, and where it comes from."""

    value: float
    source: str


def parse_bandwidth(given: int | str) -> int:
    """Bytes a second: a whole number of them, or a text such as `19GB/s`; in a text, a bare number (1e3) means GB/s.

    Raises:
        ConfigError: for anything else.
    """
    size = given
    if isinstance(given, str):
        text = given.strip()
        size = re.sub("/s$", "", text, flags=re.IGNORECASE)
        if re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", text, re.IGNORECASE):
            if float(text) > MOST_GIGABYTES:
                raise ConfigError(
                    f"No memory reads {text} GB/s: a bare bandwidth is in GB/s; write a unit, as in 19GB/s."
                )
            size = int(float(text) * 1e9)
    try:
        return parse_bytes(size)
    except ConfigError:
        raise ConfigError(
            f"{given!r} is not a bandwidth: write a number of GB/s, or a text such as 900GiB/s."
        ) from None


def planned_device(name: str) -> str:
    """The kind of device that `auto` means here, without loading torch where no driver shows a GPU.

    Raises:
        ConfigError: for an unknown name, or a device that is not there.
    """
    check_device(name)
    if name == "auto" and not _has_driver():
        return "cpu"
    if name == "cpu":
        return "cpu"
    from kvine.models.placement import choose_device

    return choose_device(name).type


def has_kernels() -> bool:
    """Whether a CPU would compute with compiled kernels. They are looked for, not loaded: torch would come along."""
    if os.environ.get("KVINE_KERNELS") == "off":
        return False
    return PathFinder.find_spec("kvine.kernels._native", [str(_KERNELS)]) is not None


def available_memory(device: str) -> Quantity:
    """Bytes that a process may still take on the device."""
    if device == "cuda":
        import torch

        return Quantity(torch.cuda.mem_get_info()[0], "free on this GPU")
    return Quantity(free_memory(), "free on this machine")


def measure_bandwidth(device: str, seconds: float = PROBE_SECONDS) -> Quantity:
    """Bytes a second that the device reads from its memory, with as many threads as Kvine computes with.

    Reads a buffer far larger than most caches again and again, as decoding reads weights, and takes the fastest pass:
    the others were slowed by something else.
    """
    rate = _gpu_rate(device, seconds) if device in ("cuda", "mps") else _cpu_rate(seconds)
    return Quantity(rate, f"measured in {seconds:g} s")


def _has_driver() -> bool:
    if sys.platform != "linux":
        return sys.platform != "darwin"  # there, auto is the CPU
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def _cpu_rate(seconds: float) -> float:
    import numpy as np

    threads = default_threads()
    size = max(threads, min(PROBE_BYTES, free_memory() // 4))
    parts = np.array_split(np.ones(size, np.int8), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + seconds
        while best == float("inf") or time.perf_counter() < end:
            began = time.perf_counter()
            list(pool.map(np.max, parts))  # numpy lets go of the interpreter, and does next to nothing but read
            best = min(best, time.perf_counter() - began)
    return size / best


def _gpu_rate(device: str, seconds: float) -> float:
    import torch

    data = torch.ones(PROBE_BYTES // 4, device=device)
    best = float("inf")
    end = time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        began = time.perf_counter()
        data.sum().item()
        best = min(best, time.perf_counter() - began)
    return data.nbytes / best
