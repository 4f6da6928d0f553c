import signal

import pytest
from tiny_model import WEIGHT_BYTES, chat_tokens, kv_bytes

from kvine import LLM
from kvine.cli import chat as chat_module


def test_answers_go_to_stdout_and_reuse_to_stderr(chat, tiny):
    spoken = chat("Hello", "Again", options=("--json",)).json["turns"]
    ended = chat("Hello", "Again")
    assert ended.code == 0
    assert ended.out == "".join(turn["text"] + "\n" for turn in spoken)
    ready, first, second = ended.err.splitlines()
    assert ready.startswith(f"{tiny}: fp32 for weights stored as F32 · ready in ")
    usage = spoken[1]["usage"]
    computed = usage["prompt_tokens"] - usage["cached_tokens"]
    assert first.startswith(f"turn 1 · prompt: {chat_tokens('Hello')} tokens, 0 reused")
    assert second.startswith(
        f"turn 2 · prompt: {usage['prompt_tokens']} tokens, {usage['cached_tokens']} reused, {computed} computed"
    )
    assert chat("Hello", options=("--quiet",)).err == ""


def test_json_says_once_what_has_run(chat):
    ended = chat("Hello", "Again", options=("--json",)).json
    assert list(ended)[:5] == ["model", "dtype", "dtype_reason", "packings", "weight_bytes"]
    assert (ended["dtype"], ended["dtype_reason"]) == ("fp32", "fp32 for weights stored as F32")
    assert (ended["packings"], ended["weight_bytes"]) == ({}, WEIGHT_BYTES)
    assert all(not turn.keys() & set(list(ended)[:5]) for turn in ended["turns"])


def test_a_turn_computes_only_what_is_new(chat):
    """Of turn 2's prompt, turn 1's prompt and all of its answer but the last token, never fed, is in the cache."""
    first, second = chat("Hello", "Again", options=("--json",)).json["turns"]
    assert first["usage"] == {"prompt_tokens": chat_tokens("Hello"), "cached_tokens": 0, "completion_tokens": 6}
    assert second["usage"]["prompt_tokens"] == chat_tokens("Hello", first["text"], "Again")
    assert second["usage"]["cached_tokens"] == chat_tokens("Hello") + 5


def test_without_prefix_caching_nothing_is_reused_and_nothing_else_changes(chat):
    plain = chat("Hello", "Again", options=("--json", "--no-prefix-caching")).json
    cached = chat("Hello", "Again", options=("--json",)).json
    assert [turn["usage"]["cached_tokens"] for turn in plain["turns"]] == [0, 0]
    assert plain["messages"] == cached["messages"]
    assert plain["kv_bytes_cached"] == 0


def test_edit_reuses_what_stands_before_the_change(chat):
    ended = chat("Hello", "And what is next", "More", "/edit 2 And what is new", options=("--json",)).json
    edited = ended["turns"][-1]
    assert (edited["turn"], edited["edited"], edited["user"]) == (2, True, "And what is new")
    reply = ended["turns"][0]["text"]
    assert edited["usage"]["prompt_tokens"] == chat_tokens("Hello", reply, "And what is new")
    common = chat_tokens("Hello", reply) + len("And what is ne")  # <|user|> stands where <|assistant|> is counted
    assert edited["usage"]["cached_tokens"] == common
    assert [m["content"] for m in ended["messages"]] == ["Hello", reply, "And what is new", edited["text"]]
    alone = chat("Hello", "And what is new", options=("--json",)).json
    assert ended["messages"] == alone["messages"], "an edited conversation is the one that was never otherwise"


def test_edit_says_what_it_reused_and_recomputed(chat):
    ended = chat("Hello", "/edit 1 Hellas")
    assert f"turn 1 edited · prompt: {chat_tokens('Hellas')} tokens, 5 reused, " in ended.err  # <|user|>Hell


def test_edit_asks_for_the_text(chat):
    ended = chat("Hello", "/edit 1", "Hi", options=("--json",))
    assert ended.json["messages"][0]["content"] == "Hi"
    assert "turn 1 was: Hello" in ended.err
    kept = chat("Hello", "/edit 1", "", options=("--json",))
    assert kept.json["messages"][0]["content"] == "Hello"
    assert "nothing changed" in kept.err


def test_stats_count_turns_tokens_and_bytes(chat):
    ended = chat("/stats", "Hello", "Again", "/stats", options=("--block-size", 4))
    before, after = (line for line in ended.err.splitlines() if line.startswith("turns:"))
    assert before == "turns: 0 · tokens: 0 · prompt tokens so far: 0, 0 of them from the cache"
    first = chat_tokens("Hello")
    second = int(after.split("tokens: ")[1].split()[0]) - 6  # the prompt of turn 2
    assert after.startswith("turns: 2 ·")
    assert after.endswith(f"so far: {first + second}, {first + 5} of them from the cache")
    cached = kv_bytes(second + 5, 4)  # one sequence: turn 1's blocks are the beginning of turn 2's
    assert f"K/V held by running answers: 0 bytes (0 B) · cached for later: {cached:,} bytes" in ended.err


def test_reset_begins_anew(chat):
    ended = chat("Hello", "/reset", "Hello", options=("--json", "--system", "Be brief")).json
    first, second = ended["turns"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert second["usage"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1, "all but the last, for its logits"
    assert [m["role"] for m in ended["messages"]] == ["system", "user", "assistant"]


def test_quit_and_end_of_input_end_well(chat):
    assert (chat("/quit", "Hello").code, chat("/quit", "Hello").out) == (0, "")
    assert chat().code == 0
    assert chat("", "   ").out == "", "an empty line is no turn"
    assert "/edit N TEXT" in chat("/help").err


@pytest.mark.parametrize(
    ("line", "said"),
    [("/frobnicate", "no command"), ("/edit", "which turn"), ("/edit x", "which turn"), ("/edit 2 Hi", "no turn 2")],
)
def test_a_mistake_in_a_script_ends_it(chat, line, said):
    ended = chat("Hello", line, "Never said")
    assert ended.code == 2
    assert ended.out.count("\n") == 1, "nothing after the mistake was answered"
    assert ended.err.splitlines()[-1].startswith("Error: ")
    assert said in ended.err.splitlines()[-1]


def test_a_mistake_at_a_terminal_does_not_end_the_conversation(chat, monkeypatch):
    lines = iter(["Hello", "/frobnicate", "x" * 200, "Again"])
    monkeypatch.setattr(chat_module, "input", lambda _: next(lines, None) or _end_of_input(), raising=False)
    monkeypatch.setattr(chat_module, "stdin_is_terminal", lambda: True)
    ended = chat(options=("--json",))
    assert [turn["user"] for turn in ended.json["turns"]] == ["Hello", "Again"]
    assert "/frobnicate is no command" in ended.err
    assert "The prompt has" in ended.err


def _end_of_input() -> str:
    raise EOFError


def test_ctrl_c_stops_one_answer_only(chat, monkeypatch):
    """Pressed while the second piece is shown; what was said by then stays, and nothing is held any more."""
    pieces = []

    def write_and_interrupt(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_module, "write", write_and_interrupt)
    before = signal.getsignal(signal.SIGINT)
    ended = chat("Hello", "Again", "/stats", options=("--max-tokens", 12))
    assert ended.code == 0
    assert "abort" in ended.err.splitlines()[1]
    assert "answer: 2 tokens" in ended.err.splitlines()[1]
    assert "answer: 12 tokens" in ended.err.splitlines()[2]
    assert "held by running answers: 0 bytes" in ended.err
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_first_token_drops_the_turn(chat, monkeypatch):
    from kvine.llm import LLM

    real = LLM.stream_chat

    def interrupted(self, messages, *arguments, **more):
        running = real(self, messages, *arguments, **more)
        if messages[-1]["content"] == "Never":
            running.cancel()
        return running

    monkeypatch.setattr(LLM, "stream_chat", interrupted)
    ended = chat("Hello", "Never", "Again", options=("--json",))
    assert [turn["user"] for turn in ended.json["turns"]] == ["Hello", "Again"]
    assert "the turn is dropped" in ended.err


def test_a_second_ctrl_c_ends_the_program(chat, monkeypatch):
    def write_and_interrupt_twice(_: str) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_module, "write", write_and_interrupt_twice)
    before = signal.getsignal(signal.SIGINT)
    assert chat("Hello", "Again").code == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_a_model_call_leaves_nothing_behind(tiny, monkeypatch):
    """The engine drops the request without an event, so `close` itself must end it: nothing waits for it for ever."""
    from kvine import LLM

    llm = LLM(str(tiny), threads=1)
    running = llm.stream("The cache")
    next(running)

    def interrupted(_step: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.parts.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(running)
    running.close()
    assert running.result.finish_reason == "abort"
    assert llm.engine.manager.bytes_referenced == 0
    assert not llm.engine.busy
    llm.engine.manager.check()
    assert llm.generate("The cache").text == LLM(str(tiny), threads=1).generate("The cache").text


def test_undo_takes_the_last_turn_back(chat):
    ended = chat("Hello", "Again", "/undo", "Other", options=("--json",))
    assert "taken back: Again" in ended.err
    alone = chat("Hello", "Other", options=("--json",)).json
    assert ended.json["messages"] == alone["messages"]
    assert chat("/undo").err.splitlines()[-1].endswith("There is no turn to take back: nothing has been said yet.")


def test_a_saved_conversation_goes_on_in_another_process_without_being_computed(chat, tmp_path):
    file, options = tmp_path / "talk", ("--json", "--system", "Be brief")
    first = chat("Hello", "Again", f"/save {file}", options=options)
    spoken = first.json["messages"]
    length = chat_tokens(*(m["content"] for m in spoken)) - 1  # without what opens an answer
    assert f"{length} tokens kept in {file}" in first.err
    ended = chat("Other", f"/load {file}", "/stats", "More", options=("--json",))
    assert f"2 turns, {length} tokens from {file}; you said last: Again" in ended.err
    assert f"turns: 2 · tokens: {length} · " in ended.err
    usage = ended.json["turns"][-1]["usage"]
    assert usage["prompt_tokens"] == length + chat_tokens("More")
    assert usage["cached_tokens"] == length - 1, "of what was said the last token only was not computed"
    assert ended.json["turns"][-1]["turn"] == 3
    assert ended.json["messages"] == chat("Hello", "Again", "More", options=options).json["messages"]
    again = chat(f"/load {file}", "/undo", f"/save {file}", f"/load {file}", "/edit 1 Hellas", options=("--json",))
    assert again.json["messages"] == chat("Hellas", options=options).json["messages"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("/save talk",), "nothing to save"),
        (("Hello", "/save"), "Name the file"),
        (("/load",), "Name the file"),
        (("/load missing",), "No such file"),
        (("Hello", "/save ."), "is no file"),
    ],
)
def test_what_cannot_be_kept_or_loaded_is_said(chat, lines, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = chat(*lines)
    assert ended.code == 2 and said in ended.err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_text_is_no_conversation(chat, generate, tiny, tmp_path):
    assert generate("Once", "--max-tokens", 2, "--session", tmp_path / "text").code == 0
    for note in (None, {"kvine-chat": 3}, {"kvine-chat": {"system": None, "turns": [["a"]]}}):
        if note is not None:
            LLM(str(tiny), threads=1).load_session(tmp_path / "text").save(tmp_path / "text", note=note)
        ended = chat(f"/load {tmp_path / 'text'}")
        assert ended.code == 2 and "holds a text and no conversation" in ended.err
