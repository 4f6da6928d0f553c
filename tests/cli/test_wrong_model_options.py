"""What is wrong with a model's options is said by every command in the same sentence, also where no model is loaded."""

import pytest

SENTENCES = {
    ("--weights", "foo"): "weights 'foo' is unknown: choose one of auto, exact, packed, q8, q4.",
    ("--dtype", "foo"): "dtype 'foo' is unknown. Choose one of auto, fp32, bf16, fp16.",
    ("--device", "foo"): "Device 'foo' is unknown. Choose one of auto, cpu, cuda, mps.",
    ("--threads", "0"): "threads is 0, and this process may use ",
    ("--threads", "99999"): "threads is 99999, and this process may use ",
}
COMMANDS = [
    ("generate", "Hello"),
    ("chat",),
    ("verify",),
    ("verify", "--inject", "all"),
    ("traps",),
    ("traps", "--json"),
    ("traps", "position-stuck-at-0"),
    ("traps", "--examine"),
    ("explain", "Hello"),
    ("explain", "--toy"),
    ("bench",),
    ("experiment", "cache"),
    ("experiment", "walls"),
    ("experiment", "window"),
    ("experiment", "meaning"),
]


@pytest.mark.parametrize("option", SENTENCES, ids="=".join)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_wrong_value_is_the_same_sentence_everywhere(kvine, command, option):
    ended = kvine(*command, *option)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"Error: {SENTENCES[option]}") and ended.err.count("\n") == 1


@pytest.mark.parametrize("command", [("traps",), ("explain", "--toy")], ids=" ".join)
def test_a_right_value_is_accepted_where_it_has_no_effect(kvine, command):
    right = kvine(*command, "--weights", "q4", "--dtype", "bf16", "--device", "cuda", "--threads", 1)
    assert (right.code, right.err) == (0, "")
    assert right.out == kvine(*command).out


def test_the_toy_checks_the_options_of_the_cache_too(kvine):
    ended = kvine("explain", "--toy", "--block-size", 0)
    assert (ended.code, ended.out) == (2, "") and ended.err.startswith("Error: block_size is 0")
