import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import ScriptedTokens, bytes_only

from kvine.errors import RequestError
from kvine.text.stream import TextStream

BYTES = bytes_only()


def run(stream: TextStream, ids: list[int], take_after: set[int]) -> tuple[list[str], bool]:
    """What each `take` and the final `finish` gave; `take_after`: positions of tokens to take after."""
    given_out, stopped = [], False
    for position, token in enumerate(ids):
        stopped = stream.append(token)
        if position in take_after:
            given_out.append(stream.take())
        if stopped:
            break
    given_out.append(stream.finish())
    return given_out, stopped


def cut(text: str, stops: list[str]) -> str:
    """Oracle, character by character: the stop string that is complete first ends the text."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


unicode_bytes = st.lists(
    st.one_of(
        st.sampled_from(["😀", "👨‍👩‍👧‍👦", "中", "文", "é", "A", " ", "\n", "�"]).map(str.encode),
        st.binary(min_size=1, max_size=3),
        st.text(max_size=2).map(lambda text: text.encode("utf-8", "replace")),
    ),
    max_size=12,
).map(b"".join)


@settings(max_examples=100, deadline=None)
@given(data=unicode_bytes, seed=st.integers(0, 10**6))
def test_c06_stream_equals_one_shot_decode(data: bytes, seed: int) -> None:
    rng = random.Random(seed)
    stream = TextStream(BYTES)
    parts, _ = run(stream, list(data), {i for i in range(len(data)) if rng.random() < 0.5})
    whole = data.decode("utf-8", errors="replace")
    assert "".join(parts) == whole == stream.text
    assert BYTES.decode(list(data)) == whole
    assert BYTES.backend.decode(list(data)) == whole  # the library's own view of the same bytes


@settings(max_examples=100, deadline=None)
@given(data=unicode_bytes)
def test_c06_characters_appear_when_their_last_byte_comes(data: bytes) -> None:
    """Never later than needed, never a lossy half: what is out is a prefix of the whole at every step."""
    stream, out = TextStream(BYTES), ""
    whole = data.decode("utf-8", errors="replace")
    for end, byte in enumerate(data, start=1):
        stream.append(byte)
        out += stream.take()
        assert whole.startswith(out)
        valid = data[:end].decode("utf-8", errors="ignore") if _complete(data[:end]) else None
        assert valid is None or out == valid
    assert out + stream.finish() == whole


def _complete(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_c06_last_call_flushes_a_character_cut_short() -> None:
    stream = TextStream(BYTES)
    for byte in "A中".encode() + "😀".encode()[:3]:
        stream.append(byte)
    assert stream.take() == "A中"
    assert stream.finish() == "�"
    assert stream.text == "A中�"


def test_special_and_unknown_ids_add_nothing_even_inside_a_character() -> None:
    stream = TextStream(BYTES)
    first, *rest = "中".encode()
    for token in [first, 256, 999_999, *rest]:
        stream.append(token)
    assert stream.finish() == "中"


def test_c04_stop_string_over_several_tokens() -> None:
    tokens = ScriptedTokens(["ABC", "DEF", "G", "HI", "J", "never"])
    stream = TextStream(tokens, ["DEFGHIJ"])
    assert [(stream.append(i), stream.take()) for i in range(5)] == [
        (False, "ABC"), (False, ""), (False, ""), (False, ""), (True, "")
    ]  # fmt: skip
    assert stream.append(5)  # what comes after is ignored
    assert stream.finish() == ""
    assert stream.text == "ABC"


def test_c04_held_text_comes_out_when_it_is_no_stop_string_after_all() -> None:
    tokens = ScriptedTokens(["xDEF", "GH", "D", "EFG"])
    stream = TextStream(tokens, ["DEFGHIJ"])
    seen = []
    for i in range(4):
        stream.append(i)
        seen.append(stream.take())
    assert seen == ["x", "", "DEFGH", ""]
    assert stream.finish() == "DEFG"


@pytest.mark.parametrize(
    ("stops", "text", "kept"),
    [
        (["ab", "abc"], "xabcy", "x"),  # one a prefix of another: the shorter is complete first
        (["abc", "bc"], "xabcy", "x"),  # both end together: cut before the one that begins first
        (["abcd", "bc"], "xabcd", "xa"),  # a stop inside another's partial match
        (["aab"], "aaab", "a"),  # a partial match that begins anew inside itself
        (["abab", "ba"], "aab!", "aab!"),
        (["😀!"], "hi 😀😀!", "hi 😀"),
        (["\n\n"], "a\n\n\nb", "a"),
    ],
)
def test_c04_overlapping_stops(stops: list[str], text: str, kept: str) -> None:
    for order in (stops, stops[::-1]):
        data = text.encode()
        for at in range(len(data) + 1):
            stream = TextStream(BYTES, order)
            parts, stopped = run(stream, list(data), {at})
            assert "".join(parts) == kept == stream.text
            assert stopped == (kept != text)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    seed=st.integers(0, 10**6),
)
def test_c04_any_tokens_any_grouping(text: str, stops: list[str], seed: int) -> None:
    rng = random.Random(seed)
    borders = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, rng.randrange(8))))
    pieces = [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]
    stream = TextStream(ScriptedTokens(pieces), stops)
    expected, out = cut(text, stops), ""
    for token in range(len(pieces)):
        stopped = stream.append(token)
        if rng.random() < 0.6:
            out += stream.take()
        assert expected.startswith(out)  # nothing of a stop string, nothing that must be taken back
        assert not any(stop in out for stop in stops)
        if stopped:
            break
    assert out + stream.finish() == expected == stream.text


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 20),
)
def test_stop_strings_complete_before_min_tokens_are_text(text: str, stops: list[str], min_tokens: int) -> None:
    """One token a character: a match ending at character n is complete with token n."""
    ends = [n for n in range(1, len(text) + 1) if n >= min_tokens and any(text[:n].endswith(s) for s in stops)]
    expected = text
    if ends:
        expected = text[: min(ends[0] - len(s) for s in stops if text[: ends[0]].endswith(s))]
    stream = TextStream(ScriptedTokens(list(text)), stops, min_tokens=min_tokens)
    parts, stopped = run(stream, list(range(len(text))), set(range(len(text))))
    assert "".join(parts) == expected
    assert stopped == bool(ends)


def test_a_text_held_at_the_end_is_released() -> None:
    stream = TextStream(ScriptedTokens(["so DEF"]), ["DEFG"])
    stream.append(0)
    assert stream.take() == "so "
    assert stream.finish() == "DEF"


def test_stop_string_that_the_last_incomplete_character_completes() -> None:
    stream = TextStream(BYTES, ["a�"])
    for byte in b"xa\xe4":
        stream.append(byte)
    assert stream.finish() == "x"


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        TextStream(BYTES, ["a", ""])


def test_cost_of_a_token_does_not_grow_with_the_text() -> None:
    stream = TextStream(ScriptedTokens(["abcdefgh"]), ["habit", "ghost"])

    def seconds(tokens: int) -> float:
        started = time.process_time()
        for _ in range(tokens):
            stream.append(0)
            stream.take()
        return time.process_time() - started

    early = seconds(2_000)
    seconds(40_000)
    assert seconds(2_000) < 4 * early + 0.05  # decoding 340,000 characters each time would take 10 s
    stream.finish()
    assert stream.text == "abcdefgh" * 44_000


def test_a_stop_string_that_came_too_early_is_shown_at_once() -> None:
    stream = TextStream(ScriptedTokens(["an END", " of"]), ["END"], min_tokens=2)
    assert not stream.append(0)
    assert stream.take() == "an END"
    assert not stream.append(1)
    assert stream.finish() == " of"


def test_a_text_that_ends_inside_a_stop_string_is_complete_and_ends_once() -> None:
    stream = TextStream(ScriptedTokens([" 5", "."]), [".#"])
    assert not stream.append(0) and not stream.append(1)
    assert stream.take() == " 5"
    assert stream.finish() == "."
    assert stream.finish() == ""
    assert stream.text == " 5."
