"""The texts that experiments read unless told otherwise, so that figures from different machines can be compared."""

SENTENCE = "The quick brown fox jumps over the lazy dog."
QUESTION = "The answer to 2 + 3 is"


def fox_prompt(repeats: int = 192) -> str:
    """The sentence about the fox, repeated, and a sum to finish; 192 times are 1,929 tokens for SmolLM2."""
    return " ".join([SENTENCE] * repeats + [QUESTION])


DEFAULT_PROMPT = fox_prompt()
QUICK_PROMPT = fox_prompt(6)

# "I took a bite of an apple" and "I got a new Apple": the same word, the same place, another meaning.
BITTEN_APPLE, NEW_APPLE, APPLE = "我咬了一口蘋果", "我換了一支蘋果", "蘋果"
