"""The path that shares no line with Kvine: transformers' own `generate`, loaded from the same file."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import Tensor

from kvine.evidence.paths import Record, Step
from kvine.hub import ModelSource

# A path of another library: prompt, text to be held to, vocabulary size, what to tell.
OtherPath = Callable[[Sequence[int], Sequence[int], int, Step], Record]


class PathUnavailableError(Exception):
    """A path that cannot run here; the message says why."""


class TransformersPath:
    """transformers' own `generate`, on the same file.

    Args:
        source: the model.
        dtype, device: as Kvine computes.

    Raises:
        PathUnavailableError: if transformers is missing or cannot load the model.
    """

    def __init__(self, source: ModelSource, dtype: torch.dtype, device: torch.device) -> None:
        try:
            import transformers
        except ImportError:
            raise PathUnavailableError("transformers is not installed: pip install 'kvine[verify]'") from None
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._transformers: Any = transformers
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.path)}
        if source.format == "gguf":
            where = {
                "pretrained_model_name_or_path": str(source.path.parent),
                "gguf_file": source.path.name,
                "quantization_config": transformers.GgufConfig(dequantize=True),
            }
        try:
            with redirect_stderr(io.StringIO()):  # its bars cannot all be turned off, and would run into ours
                model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                    **where, dtype=dtype, local_files_only=True, output_loading_info=True
                )
        except Exception as error:  # whatever a library of that size may raise
            raise PathUnavailableError(f"transformers cannot load it: {type(error).__name__}: {error}") from error
        if missing := sorted(loading["missing_keys"]):  # it would fill these at random
            raise PathUnavailableError(f"transformers does not find {len(missing)} tensors of it, such as {missing[0]}")
        self._model: Any = model.to(device).eval()
        self._model.generation_config = transformers.GenerationConfig()  # no EOS, no sampling, no length of its own

    @torch.inference_mode()
    def run(self, prompt_ids: Sequence[int], text: Sequence[int], vocab_size: int, on_step: Step) -> Record:
        """Generates greedily by transformers' own cache, held to `text`; PathUnavailableError where that fails."""
        chosen: list[int] = []
        logits: list[Tensor] = []

        def hold(_: Tensor, scores: Tensor) -> Tensor:
            chosen.append(int(scores[0, :vocab_size].argmax()))
            logits.append(scores[0, :vocab_size].float().cpu().clone())
            on_step(len(chosen))
            held = torch.full_like(scores, -torch.inf)
            held[0, text[len(chosen) - 1]] = 0
            return held

        on_step(0)  # loaded
        ids = torch.tensor([list(prompt_ids)], device=self._model.device)
        try:
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=len(text),
                pad_token_id=0,
                logits_processor=self._transformers.LogitsProcessorList([hold]),
            )
        except Exception as error:
            raise PathUnavailableError(f"transformers cannot run it: {type(error).__name__}: {error}") from error
        return Record(chosen, torch.stack(logits))
