"""`experiment window`: what a sliding window forgets, what attention sinks keep, and what a pinned prompt keeps.

A model is told something, talks of other things past its window, and is asked for it. What counts is how likely it
finds the right answer, and how likely it finds the talk itself (perplexity).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import DTYPE_NAMES, standard_parts
from kvine.engine.runner import Runner
from kvine.engine.stepped import SteppedCache
from kvine.errors import ContextLengthError, RequestError
from kvine.evidence.experiments.edge import Edge, SeenFirst, edges, first_key_seen
from kvine.evidence.experiments.scenes import SCENES, Scene, scene_text
from kvine.evidence.progress import Progress, silent
from kvine.llm import LLM
from kvine.models.packing import count_packings

SINKS = 4  # as many as StreamingLLM keeps (arXiv:2309.17453)
STEP_TOKENS = 128  # whose logits are held at once
TEXTBOOK_WINDOW = 4096
MOST_EDGE_WINDOW = 1_000_000  # whose keys are held as an array
MOST_TURNS = 10_000  # several hundred thousand tokens


@dataclass(frozen=True)
class Recall:
    """How likely the right answer is in one scene, and how many tokens are likelier than its first (rank 1: none)."""

    scene: str
    probability: float
    rank: int


@dataclass(frozen=True)
class Kept:
    """What one way of keeping the past has come to.

    Attributes:
        name: of the way.
        visible: the most tokens that a query sees, over the scenes.
        recalls: one for each scene.
        perplexity: of the tokens past the window, over all scenes.
    """

    name: str
    visible: int
    recalls: tuple[Recall, ...]
    perplexity: float

    @property
    def probability(self) -> float:
        """Of the right answer, geometric mean over the scenes."""
        return math.exp(fmean(math.log(max(recall.probability, 1e-300)) for recall in self.recalls))


@dataclass(frozen=True)
class WindowExperiment:
    """What came of it: ways of keeping the past, where exactly a window ends, and a check of that in the model.

    `kept` begins with everything kept, and with everything kept of a text that never tells the facts. `packings` says
    how many weights were packed, by type.
    """

    model: str
    dtype: str
    device: str
    window: int
    prompt_tokens: int  # of the longest scene
    kept: tuple[Kept, ...]
    edges: tuple[Edge, ...]
    seen: SeenFirst
    packings: Mapping[str, int] = field(default_factory=dict)

    @property
    def tells(self) -> bool:
        """Whether the model uses the facts at all: with everything kept the answers are ten times as likely."""
        everything, never_told = self.kept[:2]
        return everything.probability > 10 * never_told.probability

    def keeps(self, kept: Kept) -> bool:
        """Whether a way keeps the facts: it is nearer, by ratio, to everything kept than to facts never told."""
        everything, never_told = self.kept[:2]
        return kept.probability > math.sqrt(everything.probability * never_told.probability)


def run_window_experiment(
    llm: LLM,
    *,
    window: int = 128,
    turns: int = 8,
    edge_window: int = TEXTBOOK_WINDOW,
    scenes: Sequence[Scene] = SCENES,
    progress: Progress = silent,
) -> WindowExperiment:
    """Tells a model each scene's fact, lets it talk past its window, and asks.

    Args:
        llm: the model; how its own cache is kept does not matter here.
        window: tokens that a query sees beside sinks.
        turns: questions and answers between telling and asking.
        edge_window: the window whose end is shown key by key.
        scenes: what is told and asked.
        progress: told of every text.

    Raises:
        RequestError: for a number out of range, or where the fact would still lie in the window.
        ContextLengthError: if the conversation does not fit the model's context.
    """
    check_request(window, turns, edge_window)
    texts = [scene_text(llm.tokenizer, scene, turns) for scene in scenes]
    longest = max(len(text.prompt) + len(text.answer) for text in texts)
    context = llm.model.config.max_context
    if longest > context:
        raise ContextLengthError(
            f"The conversation has {longest} tokens and the model's context {context}: lower turns."
        )
    for text in texts:
        if len(text.prompt) - text.pinned < window:
            raise RequestError(
                f"After {len(text.prompt)} tokens a window of {window} still sees the first message: raise turns, or "
                "lower window."
            )
    ways = _ways(window, [text.pinned for text in texts], longest)
    kept = []
    for name, visible, told, configs in ways:
        recalls, losses = [], []
        for number, (scene, config) in enumerate(zip(scenes, configs, strict=True)):
            progress(name, number, len(scenes))
            text = scene_text(llm.tokenizer, scene, turns, told=told)
            losses_of_text, probability, rank = _read(llm, config, text.prompt, text.answer)
            recalls.append(Recall(scene.name, probability, rank))
            losses += losses_of_text[window:]
        progress(name, len(scenes), len(scenes))
        kept.append(Kept(name, visible, tuple(recalls), math.exp(fmean(losses))))
    return WindowExperiment(
        llm.source.name,
        DTYPE_NAMES[llm.model.dtype],
        str(llm.model.device),
        window,
        longest,
        tuple(kept),
        (*edges(edge_window, 0, llm.cache_config.block_size), *edges(edge_window, SINKS, llm.cache_config.block_size)),
        first_key_seen(stepped(llm, CacheConfig(window=window)), texts[0].prompt),
        count_packings(llm.model.packings),
    )


def check_request(window: int, turns: int, edge_window: int) -> None:
    """Says what can be said before a model is loaded. Raises RequestError, naming the command's option."""
    for option, value, least, most in (
        ("--window", window, 1, None),
        ("--turns", turns, 0, MOST_TURNS),
        ("--edge", edge_window, 1, MOST_EDGE_WINDOW),
    ):
        if value < least or (most is not None and value > most):
            allowed = f"{least} or more" if most is None else f"{least} to {most:,}"
            raise RequestError(f"{option} is {value:,}, which is out of range: give {allowed}.")


def stepped(llm: LLM, config: CacheConfig) -> SteppedCache:
    """An empty cache of its own, kept as `config` says, over a loaded model."""
    engine = EngineConfig(max_step_tokens=STEP_TOKENS)
    parts = standard_parts(
        llm.model, replace(config, prefix_caching=False), engine, vocab_size=llm.tokenizer.vocab_size, eos_ids=()
    )
    assert isinstance(parts.runner, Runner)
    return SteppedCache(parts.runner, engine, parts.max_context)


def _ways(window: int, pinned: Sequence[int], longest: int) -> list[tuple[str, int, bool, list[CacheConfig]]]:
    """Name, visible tokens, whether the fact is told, and the config for each scene."""
    full, windowed = CacheConfig(), CacheConfig(window=window)
    sinks = CacheConfig(window=window, sink_tokens=SINKS, sink_rule="in_cache")
    pins = [CacheConfig(window=window, sink_tokens=count) for count in pinned]
    every = len(pinned)
    return [
        ("everything kept", longest, True, [full] * every),
        ("fact never told", longest, False, [full] * every),
        (f"window of {window}", window, True, [windowed] * every),
        (f"window and {SINKS} sinks", window + SINKS, True, [sinks] * every),
        ("window and pinned message", window + max(pinned), True, pins),
    ]


@torch.inference_mode()
def _read(
    llm: LLM, config: CacheConfig, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[list[float], float, int]:
    """Negative log-likelihoods of the prompt's tokens from the second on, and probability and rank of the answer."""
    cache = stepped(llm, config)
    text = [*prompt, *answer]
    losses: list[float] = []
    rank = 0
    for start in range(0, len(text) - 1, STEP_TOKENS):
        fed = text[start : min(start + STEP_TOKENS, len(text) - 1)]
        logprobs = cache.extend(fed)[0].log_softmax(-1)  # [n, vocabulary]
        wanted = torch.tensor(text[start + 1 : start + 1 + len(fed)], device=logprobs.device)
        of_wanted = logprobs.gather(1, wanted[:, None])
        losses += (-of_wanted[:, 0]).tolist()
        row = len(prompt) - 1 - start  # whose logits are for the answer's first token
        if 0 <= row < len(fed):
            rank = int((logprobs[row] > of_wanted[row]).sum()) + 1
    cache.close()
    of_answer = losses[len(prompt) - 1 :]
    return losses[: len(prompt) - 1], math.exp(-sum(of_answer)), rank
