"""What packed blocks take, and that neither batch mates nor preemption change what is computed with them."""

import pytest
from checkpoints import tiny_model
from combinations import OTHER, TEXT, Oracle, block_bytes, same, tiny
from tiny_engines import Tiny, stepped_over

from kvine.config import CacheConfig, EngineConfig
from kvine.errors import ConfigError
from kvine.sampling.params import SamplingParams


def test_batch_mates_and_preemption_change_no_token() -> None:
    """Requests that share a cache too small for all of them write what each writes alone."""
    model = tiny("llama")
    prompts = [TEXT[:n] + OTHER[:k] for n, k in ((9, 3), (17, 0), (5, 9), (17, 5))]
    for name in ("int8", "int4-token/int8", "int2"):
        cache = CacheConfig(4, kv_dtype=name)
        texts = []
        oracle = Oracle(model, cache)
        for prompt in prompts:
            text = list(prompt)
            for _ in range(12):
                text.append(int(oracle.logits(text)[-1].argmax()))
            texts.append(text[len(prompt) :])
        roomy = model.engine(cache)
        need = max(roomy.manager.pools[0].bytes_per_block * 8, 1) + 3 * roomy.manager.pools[-1].bytes_per_block
        engine = model.engine(CacheConfig(4, kv_dtype=name, kv_memory=need))
        ids = [engine.add(prompt, SamplingParams(max_tokens=12, ignore_eos=True)) for prompt in prompts]
        written: dict[int, list[int]] = {number: [] for number in ids}
        while engine.busy:
            for event in engine.step():
                assert event.error is None
                if event.sample is not None:
                    written[event.request_id].append(event.sample.token_id)
            engine.manager.check()
        assert engine.scheduler.num_preemptions > 0, "nobody was ever short of memory"
        assert [written[number] for number in ids] == texts, name


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "k8v4", "fp16/int4", "int8-token/exact"])
def test_no_exact_copy_of_a_full_block_survives_and_bytes_are_those_planned(name: str) -> None:
    """Token by token: at most one open block is held, and what is full takes the packed bytes."""
    model = tiny("llama")
    engine = model.engine(CacheConfig(8, kv_dtype=name))
    stepped = stepped_over(engine)
    spec = engine.manager.specs[0]
    sealed, opened = block_bytes(model, *CacheConfig(kv_dtype=name).codecs, 8)
    for length in range(1, 31):
        stepped.extend([TEXT[length - 1]])
        full, begun = divmod(length, 8)
        assert stepped.num_bytes == spec.num_layers * (full * sealed + (begun > 0) * opened), length
        assert len(stepped) == length
        assert len(engine.manager.pools[1].references) == (begun > 0), "an exact copy of a full block is held"
    stored = stepped.layer(0)[0]
    assert stored.shape[2] == 30


@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
@pytest.mark.parametrize("name", ["exact/int2", "fp16/int2", "int8/int2"])
def test_codes_may_end_at_an_odd_byte(backend: str, name: str) -> None:
    """And parameters begin there, in blocks of 5 tokens of 12 channels; with no block, one, and several."""
    model = Tiny(*tiny_model("llama", head_dim=12))
    cache = CacheConfig(5, kv_dtype=name)
    oracle, exact = Oracle(model, cache), Oracle(model, cache, lossy=False)
    stepped = stepped_over(model.engine(cache, EngineConfig(backend=backend)))
    for length in (3, 7, 9, 23):
        logits = stepped.extend(TEXT[len(stepped) : length])[0]
        same(oracle, exact, TEXT[:length], logits, (name, backend))


def test_shapes_that_cannot_be_packed_are_refused_when_the_engine_is_made() -> None:
    for block_size, keys, divisor in ((6, "int2", 4), (5, "int4", 2), (1, "int4-token", 2), (1, "int2-token", 4)):
        with pytest.raises(ConfigError, match=f"a block_size that {divisor} divides"):
            tiny("llama").engine(CacheConfig(block_size, kv_dtype=f"{keys}/int8"))
    for name in ("int3", "int8/", "int4/int4-token", "k3v4", ""):
        with pytest.raises(ConfigError, match="is unknown: choose one of exact"):
            CacheConfig(kv_dtype=name)
