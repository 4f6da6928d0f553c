"""One measured generation in a process of its own, so that no earlier one has warmed or grown its memory.

Run as `python -m kvine.evidence.experiments.trial` with a `Trial` as JSON on stdin; it answers in lines of JSON.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kvine.errors import ContextLengthError, KvineError

if TYPE_CHECKING:
    import torch

    from kvine.llm import LLM

Path = Literal["cache-free", "cached"]
LogitsMode = Literal["all", "last"]


@dataclass(frozen=True)
class Trial:
    """What to measure.

    Attributes:
        model, dtype, device, threads, weights: as `LLM` takes them.
        path: whether each token recomputes the whole text, or only itself.
        logits: of all positions that a call computes, or of its last.
        prompt_ids: what is read first.
        new_tokens: generated greedily, end of text or not.
    """

    model: str
    dtype: str
    device: str
    threads: int | None
    path: Path
    logits: LogitsMode
    prompt_ids: Sequence[int]
    new_tokens: int
    weights: str = "auto"


@dataclass(frozen=True)
class Outcome:
    """What was measured.

    Attributes:
        total_ms: from the prompt to the last token; loading is not part of it.
        prefill_ms: until the first token.
        decode_ms: for each further token, on average.
        start_bytes, peak_bytes: memory before the prompt, and at most; see `kvine.evidence.memory`.
        dtype, device: what the model ran in and on.
        token_ids: what was generated.
        packings: how many weights were packed, by type.
    """

    total_ms: float
    prefill_ms: float
    decode_ms: float
    start_bytes: int | None
    peak_bytes: int | None
    dtype: str
    device: str
    token_ids: list[int]
    packings: dict[str, int] = field(default_factory=dict)


def run_trial(trial: Trial, on_token: Callable[[int], None]) -> Outcome:
    """Measures in a fresh process.

    Args:
        trial: what to measure.
        on_token: called with the number of tokens generated so far, and with 0 once the model is loaded.

    Raises:
        KvineError: what went wrong there, in its words.
    """
    command = [sys.executable, "-m", "kvine.evidence.experiments.trial"]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=complaints, text=True) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died already: its last words say why
                process.stdin.write(json.dumps(asdict(trial)))
                process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                if "error" in message:
                    raise KvineError(message["error"])
                if "outcome" in message:
                    return Outcome(**message["outcome"])
                on_token(message["token"])
            process.wait()
        finally:
            process.kill()  # nothing is left to do for it, whether it has answered or we were interrupted
        complaints.seek(0)
        last_words = complaints.read().strip().splitlines()[-1:] or ["memory may be short, choose a shorter prompt"]
        raise KvineError(f"The process that measures ended with code {process.returncode}: {last_words[0]}.")


def measure(llm: "LLM", trial: Trial, on_token: Callable[[int], None]) -> Outcome:
    """Measures in this process, on a model that is loaded. Raises ContextLengthError if the text will not fit it."""
    from kvine.engine.build import DTYPE_NAMES
    from kvine.evidence.memory import PeakMemory
    from kvine.models.packing import count_packings

    total, context = len(trial.prompt_ids) + trial.new_tokens, llm.parts.max_context
    if context is not None and total > context:
        raise ContextLengthError(
            f"The prompt's {len(trial.prompt_ids)} tokens and {trial.new_tokens} new ones exceed the model's context "
            f"of {context}: give a shorter prompt, or fewer tokens."
        )
    device = llm.model.device
    times: list[float] = []

    def stamp(done: int) -> None:
        synchronize(device)
        times.append(time.perf_counter())
        on_token(done)

    with PeakMemory(device) as memory:
        synchronize(device)
        on_token(0)
        began = time.perf_counter()
        token_ids = generate(llm, trial, stamp)
    further = len(times) - 1
    return Outcome(
        total_ms=(times[-1] - began) * 1e3,
        prefill_ms=(times[0] - began) * 1e3,
        decode_ms=(times[-1] - times[0]) / further * 1e3 if further else 0.0,
        start_bytes=memory.start_bytes,
        peak_bytes=memory.peak_bytes,
        dtype=DTYPE_NAMES[llm.model.dtype],
        device=str(device),
        token_ids=token_ids,
        packings=count_packings(llm.model.packings),
    )


def generate(llm: "LLM", trial: Trial, stamp: Callable[[int], None]) -> list[int]:
    """The tokens that a trial generates; `stamp` is called after each with their number."""
    return (_cache_free if trial.path == "cache-free" else _cached)(llm, trial, stamp)


def _cache_free(llm: "LLM", trial: Trial, stamp: Callable[[int], None]) -> list[int]:
    """The loop of a textbook: the whole text anew for every token."""
    ids = list(trial.prompt_ids)
    for done in range(1, trial.new_tokens + 1):
        logits = llm.logits(ids, last=trial.logits == "last")
        ids.append(int(logits[0, -1].argmax()))
        stamp(done)
    return ids[len(trial.prompt_ids) :]


def _cached(llm: "LLM", trial: Trial, stamp: Callable[[int], None]) -> list[int]:
    """The same loop with a cache: the prompt once, then one token at a time."""
    token_ids: list[int] = []
    logits, cache = llm.forward(trial.prompt_ids, last=trial.logits == "last")
    with contextlib.closing(cache):
        while True:
            token_ids.append(int(logits[0, -1].argmax()))
            stamp(len(token_ids))
            if len(token_ids) == trial.new_tokens:
                return token_ids
            logits, cache = llm.forward(token_ids[-1:], cache, last=trial.logits == "last")


def synchronize(device: "torch.device") -> None:
    """Waits until a device has done what it was asked to, so that a clock means something."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    """Reads one `Trial` from stdin, and answers on stdout."""
    trial = Trial(**json.load(sys.stdin))
    try:
        from kvine.llm import LLM

        llm = LLM(trial.model, dtype=trial.dtype, device=trial.device, weights=trial.weights, threads=trial.threads)
        outcome = measure(llm, trial, lambda done: _answer({"token": done}))
    except KvineError as error:
        _answer({"error": str(error)})
    else:
        _answer({"outcome": asdict(outcome)})


if __name__ == "__main__":
    main()
