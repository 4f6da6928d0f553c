import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import spm_metadata

from kvine.text import spm_merges
from kvine.text.spm_merges import cached_merges, derive_merges
from kvine.text.tokenizer import tokenizer_from_gguf

PIECES = {"▁": -90.0, "a": -91.0, "b": -92.0, "▁a": -1.0, "ab": -2.0, "▁ab": -0.5, "ba": -3.0, "aba": -0.1}


def sentencepiece(text: str, pieces: dict[str, float]) -> list[str]:
    """Oracle, after the SentencePiece paper: the best-scored neighbours join, the leftmost first, until none do."""
    parts = list(text)
    while True:
        joins = [(-pieces[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in pieces]
        if not joins:
            return parts
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(max_examples=150, deadline=None)
@given(
    made=st.lists(st.text("abc", min_size=2, max_size=6), min_size=1, max_size=25, unique=True).flatmap(
        lambda pieces: st.tuples(st.just(pieces), st.permutations(range(len(pieces))))
    ),
    texts=st.lists(st.text("abc", min_size=1, max_size=14), min_size=5, max_size=20),
)
def test_encodes_as_sentencepiece_does(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[list[str], list[int]], texts: list[str]
) -> None:
    """Any vocabulary: parts that score worse than the whole, several ways to cut, pieces that are never reached."""
    pieces = {piece: -float(rank) for piece, rank in zip(*made, strict=True)}
    pieces |= {character: -100.0 - i for i, character in enumerate("abc")}
    metadata = spm_metadata(pieces, **{"ggml.add_space_prefix": False, "ggml.add_bos_token": False})
    tokenizer = tokenizer_from_gguf(metadata, cache=tmp_path_factory.getbasetemp())
    for text in [*texts, *pieces]:
        assert tokenizer.pieces(tokenizer.encode(text)) == sentencepiece(text, pieces)


def test_each_piece_is_built_in_one_way() -> None:
    names, scores = list(PIECES), list(PIECES.values())
    merges = derive_merges(names, scores, range(len(names)))
    joined = [(names[a], names[b]) for a, b in merges.tolist()]
    # aba: its "a b" join first (-2 beats -3), so "a" + "ba" never comes about
    assert joined == [("ab", "a"), ("▁a", "b"), ("▁", "a"), ("a", "b"), ("b", "a")]


def test_a_character_outside_the_vocabulary_joins_nothing() -> None:
    assert derive_merges(["a", "ax"], [-2.0, -1.0], [0, 1]).shape == (0, 2)


def test_cache_is_used_and_a_damaged_entry_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, scores = list(PIECES), np.array(list(PIECES.values()), np.float32)
    ids = range(len(names))
    fresh = cached_merges(names, scores, ids, tmp_path)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()

    def refuse(*_: object) -> None:
        raise AssertionError("derived again")

    with monkeypatch.context() as patch:
        patch.setattr(spm_merges, "derive_merges", refuse)
        assert np.array_equal(cached_merges(names, scores, ids, tmp_path), fresh)
        with pytest.raises(AssertionError, match="derived again"):
            cached_merges(names, scores + 1, ids, tmp_path)
    for damaged in (b"", whole[:7], whole[:-1], bytes([whole[0] ^ 1]) + whole[1:], whole + b"12345678"):
        entry.write_bytes(damaged)
        assert np.array_equal(cached_merges(names, scores, ids, tmp_path), fresh)
        assert entry.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]  # no half-written file stays


def test_works_without_a_cache_folder(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    names, scores = list(PIECES), np.array(list(PIECES.values()), np.float32)
    assert len(cached_merges(names, scores, range(len(names)), blocked / "below")) == 5


def test_cache_lies_in_kvine_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVINE_HOME", os.fspath(tmp_path))
    cached_merges(list(PIECES), np.array(list(PIECES.values()), np.float32), range(len(PIECES)))
    assert len(list((tmp_path / "tokenizers").glob("*.merges"))) == 1
