"""The keys or the values of one layer of a batch: whole blocks as their codec keeps them, the open block beside them.

Rows of a batch are as long as each other, padding included, and end in the same place of the same block.
"""

import torch
from torch import Tensor

from kvine.cache.codec import encode, pack, storage_dtype, unpack
from kvine.cache.layout import PackedLayout, Part, is_packed, packed_layout, unpackable
from kvine.errors import ConfigError


class KeptTokens:
    """Keys or values that grow by tokens and are kept by blocks.

    A codec that works element by element converts each number as it comes. One that packs keeps a block packed once
    it is full, and nothing else of it; the tokens of the open block stay as they came.

    Args:
        part: whether these are keys or values.
        codec: what keeps them.
        block_size: tokens in a block.
        first: [B, H, n, D] or fewer tokens, none of which is kept: the shape, dtype and device of what will come.

    Raises:
        ConfigError: if the codec cannot pack blocks of this shape.
    """

    def __init__(self, part: Part, codec: str, block_size: int, first: Tensor) -> None:
        if reason := unpackable(part, codec, block_size, first.shape[-1]):
            raise ConfigError(reason)
        self._block_size = block_size
        self._dtype = first.dtype
        self._layout: PackedLayout | None = None
        stored, shape = first.dtype, (block_size, first.shape[-1])
        if is_packed(codec):
            self._layout = packed_layout(part, codec, block_size, first.shape[-1])
            sealed = first.new_empty((*first.shape[:2], 0, self._layout.num_bytes), dtype=torch.uint8)
        else:
            stored = storage_dtype(codec, first.dtype)
            sealed = first.new_empty((*first.shape[:2], 0, *shape), dtype=stored)
        self.sealed = sealed  # [B, H, blocks, bytes] packed, or [B, H, blocks, T, D]
        self.open = first.new_empty((*first.shape[:2], 0, first.shape[-1]), dtype=stored)  # [B, H, fewer than T, D]

    @property
    def num_bytes(self) -> int:
        """Bytes of everything that is kept."""
        return self.sealed.nbytes + self.open.nbytes

    def all(self) -> Tensor:
        """All that is kept, in the model's dtype: [B, H, blocks · T + open, D]."""
        tokens = encode(self.open, self._dtype)
        if not self.sealed.shape[2]:
            return tokens
        blocks = self.sealed if self._layout is None else unpack(self.sealed, self._layout)
        return torch.cat((encode(blocks, self._dtype).flatten(2, 3), tokens), 2)

    def append(self, values: Tensor) -> Tensor:
        """Keeps more tokens: [B, H, n, D] in the model's dtype; returned as attention is given them in this call.

        That is as they came where blocks are packed, and as they are stored where each number is converted by itself.
        """
        stored = values if self._layout else encode(values, self.open.dtype)
        tokens = torch.cat((self.open, stored.detach()), 2)
        full = tokens.shape[2] // self._block_size
        if full:
            whole = tokens[:, :, : full * self._block_size]
            blocks = whole.reshape(*whole.shape[:2], full, self._block_size, whole.shape[3])
            self.sealed = torch.cat((self.sealed, pack(blocks, self._layout) if self._layout else blocks), 2)
            tokens = tokens[:, :, full * self._block_size :].clone()  # a view would keep the whole blocks alive
        self.open = tokens
        return stored if self._layout else encode(stored, self._dtype)

    def keep_blocks(self, indices: list[int]) -> None:
        """Drops all sealed blocks but those at these places."""
        self.sealed = self.sealed[:, :, indices]

    def crop(self, num_blocks: int, num_open: int) -> None:
        """Leaves the first `num_blocks` sealed blocks and `num_open` tokens after them.

        Tokens inside a sealed block open it again, which only codecs can that work element by element.
        """
        if num_blocks < self.sealed.shape[2]:
            assert not num_open or self._layout is None, "a packed block does not open again"
            after = self.sealed[:, :, num_blocks] if num_open else self.open
            self.sealed = self.sealed[:, :, :num_blocks].clone()
        else:
            after = self.open
        self.open = after[:, :, :num_open].clone()

    def select_rows(self, rows: Tensor) -> None:
        """Makes row i of the batch what row rows[i] was: [rows], int64."""
        rows = rows.to(self.open.device)
        self.sealed, self.open = self.sealed[rows], self.open[rows]
