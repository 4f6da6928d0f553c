"""How fast this machine reads its memory: no step can read its weights and its cache any faster."""

import time

import numpy as np

from kvine import kernels

STREAMS = (1, 4, 8)  # places that a thread reads at once; which is fastest depends on the CPU's prefetchers


def read_rate(size: int, num_threads: int, seconds: float) -> float:
    """Bytes a second that the threads together fetch of a buffer of `size` bytes: the fastest pass within `seconds`.

    Only one word of each cache line is used, so that it is the memory which sets the pace. Slower passes shared the
    machine with something else. Raises ConfigError where the kernels are not compiled.
    """
    native = kernels.require_native()
    buffer = np.ones(size, np.uint8)  # written, because untouched pages are all one page of zeros
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        for streams in STREAMS:
            began = time.perf_counter()
            native.fetch_all(buffer.ctypes.data, size, streams, num_threads)
            best = min(best, time.perf_counter() - began)
    return size / best
