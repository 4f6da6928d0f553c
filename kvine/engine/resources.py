"""What this process may use of the machine: cores and memory as its container limits them, not as the host has them."""

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path

from kvine.errors import ConfigError, KvineWarning

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may keep busy: the smaller of its affinity mask and its cgroup's quota, at least 1."""
    return _cores(cgroup, math.floor)


def default_threads() -> int:
    """Threads to compute with: `OMP_NUM_THREADS` where the user has set it, else one for each usable core.

    The variable is for all programs and may have been set with another machine in mind: a number that cannot be here
    is no error, as it is of `checked_threads`, but a KvineWarning says which one is taken.
    """
    asked, cores = os.environ.get("OMP_NUM_THREADS", ""), usable_cores()
    if not asked:
        return cores
    if asked.isdecimal() and 0 < int(asked) <= most_threads():
        return int(asked)
    said = f"OMP_NUM_THREADS is {asked!r}, and this process may use {_count(most_threads(), 'core')}"
    warnings.warn(f"{said}: computing with {_count(cores, 'thread')}.", KvineWarning, stacklevel=2)
    return cores


def most_threads(cgroup: Path = CGROUP) -> int:
    """As many as the process has cores, the part of one that a quota may end in counted as one.

    With more, threads that compute wait for threads that have no core.
    """
    return _cores(cgroup, math.ceil)


def checked_threads(asked: int | None) -> int:
    """The number of threads asked for, or the default.

    Raises:
        ConfigError: if it is no whole number from 1 to `most_threads()`.
    """
    if asked is None:
        return default_threads()
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= most_threads():
        cores = most_threads()
        raise ConfigError(
            f"threads is {asked!r}, and this process may use {_count(cores, 'core')}: give a whole number from 1 to "
            f"{cores}."
        )
    return asked


def free_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of memory that this process may still take: the smaller of the machine's and its cgroup's."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def _cores(cgroup: Path, whole: Callable[[float], int]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(cgroup / "cpu.max").split()  # "200000 100000", or "max 100000"
    if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal() and int(quota[1]):
        cores = min(cores, whole(int(quota[0]) / int(quota[1])))
    return max(1, cores)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
