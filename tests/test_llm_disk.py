"""`LLM` over a folder of blocks, with the real model: what a restart costs."""

import time
from pathlib import Path

import pytest

from kvine import LLM, CacheConfig, SamplingParams
from kvine.errors import ConfigError

TEXT = "The decimal system is older than the zero that it is written with today. " * 400


def test_close_lets_go_of_the_folder_and_the_llm_goes_on(tmp_path: Path) -> None:
    cache = CacheConfig(cache_dir=tmp_path / "blocks")
    llm = LLM(cache=cache)
    first = llm.generate(TEXT[:2000], SamplingParams(max_tokens=2))
    with pytest.raises(ConfigError, match=r"LLM\.close"):
        LLM(cache=cache)
    llm.close()
    llm.close()
    assert llm.generate(TEXT[:2000], SamplingParams(max_tokens=2)).token_ids == first.token_ids
    again = LLM(cache=cache)
    second = again.generate(TEXT[:2000], SamplingParams(max_tokens=2))
    assert second.token_ids == first.token_ids and second.usage.cached_tokens > 300
    again.close()


@pytest.mark.slow
def test_a_long_prompt_comes_back_in_a_fifth_of_the_time_at_most(tmp_path: Path) -> None:
    cache = CacheConfig(cache_dir=tmp_path / "blocks")
    took, answers = [], []
    for _ in range(2):
        llm = LLM(cache=cache)
        ids = llm.encode(TEXT)[:1900]
        llm.generate("Warm up.", SamplingParams(max_tokens=1))
        began = time.perf_counter()
        result = llm.generate(ids, SamplingParams(max_tokens=1))
        took.append(time.perf_counter() - began)
        answers.append((result.token_ids, result.usage.cached_tokens))
        llm.close()
        del llm
    assert answers[0][1] == 0 and answers[1][1] == 1888  # 59 blocks
    assert answers[0][0] == answers[1][0]
    assert took[1] <= 0.2 * took[0], f"{took[1]:.3f} s from disk, {took[0]:.3f} s computed"
