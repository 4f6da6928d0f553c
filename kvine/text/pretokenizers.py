"""How a byte-level BPE cuts text into words before its merges run.

A GGUF names the rule in `tokenizer.ggml.pre` and carries no pattern; a wrong one changes the ids without any error,
so an unknown name is refused. Names and meanings follow llama.cpp, the patterns the models' own `tokenizer.json`.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from kvine.errors import ModelLoadError


@dataclass(frozen=True)
class PreTokenizer:
    """One rule: `patterns` are applied one after the other; each match becomes a word, and so does each gap between.

    `ignore_merges`: a word that is itself in the vocabulary is one token, whatever the merges say.
    `add_bos`: whether BOS is prepended where the file does not say. `nfc`: text is brought to Unicode's composed form.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The rule as a pre-tokenizer that ends in the byte alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normalizer that goes before the rule, if any."""
        return normalizers.NFC() if self.nfc else None


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """The GPT-4 family: contractions, words with one leading symbol, digit groups, symbol runs, spaces."""
    return "|".join([_CONTRACTION, _WORD, digits, _SYMBOLS, _SPACES])


def _cased_words(contraction: str, digits: str) -> str:
    """The o200k family: words are also cut where lower case turns to upper case."""
    head = r"[^\r\n\p{L}\p{N}]?"
    symbols = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    words = [f"{head}{_UPPER}*{_LOWER}+{contraction}", f"{head}{_UPPER}+{_LOWER}*{contraction}"]
    return "|".join([*words, digits, symbols, _SPACES])


_QWEN35 = "|".join(
    [_CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES]
)
_SEED_CODER = "|".join([_CONTRACTION, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES])
_BAILING = "|".join(
    (
        *(r"'(?i:[sdmt]|ll|ve|re)", r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"\p{N}"),
        *(r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]|\s+(?!\S)|\s+"),
    )
)
_EAST_ASIAN = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_V3 = "|".join(
    (
        *(r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"),
        *(r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES),
    )
)
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"

_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((_words(r"\p{N}{1,3}"),))
_ONE_DIGIT = PreTokenizer((_words(r"\p{N}"),))
_QWEN2 = PreTokenizer((_words(r"\p{N}"),), nfc=True)
_GPT2_RULE = PreTokenizer((_GPT2,))
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_GPT4O = PreTokenizer((_cased_words(_CONTRACTION + "?", r"\p{N}{1,3}"),))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3))
_BAILINGMOE = PreTokenizer((_BAILING,))

_RULES: dict[PreTokenizer, tuple[str, ...]] = {
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): ("default",),
    _LLAMA3: ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    _CL100K: ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    _QWEN2: ("qwen2", "deepseek-r1-qwen"),
    PreTokenizer((_QWEN35,), nfc=True): ("qwen35",),
    _ONE_DIGIT: ("stablelm2", "hunyuan", "megrez", "grok-2", "solar-open", "kormo"),
    _GPT2_RULE: (
        *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat"),
        *("a.x-4.0", "mellum"),
    ),
    _DIGITS_GPT2: ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")): ("falcon",),
    # [\p{Lu}\p{Ll}\p{Lt}]: the cased letters that the model's own file lists range by range
    PreTokenizer(
        (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _EAST_ASIAN, r"\p{N}+")
    ): ("deepseek-llm",),
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")): ("deepseek-coder",),
    _DEEPSEEK3: ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
    PreTokenizer((_cased_words("", r"\p{N}"),), ignore_merges=True, add_bos=True): ("tekken",),
    _GPT4O: ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    PreTokenizer((_SEED_CODER,)): ("seed-coder",),
    _BAILINGMOE: ("bailingmoe", "bailingmoe2", "llada-moe"),
    PreTokenizer((_BLOOM,)): ("bloom", "poro-chat", "gpt3-finnish"),
    PreTokenizer((_BLOOM, r"\p{N}")): ("viking",),
}
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for rule, names in _RULES.items() for name in names}


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """The rule that a GGUF's `tokenizer.ggml.pre` names.

    Raises ModelLoadError where there is no name or it is unknown: guessing would silently give other token ids.
    """
    if name is None:
        raise ModelLoadError(
            "This GGUF names no pre-tokenizer (tokenizer.ggml.pre), so its text cannot be split as the model was "
            "trained. Convert the model again with a current converter, or use the safetensors checkpoint."
        )
    if name not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"This GGUF names the pre-tokenizer {name!r}, which is not known here. Use the safetensors checkpoint "
            f"with its tokenizer.json. Known: {', '.join(sorted(PRE_TOKENIZERS))}."
        )
    return PRE_TOKENIZERS[name]
