"""Peak memory of a piece of work: what it makes the process take, without the checkpoint's pages that it only maps.

On Linux it is resident memory less memory-mapped file pages (RssAnon + RssShmem of proc(5)), sampled by a thread; on
a CUDA device it is what torch's allocator has handed out at most (`torch.cuda.max_memory_allocated`).
"""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

STATUS = Path("/proc/self/status")
SAMPLE_SECONDS = 0.002


def own_bytes() -> int | None:
    """Resident bytes of this process that no file backs; None where the system does not tell."""
    if not STATUS.exists():
        return None
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if line.startswith("Rss"))
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


class PeakMemory:
    """A context that measures the peak while it lasts.

    Args:
        device: where the work is done.

    Attributes:
        start_bytes: taken before the work began.
        peak_bytes: the most taken until its end; both are None where the system does not tell.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvine-peak-memory", daemon=True)
        self.start_bytes: int | None = None
        self.peak_bytes: int | None = None

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self.start_bytes = torch.cuda.memory_allocated(self._device)
            return self
        self.start_bytes = self.peak_bytes = own_bytes()
        if self.start_bytes is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        elif self._thread.is_alive():
            self._sample()
            self._stop.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        taken = own_bytes()
        if taken is not None:
            self.peak_bytes = max(taken, self.peak_bytes or 0)
