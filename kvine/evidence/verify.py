"""`verify`: does the cache change anything? Several ways of computing one text, and a measured bound for rounding.

The reference is the cache-free path: it recomputes everything for every token and shares no code with the cache.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from kvine.config import EngineConfig
from kvine.engine.build import DTYPE_NAMES, standard_parts
from kvine.engine.cache_free import DenseRunner
from kvine.engine.engine import EngineParts
from kvine.engine.request import checked_ids
from kvine.errors import KvineError, RequestError
from kvine.evidence.cells import prompts
from kvine.evidence.cells.covering import cover
from kvine.evidence.cells.factors import Scope, registered
from kvine.evidence.cells.oracle import Oracle
from kvine.evidence.cells.run import Bench, CellRuns
from kvine.evidence.coarse_angles import with_coarse_angles
from kvine.evidence.exact_products import with_exact_products
from kvine.evidence.judge import (
    LARGEST_SHARE,
    PACKED_SHARE,
    Report,
    Rounding,
    Run,
    judge,
    judge_reference,
    measure_rounding,
)
from kvine.evidence.paths import Record, Step, run_cache_free, run_cached, run_in_company
from kvine.evidence.progress import Progress, silent
from kvine.evidence.row_split import split_logits, whole_logits
from kvine.evidence.transformers_path import OtherPath, PathUnavailableError, TransformersPath
from kvine.hub import ModelSource
from kvine.llm import LLM
from kvine.models.load import LoadedModel
from kvine.models.packing import count_packings
from kvine.text.tokenizer import Tokenizer

CACHE_FREE = "cache-free"
CACHED = "cached"
IN_COMPANY = "cached, chunks in a batch"
TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class PathOptions:
    """The long text that all paths compute.

    Attributes:
        prompt: what every path reads.
        new_tokens: tokens to generate, end of text or not.
    """

    prompt: str
    new_tokens: int


@dataclass(frozen=True)
class CellOptions:
    """The short texts that cells compute.

    Attributes:
        prompts: what they read.
        new_tokens: after each.
        quick: whether few levels of each factor should do.
        seed: of the covering design.
    """

    prompts: Sequence[prompts.Source]
    new_tokens: int
    quick: bool = False
    seed: int = 0


def verify(
    source: ModelSource,
    paths: PathOptions | None,
    cells: CellOptions | None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    weights: str = "exact",
    threads: int | None = None,
    progress: Progress = silent,
) -> Report:
    """Compares all paths, and runs all cells, on one model, in its compute dtype and in fp32.

    Args:
        source: the model.
        paths, cells: what to run; None leaves it out.
        dtype, device, weights, threads: as `LLM` takes them.
        progress: told of every token of every path, and of every cell.

    Raises:
        RequestError: if a prompt and the tokens asked for do not fit.
        ConfigError, ModelLoadError: as `LLM` does.
    """
    runs: list[Run] = []
    measured: list[Rounding] = []
    kept: dict[str, dict[str, int]] = {}
    cell_runs: CellRuns | None = None
    length = 0
    done: set[torch.dtype] = set()
    for name in (dtype, "fp32"):
        llm = LLM(source, dtype=name, device=device, weights=weights, threads=threads)
        if llm.model.dtype in done:
            break  # its compute dtype is fp32
        done.add(llm.model.dtype)
        kept[DTYPE_NAMES[llm.model.dtype]] = count_packings(llm.model.packings)
        open_other = cache(partial(_open_other, source, llm.model))
        if cells is not None and cell_runs is None:
            cell_runs = _design(llm, cells, progress)  # before the paths, for it refuses prompts that cannot be read
        if paths is not None:
            ids = llm.encode(paths.prompt)
            length = len(ids)
            in_dtype, rounding = compare(
                llm.parts,
                llm.dense,
                llm.engine_config,
                ids,
                paths.new_tokens,
                dtype=llm.model.dtype,
                other=partial(_run_other, open_other),
                piece=_piece(llm.tokenizer),
                progress=progress,
            )
            runs += in_dtype
            measured.append(rounding)
        if cell_runs is not None:
            cell_runs.run(_bench(llm, open_other))
        del llm, open_other
        gc.collect()  # engines and requests refer to each other: let go of one model before the next is loaded
    cells_report = None if cell_runs is None else cell_runs.report
    return Report(source.name, length, tuple(runs), tuple(measured), cells_report, kept)


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
    vocab_size = parts.sampler.vocab_size  # without the rows that only pad the model's
    read = [*prompt_ids, *text[:-1]]
    controls = [split_logits(dense, read, new_tokens, dtype)[:, :vocab_size]]
    share = LARGEST_SHARE[name]
    if (exact := with_exact_products(dense)) is not None:
        controls.append(whole_logits(exact, read, new_tokens)[:, :vocab_size])
        share = PACKED_SHARE
    rounding = measure_rounding(dtype, reference, *controls, largest_share=share)
    bounds: dict[str, Rounding] = {}
    runs = [judge_reference(CACHE_FREE, reference, rounding)]
    paths: dict[str, Callable[[Step], Record]] = {
        CACHED: lambda on_step: run_cached(parts, config, prompt_ids, text, on_step),
        IN_COMPANY: lambda on_step: run_in_company(parts, config, prompt_ids, text, on_step),
    }
    if other is not None:
        paths[TRANSFORMERS] = lambda on_step: other(prompt_ids, text, vocab_size, on_step)
        coarse = whole_logits(with_coarse_angles(dense), read, new_tokens)[:, :vocab_size]
        bounds[TRANSFORMERS] = measure_rounding(dtype, reference, *controls, coarse, largest_share=share)
    for path, run in paths.items():
        try:
            record = run(step(path))
        except PathUnavailableError as reason:
            runs.append(Run(path, name, "not run", reason=str(reason)))
        except Exception as error:  # a broken engine may raise anything
            runs.append(Run(path, name, "fault", reason=str(error) if isinstance(error, KvineError) else repr(error)))
        else:
            bound = bounds.get(path, rounding)
            runs.append(judge(path, record, reference, bound, prompt_tokens=len(prompt_ids), piece=piece))
    return runs, rounding


def _check_room(parts: EngineParts, config: EngineConfig, prompt_tokens: int, new_tokens: int) -> None:
    """Says before the first of many minutes that the text will not fit."""
    if new_tokens < 1:
        raise RequestError(f"Comparing needs at least 1 new token; {new_tokens} were asked for.")
    total = prompt_tokens + new_tokens
    if parts.max_context is not None and total > parts.max_context:
        raise RequestError(
            f"The prompt's {prompt_tokens} tokens and {new_tokens} new ones exceed the model's context of "
            f"{parts.max_context}: generate fewer, or give a shorter prompt."
        )
    if not parts.manager.fits_ever(total, config.max_step_tokens):
        raise RequestError(f"The cache cannot hold {total} tokens: generate fewer, or give a shorter prompt.")


def _open_other(source: ModelSource, model: LoadedModel) -> TransformersPath:
    """The other library on the same file, if that holds the same weights."""
    if model.rounds_weights:
        raise PathUnavailableError("the weights were rounded on loading, and transformers would take those of the file")
    return TransformersPath(source, model.dtype, model.device)


def _run_other(
    open_other: Callable[[], TransformersPath],
    prompt_ids: Sequence[int],
    text: Sequence[int],
    vocab_size: int,
    on_step: Step,
) -> Record:
    """Loads the other library's model only when its turn comes."""
    return open_other().run(prompt_ids, text, vocab_size, on_step)


def _design(llm: LLM, options: CellOptions, progress: Progress) -> CellRuns:
    """The cells of a model whose compute dtype is that of `llm`."""
    if options.new_tokens < 1:
        raise RequestError(f"Comparing needs at least 1 new token; {options.new_tokens} were asked for.")
    encoded = prompts.encode(options.prompts, lambda prompt: checked_ids(llm.encode(prompt), llm.parts.vocab_size))
    dtypes = tuple(dict.fromkeys((DTYPE_NAMES[llm.model.dtype], "fp32")))
    scope = Scope(llm.model.config, encoded, dtypes, options.new_tokens, options.quick, llm.model.device)
    return CellRuns(scope, cover(registered(scope), options.seed), progress)


def _bench(llm: LLM, open_other: Callable[[], TransformersPath]) -> Bench:
    vocab_size, eos_ids = llm.tokenizer.vocab_size, llm.tokenizer.eos_ids
    return Bench(
        DTYPE_NAMES[llm.model.dtype],
        llm.model.config,
        Oracle(llm.model, vocab_size),
        lambda kept, config: standard_parts(llm.model, kept, config, vocab_size=vocab_size, eos_ids=eos_ids),
        lambda: open_other().run,
    )


def _piece(tokenizer: Tokenizer) -> Callable[[int], str]:
    return lambda token: tokenizer.pieces([token])[0]
