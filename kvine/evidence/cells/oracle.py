"""What each cell is compared with: the cache-free path with the same visibility and loss, and a measured bound."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvine.attention.dense import DenseAttention
from kvine.config import PER_TOKEN, CacheConfig, is_packed
from kvine.engine.build import DTYPE_NAMES, dense_attention
from kvine.engine.cache_free import DenseRunner
from kvine.evidence.cells.beams import Line, longest
from kvine.evidence.cells.quantizer import block_loss
from kvine.evidence.cells.setup import Prompt, Setup
from kvine.evidence.coarse_angles import with_coarse_angles
from kvine.evidence.exact_products import with_exact_products
from kvine.evidence.judge import LARGEST_SHARE, MARGIN, PACKED_SHARE, Rounding, measure_rounding
from kvine.evidence.locate import StateTrace
from kvine.evidence.paths import Record
from kvine.evidence.row_split import split_logits, whole_logits
from kvine.models.load import LoadedModel
from kvine.spans import Spans

UNSTEADY = 4.0  # times as far may rounding move what a window without sinks has cut off from its beginning
# Of the logits' range, what numbers that fall to the other of two steps may move them: a few of those that are packed.
PACKED_KV_SHARE = {"int8": 0.1, "int4": 0.2, "int2": 0.4}
LOSSY = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Reference:
    """What a cell should compute, and how much rounding may change it."""

    record: Record
    rounding: Rounding


class Oracle:
    """The cache-free path of one model in one dtype. Keeps what it has computed: many cells share a reference.

    Args:
        model: the loaded model.
        vocab_size: ids that the tokenizer knows.
    """

    def __init__(self, model: LoadedModel, vocab_size: int) -> None:
        self._model = model
        self.vocab_size = min(vocab_size, model.config.vocab_size)
        self._references: dict[object, Reference] = {}

    def choose_text(self, prompt: Prompt, new_tokens: int) -> Prompt:
        """The prompt with the text that cells are held to: its own if it has one, otherwise the greedy one."""
        text = list(prompt.text[:new_tokens])
        dense = self._dense(CacheConfig())
        while len(text) < new_tokens:
            logits = whole_logits(dense, [*prompt.ids, *text], 1)[:, : self.vocab_size]
            text.append(int(logits.argmax()))
        return replace(prompt, text=tuple(text))

    def reference(self, setup: Setup) -> Reference:
        """What a cell is compared with."""
        cache = setup.cache
        size = cache.block_size if _packs(cache) else None  # where a block ends matters only to what packs it
        kept = (cache.window, cache.sink_tokens, cache.sink_rule, cache.global_tokens, setup.pinned)
        key = (setup.prompt, kept, cache.kv_dtype, size)
        if key not in self._references:
            self._references[key] = self._compute(setup)
        return self._references[key]

    def reference_of_others(self, setup: Setup) -> Reference:
        """What a cell by another library is compared with: such a one may compute angles in fp32."""
        reference, (ids, count) = self.reference(setup), _text(setup)
        coarse = whole_logits(with_coarse_angles(self._dense(setup.cache, setup.pinned)), ids, count)[
            :, : self.vocab_size
        ]
        off = MARGIN * float((coarse - reference.record.logits).abs().max())
        rounding = reference.rounding
        return replace(reference, rounding=replace(rounding, bound=max(rounding.bound, min(off, rounding.limit))))

    def after(self, setup: Setup, lines: Sequence[Line]) -> dict[Line, Tensor]:
        """Logits [vocabulary] of the token after each of these texts behind the prompt, and after their beginnings."""
        dense, found = self._dense(setup.cache, setup.pinned), {}
        for line in longest(lines):
            rows = whole_logits(dense, [*setup.prompt.ids, *line], len(line) + 1)[:, : self.vocab_size]
            found.update({line[:count]: row for count, row in enumerate(rows)})
        return found

    def trace(self, setup: Setup) -> StateTrace:
        """All hidden states of a cell's text."""
        ids, count = _text(setup)
        return StateTrace(self._dense(setup.cache, setup.pinned), ids, count, self._model.dtype)

    def _compute(self, setup: Setup) -> Reference:
        ids, count = _text(setup)
        dense = self._dense(setup.cache, setup.pinned)
        logits = whole_logits(dense, ids, count)[:, : self.vocab_size]
        controls = [split_logits(dense, ids, count, self._model.dtype)[:, : self.vocab_size]]
        if (other := with_exact_products(dense)) is not None:
            controls.append(whole_logits(other, ids, count)[:, : self.vocab_size])
        record = Record(logits.argmax(1).tolist(), logits)
        share = self._largest_share(setup.cache)
        rounding = measure_rounding(self._model.dtype, record, *controls, largest_share=share)
        if _packs(setup.cache) or self._keep(setup.cache) is not None:
            # Whether a value lies above or below the middle of two that can be stored is up to rounding too, and a
            # single one that falls the other way shows in no control. All together they make less than the loss.
            exact = whole_logits(self._dense(replace(setup.cache, kv_dtype="exact"), setup.pinned), ids, count)
            loss = float((exact[:, : self.vocab_size] - logits).abs().max())
            rounding = replace(rounding, bound=max(MARGIN * rounding.measured, rounding.bound, loss))
        return Reference(record, rounding)

    def _largest_share(self, cache: CacheConfig) -> float:
        """Of the logits' range, what rounding may move them: that of the coarsest dtype that a value passes through.

        A model leans on its first tokens. Where a window has left them behind, its states are large and unsteady, and
        the same noise moves its logits further (SmolLM2 in bf16: by 14.5 % of their range with a window of 12).
        """
        share = LARGEST_SHARE[DTYPE_NAMES[self._model.dtype]]
        if _packs(cache):
            share = max(share, *(PACKED_KV_SHARE.get(codec.removesuffix(PER_TOKEN), 0) for codec in cache.codecs))
        elif self._keep(cache) is not None:
            share = max(share, LARGEST_SHARE[cache.kv_dtype])
        if self._model.packings:
            share = max(share, PACKED_SHARE)
        unsteady = cache.window is not None and cache.sink_tokens == 0
        return UNSTEADY * share if unsteady else share

    def _dense(self, cache: CacheConfig, pinned: Spans = ()) -> DenseRunner:
        keep, loss = self._keep(cache), None
        if _packs(cache) or (keep is not None and cache.sink_rule == "in_cache" and cache.sink_tokens):
            keep, loss = None, block_loss(cache)
        attention: DenseAttention = dense_attention(self._model, cache, keep=keep, loss=loss)
        return DenseRunner(self._model.decoder, attention.pinning(pinned), self._model.device)

    def _keep(self, cache: CacheConfig) -> Callable[[Tensor], Tensor] | None:
        """What a lossy cache makes of a value, written apart from `kvine.cache.codec`."""
        if cache.kv_dtype not in LOSSY or cache.kv_dtype == DTYPE_NAMES[self._model.dtype]:
            return None
        stored = LOSSY[cache.kv_dtype]
        largest = torch.finfo(stored).max
        return lambda values: values.float().clamp(-largest, largest).to(stored).to(values.dtype)


def _packs(cache: CacheConfig) -> bool:
    return any(is_packed(codec) for codec in cache.codecs)


def _text(setup: Setup) -> tuple[Sequence[int], int]:
    """The whole text but its last token, which is never fed, and how many of its logits are compared."""
    return [*setup.prompt.ids, *setup.prompt.text[:-1]], len(setup.prompt.text)
