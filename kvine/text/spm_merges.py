"""The merges that a SentencePiece vocabulary implies, and a cache of them.

Such a vocabulary lists pieces with scores and no merges: the best-scored neighbours join first. The BPE of `tokenizers`
wants the pairs by rank, and deriving them for 262,144 pieces takes seconds.
"""

import hashlib
import os
import tempfile
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvine.hub import kvine_home

_FORMAT = b"kvine spm merges 1"


def derive_merges(pieces: Sequence[str], scores: Sequence[float], ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """Pairs of ids by rank, [merges, 2], for the pieces named by `ids` (those that text can be built from).

    Every way to cut a piece into two known ones would be a merge, best-scored piece first, longer left part first. But
    as long as no merge crosses a piece's ends, what lies between evolves as if it stood alone, and that evolution is
    determined: a piece is only ever built in one way, or never. Keeping that one cuts the table to less than half
    and changes no encoding.
    """
    order = sorted((i for i in ids if len(pieces[i]) > 1), key=lambda i: (-scores[i], i))
    rank = {pieces[i]: position for position, i in enumerate(order)}
    id_of = {pieces[i]: i for i in ids}
    merges: list[tuple[int, int]] = []
    for i in order:
        last = _last_merge(pieces[i], id_of, rank)
        if last is not None:
            merges.append((id_of[last[0]], id_of[last[1]]))
    return np.array(merges, dtype=np.int32).reshape(-1, 2)


def _last_merge(piece: str, known: Container[str], rank: Mapping[str, int]) -> tuple[str, str] | None:
    """The two parts that become the piece when it is encoded alone; None if its merges end elsewhere."""
    parts = list(piece)
    if not all(character in known for character in parts):
        return None
    unranked = len(rank)
    while len(parts) > 2:
        best, where = unranked, -1
        for position in range(len(parts) - 1):
            joined = rank.get(parts[position] + parts[position + 1], unranked)
            if joined < best or (joined == best < unranked and len(parts[position]) > len(parts[where])):
                best, where = joined, position
        if where < 0:
            return None
        parts[where : where + 2] = [parts[where] + parts[where + 1]]
    return parts[0], parts[1]


def cached_merges(
    pieces: Sequence[str], scores: npt.NDArray[np.float32], ids: Sequence[int], folder: Path | None = None
) -> npt.NDArray[np.int32]:
    """`derive_merges` through a file in `folder` (default: the user's cache), named by a digest of what goes in.

    The file ends in a digest of its own; a damaged one is derived anew and replaced. A cache that cannot be written is
    done without.
    """
    key = hashlib.sha256(_FORMAT)
    for part in (np.fromiter(map(len, pieces), np.int32).tobytes(), "".join(pieces).encode("utf-8", "surrogatepass")):
        key.update(part)
    key.update(scores.tobytes())
    key.update(np.asarray(ids, np.int32).tobytes())
    path = (folder or kvine_home() / "tokenizers") / f"{key.hexdigest()[:32]}.merges"
    merges = _read(path, len(pieces))
    if merges is None:
        merges = derive_merges(pieces, scores.tolist(), ids)
        with suppress(OSError):
            _write(path, merges)
    return merges


def _read(path: Path, num_pieces: int) -> npt.NDArray[np.int32] | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body, digest = data[:-32], data[-32:]
    if len(body) % 8 or hashlib.sha256(body).digest() != digest:
        return None
    merges = np.frombuffer(body, np.int32).reshape(-1, 2)
    return merges if not merges.size or (merges.min() >= 0 and merges.max() < num_pieces) else None


def _write(path: Path, merges: npt.NDArray[np.int32]) -> None:
    """Writes beside the target and renames, so that a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = merges.tobytes()
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body + hashlib.sha256(body).digest())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
