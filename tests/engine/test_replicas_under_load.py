"""G03 under load: two processes that share the cores out do not together write fewer tokens than one with all cores."""

import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvine.engine.resources import usable_cores

# Answers each line with the tokens that it has written in so many seconds.
REPLICA = """
import sys, time
from kvine import LLM, SamplingParams

llm = LLM("smollm2-135m", threads=int(sys.argv[1]))
params = SamplingParams(max_tokens=16, ignore_eos=True)
llm.generate("The", params)
print("ready", flush=True)
for line in sys.stdin:
    tokens, end = 0, time.perf_counter() + float(line)
    while time.perf_counter() < end:
        tokens += len(llm.generate("The answer to 2 + 3 is", params).token_ids)
    print(tokens, flush=True)
"""
SECONDS, ROUNDS = 4, 5


@contextmanager
def replicas(count: int, threads: int) -> Iterator[list["subprocess.Popen[str]"]]:
    command = [sys.executable, "-c", REPLICA, str(threads)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


def tokens_of(children: Sequence["subprocess.Popen[str]"]) -> int:
    """What all of them write at once."""
    for child in children:
        assert child.stdin is not None
        child.stdin.write(f"{SECONDS}\n")
        child.stdin.flush()
    return sum(int(child.stdout.readline()) for child in children if child.stdout is not None)


@pytest.mark.slow
def test_g03_two_replicas_write_no_less_than_one() -> None:
    cores = usable_cores()
    if cores < 2:
        with replicas(1, 1) as only:  # nothing to share out: a single core serves one
            assert tokens_of(only) > 0
        return
    with replicas(1, cores) as one, replicas(2, cores // 2) as two:
        ratios = []
        for _ in range(ROUNDS):  # in turns, for other work on the machine comes and goes
            alone = tokens_of(one)
            ratios.append(tokens_of(two) / alone)
    assert statistics.median(ratios) > 0.9, ratios
