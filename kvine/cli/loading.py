"""From options to a loaded model: what is wrong with the options is said before torch is imported."""

from typing import TYPE_CHECKING

from click import get_current_context

from kvine.cli.options import CacheOptions, ModelOptions
from kvine.cli.terminal import ended_by_interrupt, waiting

if TYPE_CHECKING:
    from kvine.llm import LLM


def open_llm(model: ModelOptions, cache: CacheOptions) -> "LLM":
    """Fetches the model if need be and loads it; progress is shown on stderr.

    Raises:
        ConfigError, FetchError, ModelLoadError: with a sentence that says what to do.
    """
    model.check()
    cache_config, engine_config = cache.configs()
    from kvine.cli.progress import FetchProgress
    from kvine.hub import resolve

    with FetchProgress() as progress:
        source = resolve(model.model, progress=progress)
    with waiting(f"loading {source.name}"):
        with ended_by_interrupt():
            from kvine.llm import LLM

        llm = LLM(
            source,
            device=model.device,
            dtype=model.dtype,
            weights=model.weights,
            cache=cache_config,
            engine=engine_config,
            threads=model.threads,
        )
    context = get_current_context(silent=True)
    if context is not None:
        context.call_on_close(llm.close)  # what the folder of --cache-dir does not hold yet is written then
    return llm
