import errno
import json

import numpy as np
import pytest
from tiny_model import CONTEXT, VOCABULARY, WEIGHT_BYTES, chat_tokens, kv_bytes

from kvine import hub
from kvine.formats.gguf import GGUFFile

PROMPT = "The cache"  # 9 characters, 9 tokens
TEN = ("--max-tokens", 10, "--ignore-eos")


def test_text_goes_to_stdout_and_the_rest_to_stderr(generate, tiny):
    from kvine import LLM, SamplingParams

    expected = LLM(str(tiny), threads=1).generate(PROMPT, SamplingParams(max_tokens=10, ignore_eos=True)).text
    ended = generate(PROMPT, *TEN)
    assert (ended.code, ended.out) == (0, expected + "\n")
    assert "fp32 for weights stored as F32" in ended.err
    assert "prompt: 9 tokens, 0 reused, 9 computed" in ended.err
    assert "answer: 10 tokens" in ended.err
    assert "length" in ended.err
    assert generate(PROMPT, *TEN, "--quiet").err == ""


def test_the_time_of_a_token_is_shown_where_there_is_one_after_the_first(generate):
    assert "answer: 2 tokens, " in (shown := generate(PROMPT, "--max-tokens", 2, "--ignore-eos").err)
    assert shown.count(" ms/token · length") == 1
    assert "answer: 1 token · length" in generate(PROMPT, "--max-tokens", 1, "--ignore-eos").err
    assert "answer: 0 tokens · length" in generate(PROMPT, "--max-tokens", 0).err


def test_json_is_one_object(generate):
    ended = generate(PROMPT, *TEN, "--json", "--trace")
    outcome = ended.json
    assert list(outcome) == [
        *(
            "model",
            "dtype",
            "dtype_reason",
            "packings",
            "weight_bytes",
            "text",
            "prompt_ids",
            "token_ids",
            "finish_reason",
            "detail",
            "usage",
            "timings",
            "choices",
            "trace",
        )
    ]
    assert outcome["text"] + "\n" == generate(PROMPT, *TEN).out
    assert len(outcome["prompt_ids"]) == 9 and len(outcome["token_ids"]) == 10
    assert (outcome["dtype"], outcome["finish_reason"], outcome["detail"]) == ("fp32", "length", None)
    assert (outcome["dtype_reason"], outcome["packings"]) == ("fp32 for weights stored as F32", {})
    assert outcome["weight_bytes"] == WEIGHT_BYTES
    assert outcome["usage"] == {"prompt_tokens": 9, "cached_tokens": 0, "completion_tokens": 10}
    assert set(outcome["timings"]) == {"ready_s", "prefill_s", "decode_ms"}
    assert all(value > 0 for value in outcome["timings"].values())
    assert ended.err == ""
    assert "trace" not in generate(PROMPT, *TEN, "--json").json


def test_weights_are_packed_on_demand(generate):
    """Embedding, head and the layers' matrices but for `down`, whose rows are of 48 numbers."""
    ended = generate(PROMPT, *TEN, "--weights", "q4")
    assert ended.code == 0 and len(ended.out) > 1
    said = " ".join(ended.err.split())
    assert "(12 Q4_1, 1 Q8_0); 2 stay exact, whose rows are no multiple of 32" in said
    ended = generate(PROMPT, "--weights", "4")
    assert ended.code == 2 and "weights '4' is unknown: choose one of auto, exact, packed, q8, q4." in " ".join(
        ended.err.split()
    )


def test_trace_follows_the_cache(generate):
    """9 tokens are fed, then one at a time; the tenth is never fed. Blocks of 4 fp32 tokens are counted by formula."""
    rows = generate(PROMPT, *TEN, "--block-size", 4, "--json", "--trace").json["trace"]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["input_shape"] for row in rows] == [[1, 9]] + [[1, 1]] * 9
    assert [row["positions"] for row in rows] == [[0, 8]] + [[i, i] for i in range(9, 18)]
    assert [row["cache_length"] for row in rows] == list(range(9, 19))
    assert [row["kv_bytes"] for row in rows] == [kv_bytes(n, 4) for n in range(9, 19)]
    assert all(row["ms"] > 0 for row in rows)


def test_trace_table_shows_shapes_and_bytes(generate):
    ended = generate(PROMPT, *TEN, "--trace")
    assert "[1, 9] → 9 " in ended.err
    assert "[1, 1] → 10 " in ended.err
    assert f"{kv_bytes(9):,}  8.0 KiB" in ended.err  # 32 tokens × 2 layers × 2 heads × 8 × 2 × 4 bytes
    assert "→" not in ended.out


def test_chunked_prompt_is_traced_chunk_by_chunk(generate):
    rows = generate(PROMPT, *TEN, "--max-step-tokens", 4, "--json", "--trace").json["trace"]
    assert [row["positions"] for row in rows[:4]] == [[0, 3], [4, 7], [8, 8], [9, 9]]


def test_without_a_cache_the_text_is_the_same_and_all_of_it_is_fed_again(generate):
    cached = generate(PROMPT, *TEN, "--json").json
    plain = generate(PROMPT, *TEN, "--json", "--trace", "--no-cache").json
    assert plain["token_ids"] == cached["token_ids"]
    assert [row["input_shape"] for row in plain["trace"]] == [[1, n] for n in range(9, 19)]
    assert {(row["cache_length"], row["kv_bytes"]) for row in plain["trace"]} == {(0, 0)}


def test_stdin_is_the_prompt_as_it_stands(generate):
    assert generate("-", *TEN, "--json", stdin=PROMPT + "\n").json["usage"]["prompt_tokens"] == 10
    ended = generate("-", stdin=b"\xff\xfe\xfa")
    assert (ended.code, ended.out) == (2, "")
    assert "utf-8" in ended.err.lower()


def test_chat_puts_the_prompt_into_the_template(generate):
    usage = generate("Hi", *TEN, "--json", "--chat").json["usage"]
    assert usage["prompt_tokens"] == chat_tokens("Hi")
    usage = generate("Hi", *TEN, "--json", "--chat", "--system", "Be brief").json["usage"]
    assert usage["prompt_tokens"] == chat_tokens("Hi", system="Be brief")


def test_sampling_options_reach_the_sampler(generate):
    def ids(*options: object) -> list[int]:
        return generate(PROMPT, *TEN, "--json", *options).json["token_ids"]

    first = ids()[0]
    forced = VOCABULARY["Q"]
    assert first != forced
    assert ids("--logit-bias", f"{forced}=1000") == [forced] * 10
    assert first not in ids("--logit-bias", f"{first}=-inf", "--logit-bias", f"{forced}=0.5")
    assert ids("--stop-token-id", first) == [first]
    hot = ("--temperature", 3)
    assert ids(*hot, "--seed", 1) == ids(*hot, "--seed", 1) != ids(*hot, "--seed", 2)
    for narrow in (("--top-k", 1), ("--top-p", 0), ("--min-p", 1)):
        assert ids(*hot, *narrow) == ids()
    assert len(ids("--min-tokens", 3, "--logit-bias", f"{VOCABULARY['<|end|>']}=1000")) == 10  # ignored, as asked


def test_end_of_text_and_min_tokens(generate):
    end = VOCABULARY["<|end|>"]
    outcome = generate(PROMPT, "--json", "--logit-bias", f"{end}=1000", "--min-tokens", 3).json
    assert (outcome["token_ids"].index(end), outcome["finish_reason"]) == (3, "stop")
    assert len(outcome["text"]) == 3, "the end itself is no text"


def test_stop_text_is_cut(generate):
    text = generate(PROMPT, *TEN, "--json").json["text"]
    ended = generate(PROMPT, *TEN, "--stop", "never", "--stop", text[4:6], "-q")
    assert ended.out == text[: text.index(text[4:6])] + "\n"


def test_logprobs(generate):
    outcome = generate(PROMPT, *TEN, "--logprobs", 3, "--json").json
    rows = outcome["logprobs"]
    assert [row["token_id"] for row in rows] == outcome["token_ids"]
    for row in rows:
        assert set(row) == {"token_id", "token", "logprob", "top"}
        assert VOCABULARY[row["token"].replace(" ", "Ġ").replace("\n", "Ċ")] == row["token_id"]
        assert row["top"][0] == {key: row[key] for key in ("token_id", "token", "logprob")}, "greedy takes the first"
        assert len(row["top"]) == 3
        assert 0 > row["top"][0]["logprob"] >= row["top"][2]["logprob"]
    table = generate(PROMPT, *TEN, "--logprobs", 3).err
    assert f"{rows[0]['logprob']:.4f}" in table


def test_full_context_says_what_to_do(generate):
    outcome = generate(PROMPT, "--ignore-eos", "--max-tokens", 1000, "--json").json
    assert outcome["finish_reason"] == "context"
    assert outcome["usage"]["completion_tokens"] == CONTEXT - 9
    assert outcome["detail"] in generate(PROMPT, "--ignore-eos", "--max-tokens", 1000).err
    going_on = ("--window", 16, "--sinks", 4, "--sink-rule", "in_cache")
    outcome = generate(PROMPT, "--ignore-eos", "--max-tokens", 100, "--json", *going_on).json
    assert (outcome["finish_reason"], outcome["usage"]["completion_tokens"]) == ("length", 100)


@pytest.mark.parametrize("option", [("--kv-dtype", "bf16"), ("--backend", "reference"), ("--kv-memory", "64KiB")])
def test_cache_options_reach_the_engine(generate, option):
    assert generate(PROMPT, *TEN, *option, "--json").json["usage"]["completion_tokens"] == 10


def test_what_is_pinned_or_global_outlasts_the_window(generate):
    held = {}
    for option in ((), ("--pin", "0:3"), ("--global-tokens", "0:3"), ("--pin", "4:6,7:8")):
        ended = generate(PROMPT, *TEN, "--window", 4, "--block-size", 1, *option, "--json", "--trace").json
        held[option] = ended["trace"][-2]["kv_bytes"]
        cache_free = generate(PROMPT, *TEN, "--window", 4, *option, "--no-cache", "--json").json
        assert cache_free["token_ids"] == ended["token_ids"]
    assert [bytes_ // (kv_bytes(32) // 32) for bytes_ in held.values()] == [3, 6, 6, 6]


def test_a_pinned_system_message_outlasts_the_window(generate, chat):
    options = ("--window", 8, "--block-size", 1, "--system", "Hi", "--json")
    plain, pinned = (generate("Why?", *TEN, "--chat", *options, *pin) for pin in ((), ("--pin-system",)))
    assert plain.json["prompt_ids"] == pinned.json["prompt_ids"]
    traced = generate("Why?", *TEN, "--chat", *options, "--pin-system", "--trace").json
    assert traced["token_ids"] == pinned.json["token_ids"]
    unpinned = generate("Why?", *TEN, "--chat", *options, "--trace").json
    more = (traced["trace"][-2]["kv_bytes"] - unpinned["trace"][-2]["kv_bytes"]) // (kv_bytes(32) // 32)
    assert more >= 3, "the role, two characters and the end of the message"
    spoken = chat("Why?", options=(*TEN, *options, "--pin-system")).json["turns"][0]
    assert spoken["token_ids"] == pinned.json["token_ids"]
    assert chat("Why?", options=("--pin-system",)).code == 2


def test_stored_dtype_shows_in_the_bytes(generate):
    rows = generate(PROMPT, *TEN, "--kv-dtype", "fp16", "--json", "--trace").json["trace"]
    assert rows[0]["kv_bytes"] == kv_bytes(9) // 2


MISTAKES = {
    "test_d01_temperature_nan": (("--temperature", "nan"), "temperature"),
    "temperature_below_0": (("--temperature", -1), "temperature"),
    "top_p": (("--top-p", 1.1), "top_p"),
    "min_p": (("--min-p", -0.1), "min_p"),
    "top_k": (("--top-k", -2), "top_k"),
    "max_tokens": (("--max-tokens", -1), "max_tokens"),
    "min_over_max": (("--min-tokens", 9, "--max-tokens", 8), "min_tokens"),
    "repetition": (("--repetition-penalty", 0), "repetition_penalty"),
    "presence": (("--presence-penalty", 3), "presence_penalty"),
    "seed": (("--seed", 2**64), "seed"),
    "logprobs": (("--logprobs", -1), "logprobs"),
    "stop": (("--stop", ""), "stop"),
    "bias_form": (("--logit-bias", "7"), "ID=BIAS"),
    "bias_id": (("--logit-bias", "x=1"), "ID=BIAS"),
    "bias_nan": (("--logit-bias", "7=nan"), "token 7"),
    "bias_twice": (("--logit-bias", "7=1", "--logit-bias", "7=2"), "twice"),
    "block_size": (("--block-size", 0), "block_size"),
    "kv_memory": (("--kv-memory", "lots"), "size in bytes"),
    "kv_dtype": (("--kv-dtype", "int3"), "kv_dtype"),
    "window": (("--window", 0), "window"),
    "sinks": (("--sinks", 4), "window"),
    "sink_rule": (("--sink-rule", "x"), "sink_rule"),
    "global_tokens": (("--global-tokens", "0-4", "--window", 8), "--global-tokens '0-4' names no positions"),
    "global_commas": (("--global-tokens", ",,", "--window", 8), "',,' names no positions"),
    "global_digits": (("--global-tokens", "1_0:2_0", "--window", 8), "names no positions"),
    "globals_alone": (("--global-tokens", "0:4"), "need a window"),
    "pin": (("--pin", "4:2"), "--pin '4:2' names no positions"),
    "pin_far": (("--pin", "5:10"), "the prompt at 9"),
    "pin_system": (("--pin-system", "--chat"), "--system"),
    "max_step_tokens": (("--max-step-tokens", 0), "max_step_tokens"),
    "backend": (("--backend", "magic"), "backend"),
    "threads": (("--threads", 0), "threads"),
    "device": (("--device", "abacus"), "abacus"),
    "dtype": (("--dtype", "fp7"), "fp7"),
    "system": (("--system", "Be brief"), "--chat"),
    "model": (("--model", "no-such-model"), "no-such-model"),
}


@pytest.mark.parametrize(("options", "named"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(generate, options, named):
    ended = generate(PROMPT, *options)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Error: ")
    assert ended.err.count("\n") == 1
    assert named in ended.err


def test_c07_empty_prompt_without_bos(generate):
    ended = generate("")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Error: The prompt has no tokens")


def test_a_prompt_that_fills_the_context_is_refused(generate):
    ended = generate("x" * CONTEXT, "--json")
    assert (ended.code, ended.out) == (2, "")
    assert str(CONTEXT) in ended.err


def test_usage_errors_exit_with_2(kvine):
    assert kvine("generate").code == 2
    assert kvine("generate", "x", "--max-tokens", "many").code == 2
    assert kvine("generate", "x", "--no-such-option").code == 2
    assert kvine("no-such-command").code == 2


def test_max_tokens_0_generates_nothing(generate):
    outcome = generate(PROMPT, "--max-tokens", 0, "--json", "--trace").json
    assert (outcome["text"], outcome["token_ids"], outcome["trace"]) == ("", [], [])
    assert json.loads(json.dumps(outcome["timings"])) == outcome["timings"]


@pytest.mark.parametrize("command", ["generate", "explain"])
def test_a_file_of_random_weights_is_named_where_they_give_no_numbers(kvine, tmp_path, command):
    """Its header is the real model's, so that it loads."""
    source = hub.resolve(hub.DEFAULT_MODEL)
    damaged = tmp_path / "damaged.gguf"
    content = bytearray(source.path.read_bytes())
    start = min(info.offset for info in GGUFFile(source.path).tensors.values())
    content[start:] = np.random.default_rng(0).bytes(len(content) - start)
    damaged.write_bytes(content)
    ended = kvine(command, "-m", damaged, "--threads", 1, "Hello")
    assert (ended.code, ended.out.strip()) == (2, "")
    assert ended.err.startswith(
        f"Error: The logits of {damaged} have no finite maximum, but nan: its weights are damaged"
    )


def test_several_texts_come_under_their_numbers_and_all_in_json(generate):
    beams = (*TEN, "--num-beams", 3, "--length-penalty", 0.5, "--early-stopping", "never")
    ended = generate(PROMPT, *beams)
    choices = generate(PROMPT, *beams, "--json").json["choices"]
    assert ended.out == "".join(f"[{i}] score {c['score']:.4f}\n{c['text']}\n" for i, c in enumerate(choices, start=1))
    assert "3 answers: 30 tokens" in ended.err and "ms/step · length" in ended.err
    drawn = (*TEN, "--n", 2, "--temperature", 1, "--seed", 4, "--logprobs", 1)
    outcome = generate(PROMPT, *drawn, "--json").json
    assert [c["score"] for c in outcome["choices"]] == [None, None] and len(outcome["choices"][1]["logprobs"]) == 10
    assert outcome["text"] == outcome["choices"][0]["text"] != outcome["choices"][1]["text"]
    assert outcome["usage"] == {"prompt_tokens": 9, "cached_tokens": 0, "completion_tokens": 20}
    [single] = generate(PROMPT, *TEN, "--json").json["choices"]
    assert single["score"] is None and single["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--n", 2), "n=2 greedy samples would all be the same"),
        (("--num-beams", 2, "--temperature", 1), "num_beams=2 does not go with temperature"),
        (("--num-beams", 2, "--stop", "x"), "give stop_token_ids instead"),
        (("--num-beams", 0), "num_beams must be an integer of at least 1"),
        (("--length-penalty", 2), "belong to beam search"),
        (("--num-beams", 2, "--early-stopping", "soon"), "choose true, false or never"),
        (("--num-beams", 4, "--max-step-tokens", 3), "4 beams take 4 tokens in each step"),
    ],
)
def test_what_several_texts_do_not_go_with_is_said(generate, options, says):
    ended = generate(PROMPT, *options)
    assert ended.code == 2 and ended.out == "" and says in " ".join(ended.err.split())


def test_a_session_goes_on_where_it_ended(generate, tiny, tmp_path):
    file = tmp_path / "story"
    first = generate(PROMPT, *TEN, "--json", "--session", file).json
    assert first["usage"] == {"prompt_tokens": 9, "cached_tokens": 0, "completion_tokens": 10}
    second = generate("!", *TEN, "--json", "--trace", "--session", file).json
    whole = [*first["prompt_ids"], *first["token_ids"], VOCABULARY["!"]]
    assert second["prompt_ids"] == whole
    assert second["usage"] == {"prompt_tokens": 20, "cached_tokens": 18, "completion_tokens": 10}
    assert second["trace"][0]["positions"] == [18, 19], "the last token of before, and the new one"
    before = file.read_bytes()
    shown = generate("", "--max-tokens", 3, "--ignore-eos", "--session", file)
    assert "prompt: 30 tokens, 29 reused, 1 computed" in shown.err and shown.out.endswith("\n")
    assert file.read_bytes() != before and [*tmp_path.iterdir()] == [file]
    from kvine import LLM, SamplingParams

    cold, params = LLM(str(tiny), threads=1), SamplingParams(max_tokens=10, ignore_eos=True)
    assert cold.generate(whole, params).token_ids == second["token_ids"]


@pytest.mark.parametrize("options", [("--chat",), ("--no-cache",), ("--n", 2, "--temperature", 1), ("--num-beams", 2)])
def test_a_session_is_one_text_in_the_cache(generate, tmp_path, options):
    ended = generate(PROMPT, "--session", tmp_path / "story", *options)
    assert ended.code == 2 and "--session goes on as one text" in ended.err and not list(tmp_path.iterdir())


def test_a_conversation_is_not_gone_on_with_as_a_text(generate, chat, tmp_path):
    file = tmp_path / "talk"
    assert chat("Hello", f"/save {file}").code == 0
    before = file.read_bytes()
    ended = generate(PROMPT, "--session", file)
    assert ended.code == 2 and f"{file} holds a conversation: go on with it by /load" in ended.err
    assert file.read_bytes() == before and ended.out == ""
    ended = generate(PROMPT, "--session", tmp_path / "nowhere" / "story")
    assert ended.code == 2 and "does not exist: make it first" in ended.err and ended.out == ""


def test_a_file_that_is_no_session_is_not_touched(generate, tmp_path):
    file = tmp_path / "notes"
    file.write_text("mine")
    ended = generate(PROMPT, *TEN, "--session", file)
    assert (ended.code, ended.out, file.read_text()) == (2, "", "mine")
    assert "is no session's file" in ended.err
    assert generate(PROMPT, *TEN, "--session", tmp_path / "story").code == 0
    other = generate(PROMPT, *TEN, "--kv-dtype", "int8", "--session", tmp_path / "story")
    assert other.code == 2 and "with kv_dtype exact (here int8)" in other.err


def test_what_cannot_be_kept_has_been_shown(generate, tmp_path, monkeypatch):
    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvine.cache.snapshot.os.fsync", full)
    ended = generate(PROMPT, *TEN, "--session", tmp_path / "story")
    monkeypatch.undo()
    assert ended.code == 2 and "cannot be written" in ended.err
    assert ended.out == generate(PROMPT, *TEN).out
