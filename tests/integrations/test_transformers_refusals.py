"""What KvineCache cannot do it refuses, with a reason, and nothing has changed then."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from tiny_decoders import decoder, generated, left_padded, text

from kvine.errors import ConfigError, RequestError
from kvine.integrations.transformers import KvineCache

WITHOUT = "import sys; sys.modules['transformers'] = None\nimport kvine.errors\n"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"window": 8, "sink_tokens": 2, "sink_rule": "in_cache"}, "second rotation of the queries"),
        ({"sink_tokens": 2}, "Sinks need a window"),
        ({"window": 0}, "window is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"kv_dtype": "int3"}, "'int3' is unknown"),
        ({"kv_dtype": "exact/int4-token"}, "is unknown"),
        ({"kv_dtype": "int4", "block_size": 7}, "block_size that 2 divides"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "padding_side='left'"),
        ({"attention_mask": torch.tensor([1, 1])}, "rows, tokens"),
    ],
)
def test_options(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        KvineCache(decoder("Llama").config, **options)


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        ("T5Config", {}, "encoder-decoder"),
        ("MambaConfig", {}, "plain keys and values only"),
        ("Qwen3NextConfig", {}, "plain keys and values only"),
        ("BloomConfig", {"window": 8}, "ALiBi"),
        ("MptConfig", {"window": 8}, "ALiBi"),
        ("Llama4TextConfig", {"window": 8}, "attends in chunks"),
    ],
)
def test_models(config: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        KvineCache(getattr(transformers, config)(), **options)


def test_falcon_with_alibi_and_a_window() -> None:
    KvineCache(transformers.FalconConfig(alibi=True))
    with pytest.raises(ConfigError, match="ALiBi"):
        KvineCache(transformers.FalconConfig(alibi=True), window=8)


def test_sinks_that_a_layer_would_mask() -> None:
    KvineCache(decoder("Gemma3").config, window=8, sink_tokens=2)
    with pytest.raises(ConfigError, match="sees 10 tokens and masks all before them"):
        KvineCache(decoder("Gemma3").config, window=8, sink_tokens=3)


def test_heads_whose_channels_do_not_fill_bytes() -> None:
    past, states = KvineCache(decoder("Llama").config, kv_dtype="int2"), torch.zeros(1, 2, 3, 6)
    with pytest.raises(ConfigError, match="share bytes among 4 channels"):
        past.update(states, states, 0)
    assert past.num_bytes == 0 and past.get_seq_length() == 0


def test_a_prompt_past_the_window_in_one_call() -> None:
    model, past = decoder("Gemma3"), KvineCache(decoder("Gemma3").config, window=6, sink_tokens=2, block_size=4)
    with pytest.raises(RequestError, match="prefill_chunk_size=1"):
        generated(model, past, text(1, 9))
    assert past.num_bytes == 0 and past.get_seq_length() == 0
    generated(model, past, text(1, 8))
    held = past.num_bytes
    with pytest.raises(RequestError, match="prefill_chunk_size=1"):
        model(text(1, 2), past_key_values=past)
    assert past.num_bytes == held


def test_rows_whose_padding_is_not_known() -> None:
    model, (ids, mask) = decoder("Llama"), left_padded([6, 4])
    with pytest.raises(ConfigError, match="give KvineCache the batch's attention_mask"):
        generated(model, KvineCache(model.config, window=6, sink_tokens=2), ids, mask)
    with pytest.raises(RequestError, match="attention_mask has 2 rows and the batch has 3"):
        past = KvineCache(model.config, window=6, sink_tokens=2, attention_mask=mask)
        generated(model, past, text(3, 6))
    generated(model, KvineCache(model.config, window=6), ids, mask)  # a window alone needs to know of no padding


def test_another_batch_in_a_cache_that_is_in_use() -> None:
    model, past = decoder("Llama"), KvineCache(decoder("Llama").config)
    model(text(2, 5), past_key_values=past)
    with pytest.raises(RequestError, match="holds 2 rows, and the call has 3"):
        model(text(3, 5), past_key_values=past)
    assert past.get_seq_length() == 5


@pytest.mark.parametrize("kv_dtype", ["int4", "exact/int8"])
def test_cropping_inside_a_packed_block(kv_dtype: str) -> None:
    model, past = decoder("Llama"), KvineCache(decoder("Llama").config, kv_dtype=kv_dtype, block_size=4)
    ids = text(1, 10)
    model(ids[:, :4], past_key_values=past)
    fresh = copy.deepcopy(past)
    model(ids[:, 4:], past_key_values=past)
    held = past.num_bytes
    with pytest.raises(RequestError, match="7 tokens would end inside a packed block of 4"):
        past.crop(-3)
    assert past.num_bytes == held and past.get_seq_length() == 10
    past.crop(-1)  # in the open block
    past.crop(-5)  # at the end of a packed one
    assert past.get_seq_length() == 4 and past.num_bytes == fresh.num_bytes
    assert torch.equal(*(model(text(1, 2, 3), past_key_values=cache).logits for cache in (past, fresh)))


def test_cropping_more_than_there_is() -> None:
    model, past = decoder("Llama"), KvineCache(decoder("Llama").config, window=6, block_size=4)
    past.crop(-3)  # nothing is there: nothing to take
    generated(model, past, text(1, 6), new=20)
    for tokens, reason in (
        (3, "as a negative number"),
        (-40, "holds 25 tokens"),
        (-9, "let go of what 16 tokens need"),
    ):
        with pytest.raises(RequestError, match=reason):
            past.crop(tokens)
    assert past.get_seq_length() == 25


@pytest.mark.parametrize(
    ("options", "reason"), [({"kv_dtype": "int4"}, "out of blocks that are packed"), ({"window": 30}, "several tokens")]
)
def test_assisted_decoding(options: dict[str, Any], reason: str) -> None:
    model = decoder("Llama")
    with pytest.raises(ConfigError, match=reason):
        generated(model, KvineCache(model.config, **options), text(1, 6), prompt_lookup_num_tokens=3)


def test_static_shapes() -> None:
    model = decoder("Llama")
    past = KvineCache(model.config)
    assert not past.is_compileable
    with pytest.raises(ConfigError, match="shapes are not static"):
        past.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="shapes are not static"):
        compiled(text(1, 5), past_key_values=past)
    torch.compiler.reset()


def test_without_transformers_it_says_what_to_install() -> None:
    code = WITHOUT + "try:\n import kvine.integrations.transformers\nexcept kvine.errors.KvineError as e: print(e)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install 'kvine[transformers]'" in shown


def test_kvine_alone_does_not_load_transformers() -> None:
    code = "import sys, kvine, kvine.integrations; from kvine import LLM; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
