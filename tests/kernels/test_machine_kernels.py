"""Reading memory for its speed alone: all of it is read, whoever shares it out."""

import numpy as np

from kvine import kernels
from kvine.kernels.machine import read_rate


def test_all_of_a_buffer_is_fetched_whatever_the_streams_and_threads() -> None:
    native = kernels.require_native()
    words = np.random.default_rng(3).integers(1 << 62, size=8 * 1003).astype(np.uint64)
    expected = int(np.bitwise_xor.reduce(words[::8]))  # the first word of each line of 64 bytes
    for streams in (1, 4, 7, 16):
        for threads in (1, 2, 3):
            assert native.fetch_all(words.ctypes.data, words.nbytes, streams, threads) == expected
    assert native.fetch_all(words.ctypes.data, 0, 4, 2) == 0
    # So few lines that a thread has fewer than streams.
    assert native.fetch_all(words.ctypes.data, 192, 8, 2) == int(np.bitwise_xor.reduce(words[:24:8]))


def test_memory_is_read_at_some_rate() -> None:
    assert 0.3e9 < read_rate(64 << 20, 1, 0.1) < 1e12
