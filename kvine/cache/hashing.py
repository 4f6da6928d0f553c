"""Keys of blocks: each names its tokens and, through its parent's key, everything before them.

Parts are length-prefixed, so that two different lists of parts never read alike.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence

HashFunction = Callable[[bytes], bytes]


def digest(data: bytes) -> bytes:
    """BLAKE2b of `data`, 16 bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def framed(parts: Iterable[bytes | str | None]) -> bytes:
    """Joins parts so that the result tells where each ends, and None from empty."""
    out = bytearray()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        out += b"-" if data is None else b"+" + len(data).to_bytes(8, "little") + data
    return bytes(out)


def block_key(parent: bytes, tokens: Sequence[int], hash_function: HashFunction = digest) -> bytes:
    """Key of the block that holds `tokens` after the block named `parent`."""
    return hash_function(framed((parent, array("q", tokens).tobytes())))


def namespace_key(
    fingerprint: bytes,
    dtype: str,
    specs: Sequence[object],
    *,
    adapter: str | None = None,
    salt: str | None = None,
) -> bytes:
    """Key of the root of a tree of blocks that may be shared: all that K and V depend on beside the tokens.

    Args:
        fingerprint: of the weights, their packing and the RoPE tables.
        dtype: compute dtype.
        specs: the specs of *all* groups, for one layer's K and V depend on how earlier layers were cached.
        adapter: name of an adapter on the weights, if any.
        salt: a secret that separates tenants; None and an empty text are two different namespaces.
    """
    return digest(framed((fingerprint, dtype, repr(tuple(specs)), adapter, salt)))
