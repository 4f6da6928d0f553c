"""`verify`: does the cache change anything? Several ways of computing one text, and a measured bound for rounding.

The reference is the cache-free path: it recomputes everything for every token and shares no code with the cache.
"""

import gc
from collections.abc import Callable, Sequence

import torch

from kvine.config import EngineConfig
from kvine.engine.build import DTYPE_NAMES
from kvine.engine.cache_free import DenseRunner
from kvine.engine.engine import EngineParts
from kvine.errors import RequestError, StepError
from kvine.evidence.judge import Report, Rounding, Run, judge, judge_reference, measure_rounding
from kvine.evidence.paths import Record, Step, run_cache_free, run_cached, run_in_company
from kvine.evidence.progress import Progress, silent
from kvine.evidence.row_split import split_logits
from kvine.evidence.transformers_path import PathUnavailableError, TransformersPath
from kvine.hub import ModelSource
from kvine.llm import LLM
from kvine.text.tokenizer import Tokenizer

CACHE_FREE = "cache-free"
CACHED = "cached"
IN_COMPANY = "cached, chunks in a batch"
TRANSFORMERS = "transformers"

# A path of another library, made only when its turn comes: prompt, text to be held to, vocabulary size, what to tell.
OtherPath = Callable[[Sequence[int], Sequence[int], int, Step], Record]


def verify(
    source: ModelSource,
    *,
    prompt: str,
    new_tokens: int,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    progress: Progress = silent,
) -> Report:
    """Compares all paths on one model, in its compute dtype and in fp32.

    Args:
        source: the model.
        prompt: what every path reads.
        new_tokens: tokens to generate, end of text or not.
        dtype, device, threads: as `LLM` takes them.
        progress: told of every token of every path.

    Raises:
        RequestError: if the prompt and the tokens asked for do not fit.
        ConfigError, ModelLoadError: as `LLM` does.
    """
    runs: list[Run] = []
    measured: list[Rounding] = []
    length = 0
    for name in (dtype, "fp32"):
        llm = LLM(source, dtype=name, device=device, threads=threads)
        if DTYPE_NAMES[llm.model.dtype] in (rounding.dtype for rounding in measured):
            break  # its compute dtype is fp32
        ids = llm.encode(prompt)
        length = len(ids)
        in_dtype, rounding = compare(
            llm.parts,
            llm.dense,
            llm.engine_config,
            ids,
            new_tokens,
            dtype=llm.model.dtype,
            other=_transformers(source, llm.model.dtype, llm.model.device),
            piece=_piece(llm.tokenizer),
            progress=progress,
        )
        runs += in_dtype
        measured.append(rounding)
        del llm
        gc.collect()  # engines and requests refer to each other: let go of one model before the next is loaded
    return Report(source.name, length, tuple(runs), tuple(measured))


def compare(
    parts: EngineParts,
    dense: DenseRunner,
    config: EngineConfig,
    prompt_ids: Sequence[int],
    new_tokens: int,
    *,
    dtype: torch.dtype,
    other: OtherPath | None = None,
    piece: Callable[[int], str] = str,
    progress: Progress = silent,
) -> tuple[list[Run], Rounding]:
    """Compares the paths of one engine in one dtype.

    Args:
        parts: of the engine under test.
        dense: the cache-free path.
        config: of the engine under test.
        prompt_ids: the prompt.
        new_tokens: tokens to generate.
        dtype: the model's compute dtype.
        other: the path of another library.
        piece: shows a token.
        progress: told of every token of every path.

    Returns:
        The runs, the reference first, and the rounding that they were judged by.

    Raises:
        RequestError: if the prompt and the tokens asked for do not fit.
    """
    _check_room(parts, config, len(prompt_ids), new_tokens)
    name = DTYPE_NAMES[dtype]

    def step(path: str) -> Step:
        progress(f"{path}, {name}", 0, new_tokens)
        return lambda done: progress(f"{path}, {name}", done, new_tokens)

    reference = run_cache_free(parts, dense, prompt_ids, new_tokens, step(CACHE_FREE))
    text = reference.chosen
    control = split_logits(dense, [*prompt_ids, *text[:-1]], new_tokens, dtype)[:, : parts.vocab_size]
    rounding = measure_rounding(dtype, reference, control)
    runs = [judge_reference(CACHE_FREE, reference, rounding)]
    paths: dict[str, Callable[[Step], Record]] = {
        CACHED: lambda on_step: run_cached(parts, config, prompt_ids, text, on_step),
        IN_COMPANY: lambda on_step: run_in_company(parts, config, prompt_ids, text, on_step),
    }
    if other is not None:
        paths[TRANSFORMERS] = lambda on_step: other(prompt_ids, text, parts.vocab_size, on_step)
    for path, run in paths.items():
        try:
            record = run(step(path))
        except StepError as error:
            runs.append(Run(path, name, "fault", reason=str(error)))
        except PathUnavailableError as reason:
            runs.append(Run(path, name, "not run", reason=str(reason)))
        else:
            runs.append(judge(path, record, reference, rounding, prompt_tokens=len(prompt_ids), piece=piece))
    return runs, rounding


def _check_room(parts: EngineParts, config: EngineConfig, prompt_tokens: int, new_tokens: int) -> None:
    """Says before the first of many minutes that the text will not fit."""
    if new_tokens < 1:
        raise RequestError(f"Comparing needs at least 1 new token; {new_tokens} were asked for.")
    total = prompt_tokens + new_tokens
    if parts.max_context is not None and total > parts.max_context:
        raise RequestError(
            f"The prompt's {prompt_tokens} tokens and {new_tokens} new ones exceed the model's context of "
            f"{parts.max_context}: use --quick, or give a shorter prompt."
        )
    if not parts.manager.fits_ever(total, config.max_step_tokens):
        raise RequestError(f"The cache cannot hold {total} tokens: use --quick, or give a shorter prompt.")


def _transformers(source: ModelSource, dtype: torch.dtype, device: torch.device) -> OtherPath:
    """Loads only when its turn comes, and keeps nothing afterwards."""
    return lambda *call: TransformersPath(source, dtype, device).run(*call)


def _piece(tokenizer: Tokenizer) -> Callable[[int], str]:
    return lambda token: tokenizer.pieces([token])[0]
