"""Sessions whose window never drops what they pin: they go on, are edited, forked and kept in a file like others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from session_scenes import BLOCKS, TEXT, computed, count, greedy, open_llm
from tiny_text import write_tokenizer

from kvine.errors import RequestError, SessionError
from kvine.session import Session

POLICIES = {
    "absolute": (replace(BLOCKS, window=8, sink_tokens=2), ((5, 12), (15, 16))),
    "in the cache": (replace(BLOCKS, window=8, sink_tokens=2, sink_rule="in_cache"), ((0, 11),)),
    "packed": (replace(BLOCKS, window=8, kv_dtype="k8v4"), ((5, 12),)),
}


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., tuple[Any, Path]]) -> Path:
    return write_tokenizer(tiny("TL", seed=3)[1])


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_pinned_stays_in_a_session_and_in_its_file(folder: Path, tmp_path: Path, policy: str) -> None:
    cache, pinned = POLICIES[policy]
    cold, llm = open_llm(folder, replace(cache, prefix_caching=False)), open_llm(folder, cache)

    def goes_on(session: Session) -> None:
        before = session.tokens
        with session.fork() as fork:
            expected = cold.generate(before, greedy(6), pinned=pinned).token_ids
            assert fork.generate(greedy(6)).token_ids == expected
            assert expected != cold.generate(before, greedy(6)).token_ids, "pins change nothing"
        session._llm.engine.manager.check()

    session = llm.session(TEXT[:40], pinned=pinned)
    assert session.pinned == pinned
    goes_on(session)
    with computed(llm) as fed:
        session.append(TEXT[90:95])
    assert count(fed) <= 5
    goes_on(session)
    session.edit(20, 22, TEXT[100:103])
    goes_on(session)
    session.save(tmp_path / "session")
    again = open_llm(folder, cache)
    with computed(again) as fed:
        loaded = again.load_session(tmp_path / "session")
    assert (fed, loaded.pinned, loaded.tokens, loaded.num_cached) == ([], pinned, session.tokens, session.num_cached)
    goes_on(loaded)
    session.crop(7)  # less than is pinned
    session.append(TEXT[60:90])
    goes_on(session)


def test_what_cannot_be_pinned_is_refused(folder: Path, tmp_path: Path) -> None:
    absolute, in_cache = (POLICIES[name][0] for name in ("absolute", "in the cache"))
    llm = open_llm(folder, in_cache)
    with pytest.raises(RequestError, match="only the beginning of a prompt can be pinned"):
        llm.session(TEXT[:20], pinned=((3, 9),))
    open_llm(folder, absolute).session(TEXT[:40], pinned=((5, 12),)).save(tmp_path / "apart")
    with pytest.raises(SessionError, match=r"was saved with sink_rule absolute \(here in_cache\)"):
        llm.load_session(tmp_path / "apart")
