"""Locating a divergence: each planted fault at its layer, tensor and position, and nothing in a healthy engine."""

from pathlib import Path

import broken_parts
import pytest
from broken_parts import Fault, with_fault
from tiny_models import Subject, random_prompt, write_checkpoint

from kvine.attention.cached import CachedAttention
from kvine.config import CacheConfig
from kvine.engine.engine import EngineParts
from kvine.evidence.locate import Location, StateTrace, locate
from kvine.evidence.paths import run_cache_free, run_cached, run_in_company

PROMPT, NEW = 37, 8


class Search:
    """A text of one tiny model, to locate faults on."""

    def __init__(self, folder: Path, kind: str, dtype: str = "fp32") -> None:
        self.subject = Subject.load(write_checkpoint(folder, kind), dtype, CacheConfig(block_size=4))
        subject, self.prompt = self.subject, random_prompt(PROMPT)
        self.text = run_cache_free(subject.parts, subject.dense, self.prompt, NEW, lambda done: None).chosen
        self.trace = StateTrace(subject.dense, [*self.prompt, *self.text[:-1]], NEW, subject.model.dtype)

    def find(self, parts: EngineParts, run=run_cached) -> Location | None:
        return locate(
            self.trace, parts, lambda watched: run(watched, self.subject.config, self.prompt, self.text, lambda _: None)
        )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Search:
    return Search(tmp_path_factory.mktemp("locate"), "llama")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_nothing_is_found_in_a_healthy_engine(tmp_path: Path, kind: str, dtype: str) -> None:
    search = Search(tmp_path, kind, dtype)
    assert search.find(search.subject.parts) is None
    assert search.find(search.subject.parts, run_in_company) is None


WHERE: list[tuple[Fault, int, str, int]] = [  # model call, tensor of layer 0, position
    (broken_parts.late_positions, 1, "cached_k", 37),  # the first token that is decoded
    (broken_parts.stale_block, 0, "attn_out", 0),
    (broken_parts.lost_write, 1, "cached_k", 36),  # position 37 is the second of its block, and written over 36
    (broken_parts.last_key_dropped, 0, "attn_out", 1),
    (broken_parts.slightly_off_scale, 0, "attn_out", 1),  # position 0 sees one key, whatever the scale
]


@pytest.mark.parametrize(
    ("fault", "step", "tensor", "position"), WHERE, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fault_is_named(llama: Search, fault: Fault, step: int, tensor: str, position: int) -> None:
    found = llama.find(with_fault(llama.subject.parts, fault))
    assert found is not None
    assert (found.step, found.layer, found.tensor, found.position) == (step, 0, tensor, position)
    assert found.difference > found.bound > 0
    again = llama.find(llama.subject.parts)
    assert again is None, "what the fault left in the cache is forgotten"


def test_a_fault_of_one_layer_is_named_with_it(tmp_path: Path) -> None:
    search = Search(tmp_path, "gemma3")  # layer 1 is a group of its own

    def scale_of_second_group(whole: CachedAttention) -> CachedAttention:
        backends = [whole.backends[0], broken_parts.OtherScale()]
        return CachedAttention(whole.layers, whole.pools, backends, scale=whole.scale, softcap=whole.softcap)

    found = search.find(with_fault(search.subject.parts, scale_of_second_group))
    assert found is not None and (found.layer, found.tensor, found.position) == (1, "attn_out", 1)
    found = search.find(with_fault(search.subject.parts, broken_parts.narrow_window))
    assert found is not None and (found.layer, found.tensor, found.position) == (0, "attn_out", 7)


def test_a_wrong_weight_of_the_head_is_named_in_the_logits(llama: Search) -> None:
    runner = llama.subject.parts.runner

    class WrongHead(type(runner)):  # type: ignore[misc]
        def run(self, step, *, all_logits=False):
            return super().run(step, all_logits=all_logits) * 1.01

    wrong = WrongHead(runner.decoder, runner.attention, runner.manager, runner.device)
    llama.subject.exchange(runner=wrong)
    found = llama.find(llama.subject.parts)
    llama.subject.exchange(runner=runner)
    assert found is not None and (found.layer, found.tensor, found.position) == (-1, "logits", PROMPT - 1)


def test_an_engine_that_fails_is_judged_by_what_it_did_until_then(llama: Search) -> None:
    assert llama.find(with_fault(llama.subject.parts, broken_parts.failing_step)) is None
