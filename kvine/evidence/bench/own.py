"""Kvine in a process of its own, driven like its peers: `python -m kvine.evidence.bench.own`.

Tokens come out of the engine that serves every user, its scheduler and sampler included; only text is left out.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvine.evidence.bench.peer import Driver, serve

if TYPE_CHECKING:
    from kvine.models.load import LoadedModel


class Kvine(Driver):
    """An `LLM`, as `peer.Driver` says."""

    def __init__(self, task: dict[str, Any]) -> None:
        import torch

        from kvine import __version__
        from kvine.config import CacheConfig
        from kvine.llm import LLM

        self._llm = LLM(
            task["model"],
            dtype=task["dtype"],
            device=task["device"],
            weights=task["weights"],
            cache=CacheConfig(kv_memory=task["kv_memory"]),
            threads=task["threads"],
        )
        self._torch = torch
        self._runs = 0
        model = self._llm.model
        self.facts = {
            "version": __version__,
            "held_bytes": model.weight_bytes,
            "step_bytes": model.step_bytes,
            "weights": _kept_in(model, task["dtype"]),
        }

    def generate(self, ids: Sequence[int], tokens: int) -> dict[str, Any]:
        """See `Driver`."""
        run = self._run([ids], tokens, self._fresh_salt())
        step = (run.times[-1] - run.times[0]) / (tokens - 1) if tokens > 1 else None
        return {"first_s": run.times[0], "step_s": step, "token_ids": run.token_ids}

    def batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        """See `Driver`."""
        return {"seconds": self._run(prompts, tokens, self._fresh_salt()).seconds}

    def prefix_hit(self, ids: Sequence[int]) -> dict[str, Any]:
        """See `Driver`."""
        self._run([ids], 1, "hit")
        run = self._run([ids], 1, "hit")
        if run.cached_tokens != len(ids) - 1:
            raise NotImplementedError(f"the cache has kept {run.cached_tokens} of the prompt's {len(ids)} tokens")
        return {"seconds": run.seconds}

    def cache_free(self, ids: Sequence[int]) -> dict[str, Any]:
        """The next token without a cache, the whole text computed again: `seconds`."""
        began = time.perf_counter()
        self._llm.logits(ids, last=True).argmax().item()
        return {"seconds": time.perf_counter() - began}

    def memory(self) -> dict[str, Any]:
        """On a GPU it is what torch has handed out at most."""
        if self._llm.model.device.type == "cuda":
            return {"peak_bytes": self._torch.cuda.max_memory_allocated()}
        return super().memory()

    def _run(self, prompts: Sequence[Sequence[int]], tokens: int, salt: str) -> "_Run":
        from kvine.sampling.params import SamplingParams

        engine, params, run = self._llm.engine, SamplingParams(max_tokens=tokens, ignore_eos=True), _Run()
        began = time.perf_counter()
        requests = [engine.add(ids, params, salt=salt) for ids in prompts]
        while engine.busy:
            events = engine.step()  # whose tokens are numbers already: a GPU has nothing left to do
            run.seconds = time.perf_counter() - began
            for event in events:
                if event.error is not None:
                    raise event.error
                if event.request_id == requests[0] and event.sample is not None:
                    run.times.append(run.seconds)
                    run.token_ids.append(event.sample.token_id)
                    run.cached_tokens = max(run.cached_tokens, event.cached_tokens)
        return run

    def _fresh_salt(self) -> str:
        """Only requests with the same salt share blocks: nothing that an earlier run left is found."""
        self._runs += 1
        return f"run {self._runs}"


def _kept_in(model: "LoadedModel", dtype: str) -> str:
    """What most of the weights' bytes are in: a packed type, or the compute dtype."""
    from kvine.models.names import held_bytes

    sizes: Counter[str] = Counter()
    for role, size in held_bytes(model.config, dtype, model.packings).items():
        sizes[model.packings.get(role, dtype)] += size
    return sizes.most_common(1)[0][0]


@dataclass
class _Run:
    """Seconds until the first prompt's tokens, these tokens, how many of its own were cached; and seconds in all."""

    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    seconds: float = 0.0


def main() -> None:
    """Answers the bench."""
    serve(Kvine)


if __name__ == "__main__":
    main()
