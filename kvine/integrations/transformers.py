"""`KvineCache`: Kvine's codecs and windows as the `past_key_values` of any decoder in transformers.

It is handed keys that are rotated already and must give dense keys and values back, so nothing is faster for it. It
saves memory, and shows what a way of keeping the past does to a model that Kvine does not run.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kvine.cache.layout import is_packed, split_codecs, unpackable
from kvine.cache.spec import CacheSpec
from kvine.config import CacheConfig, SinkRule
from kvine.errors import ConfigError, KvineError, RequestError
from kvine.integrations.kept import KeptTokens

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs
except ImportError as error:
    raise KvineError(
        f"KvineCache needs transformers 5.23 or newer: pip install 'kvine[transformers]' ({error})"
    ) from None

_BIASED_BY_PLACE = ("bloom", "mpt")  # these add a bias for each key's place in what they are given
_NO_COMPILING = (
    "KvineCache grows by blocks, so its shapes are not static: run the model without compiling or exporting it."
)


class KvineCache(Cache):  # type: ignore[misc]
    """The past of a transformers decoder, kept as Kvine keeps it.

    Pass it as `past_key_values` to `model.generate` or to a model call, and a new one for each text. Blocks count
    columns of the batch, padding included.

    *What attention reads.* A codec that works element by element converts every number as it comes, and all queries
    read the converted ones. A codec that packs keeps a block packed once it is full. A call's queries read the blocks
    that were full before the call as the codec decodes them; the open block's tokens, and all tokens of the call
    itself, as they were computed. (In Kvine's own engine a query reads its own block exactly and all earlier ones
    decoded, inside one call too. Here a call gets one K for all its queries, so that a prompt reads itself exactly.)

    *Windows.* A query sees its last `window` tokens and the first `sink_tokens`, in each layer that the model does not
    limit to as few or fewer itself. The masks that transformers builds know nothing of such a window, so what lies
    outside is left out of what is returned. That is right for one query: a call of several tokens that reaches past
    window and sinks is refused. A longer prompt is read token by token with `generate(..., prefill_chunk_size=1)`.

    Args:
        config: the model's config (`model.config`).
        kv_dtype: what keeps K and V: `exact`, `fp32`, `fp16`, `bf16`, `int8`, `int4`, `int2`, `KEYS/VALUES` with one of
            these for each, `k8v4` for short, or `int4-token` with keys scaled by token instead of by channel.
        block_size: tokens in a block, which a packed codec packs together.
        window: if given, how many last tokens a query sees, itself included.
        sink_tokens: first tokens of a text that stay visible past the window, at their true distance.
        sink_rule: only `absolute`.
        attention_mask: [B, N] of 0 for padding on the left and 1 for tokens, as for `generate`. Needed with sinks and
            more than one row, because a cache does not see which tokens are padding.

    Raises:
        ConfigError: for an option, or a model, that this cannot work with.
    """

    def __init__(
        self,
        config: Any,
        *,
        kv_dtype: str = "exact",
        block_size: int = 32,
        window: int | None = None,
        sink_tokens: int = 0,
        sink_rule: SinkRule = "absolute",
        attention_mask: Tensor | None = None,
    ) -> None:
        options = CacheConfig(block_size=block_size, window=window, sink_tokens=sink_tokens, sink_rule=sink_rule)
        try:
            codecs = split_codecs(kv_dtype)
        except ValueError:
            raise ConfigError(
                f"kv_dtype {kv_dtype!r} is unknown: choose exact, fp32, fp16, bf16, int8, int4, int2, KEYS/VALUES with "
                "one of these for each, or k8v4 and its like."
            ) from None
        if reason := unpackable("key", codecs[0], block_size, 8):
            raise ConfigError(reason)
        if options.sink_rule != "absolute":
            raise ConfigError(
                "In-cache sinks need a second rotation of the queries, and a cache is handed keys alone, rotated "
                "already: give sink_rule='absolute'."
            )
        padding = None if attention_mask is None else _left_padding(attention_mask)
        super().__init__(layers=_layers(config, options, codecs, padding))

    @property
    def num_bytes(self) -> int:
        """Exact bytes of all keys and values that are kept."""
        return sum(layer.num_bytes for layer in self.layers)

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Refused: what is made beforehand has static shapes."""
        raise ConfigError(_NO_COMPILING)

    def activate_past_recording(self) -> None:
        """Keeps what a window would let go until the next `crop`, as assisted decoding asks for.

        Raises:
            ConfigError: where drafts cannot be taken back.
        """
        for layer in self.layers:
            if layer.limited:
                raise ConfigError(
                    "Assisted decoding checks several tokens in one call, which KvineCache cannot mask with a window."
                )
            if not layer.is_croppable:
                raise ConfigError(
                    "Assisted decoding takes drafts back, also out of blocks that are packed by then: give a kv_dtype "
                    "that works element by element (exact, fp32, fp16, bf16)."
                )
        for layer in self.layers:
            layer.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last tokens away.

        Args:
            tokens_to_remove: how many, as a negative number, as transformers has it; 0 takes none.

        Raises:
            RequestError: if there are not so many, if they end inside a packed block, or if the window has let go of
                what the text before them needs. Nothing has changed then.
        """
        if tokens_to_remove > 0:
            raise RequestError(
                f"crop({tokens_to_remove}) is unclear: give the number of tokens to take away as a negative number."
            )
        for layer in self.layers:
            layer.check_crop(-tokens_to_remove)
        super().crop(tokens_to_remove)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `KvineCache`.

    Args:
        spec: what its queries see.
        codecs: of keys and of values.
        is_sliding: whether the model limits it itself, and masks it accordingly.
        limited: whether the window is the user's.
        padding: [rows] int64, columns of padding on the left of each row; None for none.
    """

    def __init__(
        self, spec: CacheSpec, codecs: tuple[str, str], *, is_sliding: bool, limited: bool, padding: Tensor | None
    ) -> None:
        super().__init__()
        self._spec, self._codecs, self._given_padding = spec, codecs, padding
        self.is_sliding, self.limited = is_sliding, limited
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self._keys: KeptTokens | None = None
        self._values: KeptTokens | None = None
        self._blocks: list[int] = []  # numbers of the sealed blocks that are kept
        self._length = 0
        self._padding = self._given_padding
        self.is_initialized = False

    @property
    def _kept(self) -> Iterable[KeptTokens]:
        return (part for part in (self._keys, self._values) if part is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return sum(part.num_bytes for part in self._kept)

    @property
    def is_croppable(self) -> bool:
        """Whether drafts can be read in one call and be taken back."""
        return not self.limited and not self._packs

    @property
    def _packs(self) -> bool:
        return any(is_packed(codec) for codec in self._codecs)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Sees what keys and values look like, each [B, H, n, D]; keeps none."""
        rows = key_states.shape[0]
        if self._spec.sink_tokens and self._padding is None and rows > 1:
            raise ConfigError(
                "Sinks are each row's first tokens, and a cache does not see which of several rows are padded: give "
                "KvineCache the batch's attention_mask (of ones if there is no padding)."
            )
        if self._padding is not None and rows % len(self._padding):
            raise RequestError(
                f"attention_mask has {len(self._padding)} rows and the batch has {rows}: make a new KvineCache."
            )
        size = self._spec.block_size
        keys = KeptTokens("key", self._codecs[0], size, key_states)
        self._keys, self._values = keys, KeptTokens("value", self._codecs[1], size, value_states)
        if self._padding is not None:
            self._padding = self._padding.repeat_interleave(rows // len(self._padding))  # as generate expands to beams
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keeps a call's keys and values, [B, H, n, D] each, and returns what its queries read."""
        if torch.compiler.is_compiling():
            raise ConfigError(_NO_COMPILING)
        new = key_states.shape[2]
        self._check_call(new)
        if self._keys is None or self._values is None:
            self.lazy_initialization(key_states, value_states)
        assert self._keys is not None and self._values is not None
        if len(self._keys.open) != len(key_states):
            raise RequestError(
                f"The cache holds {len(self._keys.open)} rows, and the call has {len(key_states)}: "
                "make a new KvineCache."
            )
        kv_length, _ = self.get_mask_sizes(new)
        size, sealed = self._spec.block_size, self._length // self._spec.block_size
        self._length += new
        read = []
        for part, states in ((self._keys, key_states), (self._values, value_states)):
            past = part.all()  # before the new tokens can fill and pack a block
            read.append(self._visible(torch.cat((past, part.append(states)), 2), kv_length))
        self._blocks += range(sealed, self._length // size)
        if not self.record_past:
            self._let_go()
        return read[0], read[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys a call of `query_length` tokens is given, and the column of the first.

        Sinks stand directly before the window, as many columns as are left of it: padding counts from the left, so that
        exactly the columns of a row's padding are masked that hold none of its tokens.
        """
        self._check_call(query_length)
        total = self._length + query_length
        if self.limited:
            assert self._spec.window is not None
            kv_length = min(total, self._spec.window + self._spec.sink_tokens)
            return kv_length, total - kv_length
        start = self._spec.window_start(self._length)
        return total - start, start

    def get_seq_length(self) -> int:
        """Tokens of the text so far, kept or let go."""
        return self._length

    def get_max_length(self) -> int:
        """-1: a text may be of any length."""
        return -1

    def check_crop(self, count: int) -> None:
        """Raises RequestError if the last `count` tokens cannot be taken away."""
        left, size = self._length - count, self._spec.block_size
        if not self.is_initialized or not count:
            return
        if left < 0:
            raise RequestError(f"The cache holds {self._length} tokens, and {count} cannot be taken away.")
        if self._packs and left // size < self._length // size and left % size:
            raise RequestError(
                f"{left} tokens would end inside a packed block of {size}: crop to a multiple of {size}, or give a "
                "kv_dtype that works element by element."
            )
        needed = set(range(self._spec.window_start(left) // size, self._spec.num_blocks(left)))
        if needed - {*self._blocks, self._length // size}:
            raise RequestError(f"The window has let go of what {left} tokens need: read the text anew.")

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last -tokens_to_remove tokens away, which `check_crop` has allowed."""
        if not self.is_initialized:
            return
        left, size = self._length + tokens_to_remove, self._spec.block_size
        full = [block for block in self._blocks if block < left // size]
        if tokens_to_remove:
            for part in self._kept:
                part.crop(len(full), left % size)
            self._blocks, self._length = full, left
        self._let_go()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes row i what row beam_idx[i] was."""
        for part in self._kept:
            part.select_rows(beam_idx)
        if self._padding is not None and self.is_initialized:
            self._padding = self._padding[beam_idx.to(self._padding.device)]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only these rows."""
        self.reorder_cache(torch.as_tensor(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        if self._keys is not None:
            self.reorder_cache(torch.arange(len(self._keys.open)).repeat_interleave(repeats))

    def _check_call(self, num_tokens: int) -> None:
        if not self.limited or num_tokens == 1:
            return
        assert self._spec.window is not None
        most = self._spec.window + self._spec.sink_tokens
        if self._length + num_tokens > most:
            raise RequestError(
                f"{num_tokens} tokens in one call reach past the {most} of window and sinks, and no mask hides from "
                "each what is outside of its own: read one at a time, in generate with prefill_chunk_size=1."
            )

    def _visible(self, tokens: Tensor, kv_length: int) -> Tensor:
        """Of all tokens kept and new, [B, H, N, D], those that the call reads: [B, H, kv_length, D]."""
        window = self._spec.window
        outside = max(0, self._length - window) if window is not None and self.limited else 0
        sinks = min(self._spec.sink_tokens, outside)
        if not sinks:
            return tokens[:, :, tokens.shape[2] - kv_length :]
        assert window is not None
        recent = tokens[:, :, tokens.shape[2] - window :]
        if self._padding is None:
            return torch.cat((tokens[:, :, :sinks], recent), 2)
        first = self._padding.to(tokens.device)[:, None]  # [B, 1]
        own = (outside - first).clamp(0, self._spec.sink_tokens)  # sinks that lie outside of the window, by row
        slot = torch.arange(sinks, device=tokens.device) - (sinks - own)  # [B, sinks]; negative where padding is masked
        columns = torch.where(slot < 0, 0, first + slot)
        heads, width = tokens.shape[1], tokens.shape[3]
        columns = columns[:, None, :, None].expand(-1, heads, -1, width)
        return torch.cat((tokens.gather(2, columns), recent), 2)

    def _let_go(self) -> None:
        """Drops the blocks that no later query sees."""
        dead = self._spec.passed_blocks(self._length)
        padding = int(self._padding.max()) if self._padding is not None else 0
        sinks = self._spec.num_blocks(self._spec.sink_tokens + padding) if self._spec.sink_tokens else 0
        alive = [i for i, block in enumerate(self._blocks) if block < sinks or block not in dead]
        if len(alive) < len(self._blocks):
            for part in self._kept:
                part.keep_blocks(alive)
            self._blocks = [self._blocks[i] for i in alive]


def _left_padding(attention_mask: Tensor) -> Tensor:
    """Columns of padding on the left of each row: [B, N] of 0 and 1 → [B] int64."""
    mask = attention_mask.detach().to("cpu", torch.bool)
    if mask.ndim != 2 or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ConfigError(
            "attention_mask must be [rows, tokens], with padding on the left only: set padding_side='left'."
        )
    return (~mask).sum(1)


def _layers(config: Any, options: CacheConfig, codecs: tuple[str, str], padding: Tensor | None) -> list["_Layer"]:
    """A layer of the cache for each of the model's."""
    decoder = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError("KvineCache is for decoders: an encoder-decoder has a second cache, of its encoder.")
    biased = decoder.model_type in _BIASED_BY_PLACE or getattr(decoder, "alibi", False)
    if options.window is not None and biased:
        raise ConfigError(
            "This model adds a bias by each key's place (ALiBi), which a window would shift: give no window."
        )
    layers = []
    for index, (kind, arguments) in enumerate(zip(*get_layer_types_and_kwargs(decoder), strict=True)):
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            raise ConfigError(f"Layer {index} is of the kind {kind}, and KvineCache keeps plain keys and values only.")
        own: int | None = arguments.get("sliding_window")
        if kind == "chunked_attention" and options.window is not None:
            raise ConfigError(
                "This model attends in chunks, which KvineCache cannot combine with a window: give no window."
            )
        limited = options.window is not None and (own is None or options.window < own)
        window, sinks = (options.window, options.sink_tokens) if limited else (own, 0)
        if limited and own is not None and window is not None and window + sinks > own:
            raise ConfigError(
                f"Layer {index} sees {own} tokens and masks all before them, sinks too: give a window and sinks of at "
                f"most {own} together, or a window of at least {own}."
            )
        spec = CacheSpec((index,), 1, 1, options.block_size, window, sinks)  # only what is visible is asked of it
        layers.append(
            _Layer(spec, codecs, is_sliding=own is not None, limited=limited, padding=padding if sinks else None)
        )
    return layers
