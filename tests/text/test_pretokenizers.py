import pytest
from tiny_tokenizers import TEXTS
from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from kvine.errors import ModelLoadError
from kvine.text.pretokenizers import PRE_TOKENIZERS, pre_tokenizer

SAMPLES = [
    *TEXTS,
    "I'LL we'Re CamelCase HTTPServer",
    "x=1;y+=22\t(z)//ok",
    "中文，Mixed123字 ½",
    "a\r\n\r\n  b\n",
    "$100 ~`|^",
]
WIDE = [name for name in PRE_TOKENIZERS if name in GGUF_PRE_TOKENIZER_SPLITS]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def words(rule: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [word for word, _ in rule.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", WIDE)
def test_splits_as_the_pattern_of_transformers(name: str) -> None:
    pattern = Regex(GGUF_PRE_TOKENIZER_SPLITS[name])
    oracle = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), BYTES])
    for text in SAMPLES:
        assert words(PRE_TOKENIZERS[name].build(), text) == words(oracle, text)


# What the models' own tokenizer.json say, in the library's ready-made steps.
READY_MADE = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "starcoder": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "command-r": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
}


@pytest.mark.parametrize("name", READY_MADE)
def test_splits_as_the_ready_made_steps(name: str) -> None:
    oracle = pre_tokenizers.Sequence(READY_MADE[name])
    for text in SAMPLES:
        assert words(PRE_TOKENIZERS[name].build(), text) == words(oracle, text)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("default", "a12345, b", ["a", "123", "45", ",", "Ġb"]),
        ("falcon", "x`y 1234", ["x", "`", "y", "Ġ", "123", "4"]),
        ("deepseek-llm", "ab 12\r\n", ["ab", "Ġ", "12", "č", "Ċ"]),
        ("deepseek-coder", "ab (12)\n", ["ab", "Ġ(", "1", "2", ")", "Ċ"]),
        ("deepseek-v3", "ab 1234 .x", ["ab", "Ġ", "123", "4", "Ġ.", "x"]),
        ("tekken", "aB 12", ["a", "B", "Ġ", "1", "2"]),
        ("seed-coder", "a!\n\n", ["a", "!", "ĊĊ"]),
        ("bailingmoe", "a!\n\n", ["a", "!ĊĊ"]),
        ("bloom", "a,b c.", ["a", ",", "b", "Ġc", "."]),
        ("viking", "a12 b", ["a", "1", "2", "Ġb"]),
        ("glm4", "12345", ["123", "45"]),
        ("qwen35", "e\u0301a 12", ["eÌģa", "Ġ", "1", "2"]),
    ],
)
def test_splits_by_hand(name: str, text: str, expected: list[str]) -> None:
    assert words(PRE_TOKENIZERS[name].build(), text) == expected


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_rule_keeps_every_byte(name: str) -> None:
    rule = pre_tokenizer(name).build()
    for text in SAMPLES:
        assert "".join(words(rule, text)) == "".join(words(BYTES, text))


@pytest.mark.parametrize("name", [None, "", "not-there", "Llama-BPE"])
def test_an_unknown_rule_is_refused(name: str | None) -> None:
    with pytest.raises(ModelLoadError, match="pre-tokenizer"):
        pre_tokenizer(name)
