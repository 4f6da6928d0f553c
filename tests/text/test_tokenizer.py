import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CHATML, TEXTS, byte_level, gguf_metadata, spm_metadata, write_folder
from tokenizers import processors
from transformers import AutoTokenizer

from kvine import hub
from kvine.errors import ModelLoadError, RequestError
from kvine.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_folder, tokenizer_from_gguf

CONFIG = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
SPM = {"▁": -50.0, "l": -51.0, "h": -52.0, "e": -53.0, "o": -54.0, "▁h": -1.0, "el": -2.0, "▁hel": -0.5, "lo": -3.0}


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def folder(backend: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("byte-level"), backend, tokenizer_config=CONFIG)


@pytest.fixture(scope="module")
def byte_tokenizer(folder: Path) -> Tokenizer:
    return tokenizer_from_folder(folder)


def gguf(backend: tokenizers.Tokenizer, **extra: Any) -> Tokenizer:
    return tokenizer_from_gguf(gguf_metadata(backend, **extra))


@pytest.mark.parametrize("text", TEXTS)
def test_folder_and_gguf_give_the_ids_of_transformers(
    folder: Path, backend: tokenizers.Tokenizer, byte_tokenizer: Tokenizer, text: str
) -> None:
    oracle = AutoTokenizer.from_pretrained(folder)
    expected = oracle.encode(text, add_special_tokens=False)
    from_gguf = gguf(backend)
    assert byte_tokenizer.encode(text) == expected
    assert from_gguf.encode(text) == expected
    for tokenizer in (byte_tokenizer, from_gguf):
        assert tokenizer.decode(expected, skip_special=False) == text
        assert tokenizer.decode(expected) == oracle.decode(expected, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_round_trip(byte_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_tokenizer.encode(text)
    assert byte_tokenizer.decode(ids, skip_special=False) == text
    assert b"".join(byte_tokenizer.token_bytes(i, skip_special=False) for i in ids) == text.encode()


def test_pieces_are_for_people(byte_tokenizer: Tokenizer) -> None:
    def shown(text: str) -> list[str]:
        return byte_tokenizer.pieces(byte_tokenizer.encode(text))

    assert shown("龘<|im_end|>") == ["<0xE9>", "<0xBE>", "<0x98>", "<|im_end|>"]
    assert shown(" world\n") == [" world", "\n"]
    assert shown("天") == ["天"]


def test_an_added_token_is_text_as_it_stands() -> None:
    """Also where each of its characters stands for a byte in the byte alphabet."""
    tokenizer = gguf(byte_level(["é", "<｜end｜>"]))
    ids = tokenizer.encode("aé<｜end｜>b")
    assert ids[1:3] == [0, 1]
    assert tokenizer.decode(ids, skip_special=False) == "aé<｜end｜>b"


def test_qwen_composes_characters_first(backend: tokenizers.Tokenizer) -> None:
    assert gguf(backend, pre="qwen2").encode("e\u0301") == gguf(backend, pre="qwen2").encode("é")
    assert gguf(backend, pre="smollm").encode("e\u0301") != gguf(backend, pre="smollm").encode("é")


def test_d08_ids_beyond_the_tokenizer_are_nothing(byte_tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> None:
    size = backend.get_vocab_size()
    assert byte_tokenizer.vocab_size == size
    beyond = [size, size + 1, 10**9, -1]
    assert byte_tokenizer.decode([*beyond, *byte_tokenizer.encode("ok"), size]) == "ok"
    assert byte_tokenizer.pieces(beyond) == [""] * 4


def test_d08_vocab_size_counts_ids_past_a_hole(tmp_path: Path) -> None:
    content = json.loads(byte_level().to_str())
    last = max(content["model"]["vocab"].values())
    content["model"]["vocab"]["Ġfar"] = last + 5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.vocab_size == last + 6
    assert tokenizer.pieces([last + 4, last + 5]) == ["", " far"]


def test_d08_padding_tokens_of_a_gguf_do_not_count(backend: tokenizers.Tokenizer) -> None:
    metadata = gguf_metadata(backend)
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "[PAD1]", "[PAD2]"]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [5, 5])
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.vocab_size == count
    assert tokenizer.decode([count, count + 1]) == ""


# --- E02: beginning of sequence ---


@pytest.mark.parametrize("template_has_bos", [False, True])
@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("prompt_begins_with_bos", [False, True])
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_e02_number_of_leading_bos(
    backend: tokenizers.Tokenizer,
    tmp_path: Path,
    kind: str,
    template_has_bos: bool,
    add_bos: bool,
    prompt_begins_with_bos: bool,
) -> None:
    template = ("{{ bos_token }}" if template_has_bos else "") + "{{ messages[0]['content'] }}"
    if kind == "folder":
        config = CONFIG | {"add_bos_token": add_bos, "chat_template": template}
        tokenizer = tokenizer_from_folder(write_folder(tmp_path, backend, tokenizer_config=config))
    else:
        flags = {"ggml.bos_token_id": 0, "ggml.add_bos_token": add_bos, "chat_template": template}
        tokenizer = gguf(backend, **flags)
    assert tokenizer.bos_id == 0
    text = "<|endoftext|>" * prompt_begins_with_bos + "hello"

    completion = tokenizer.encode(text)
    assert completion.count(0) == (add_bos or prompt_begins_with_bos)
    assert tokenizer.encode(text, add_special=False).count(0) == prompt_begins_with_bos

    assert tokenizer.chat_template is not None
    chat = tokenizer.chat_template.render([{"role": "user", "content": text}])
    assert tokenizer.encode(chat, add_special=False).count(0) == template_has_bos + prompt_begins_with_bos


def test_e02_empty_prompt_gets_bos(backend: tokenizers.Tokenizer) -> None:
    flags = {"ggml.bos_token_id": 0, "ggml.add_bos_token": True}
    assert gguf(backend, **flags).encode("") == [0]
    assert gguf(backend).encode("") == []


def test_e02_post_processor_decides_where_no_flag_is_given(tmp_path: Path) -> None:
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer = tokenizer_from_folder(write_folder(tmp_path / "a", backend, tokenizer_config=CONFIG))
    assert tokenizer.encode("hello") == AutoTokenizer.from_pretrained(tmp_path / "a").encode("hello")
    assert tokenizer.encode("hello").count(0) == tokenizer.encode("<|endoftext|>hello").count(0) == 1
    silent = CONFIG | {"add_bos_token": False}
    assert 0 not in tokenizer_from_folder(write_folder(tmp_path / "b", backend, tokenizer_config=silent)).encode(
        "hello"
    )


def test_e02_flag_without_a_bos_token_is_refused(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="BOS"):
        gguf(backend, **{"ggml.add_bos_token": True})
    with pytest.raises(ModelLoadError, match="BOS"):
        tokenizer_from_folder(write_folder(tmp_path, backend, tokenizer_config={"add_bos_token": True}))


def test_truncation_and_padding_of_the_training_run_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    tokenizer = tokenizer_from_folder(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    assert len(tokenizer.encode("a")) == 1


# --- end of generation ---


def test_eos_ids_are_joined_from_every_file(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(
        write_folder(
            tmp_path,
            backend,
            config={"eos_token_id": 0},
            generation_config={"eos_token_id": [0, 7]},
            tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "eot_token": "<|im_start|>", "pad_token": "!"},
        )
    )
    assert tokenizer.eos_ids == {0, 1, 2, 7}


def test_eos_of_the_special_tokens_map_counts(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    special = {"eos_token": {"content": "<|im_end|>", "lstrip": False}}
    assert tokenizer_from_folder(write_folder(tmp_path, backend, special_tokens_map=special)).eos_ids == {2}


def test_eos_ids_of_a_gguf(backend: tokenizers.Tokenizer) -> None:
    assert gguf(backend).eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>, by name
    named = {"ggml.eos_token_id": 10, "ggml.eot_token_id": 11, "ggml.eom_token_id": 12}
    assert gguf(backend, **named).eos_ids == {0, 2, 10, 11, 12}
    harmony = byte_level(["<|return|>", "<|call|>", "<|end|>"])
    assert gguf(harmony).eos_ids == {0, 1}  # there <|end|> closes a message, not the turn


def test_only_control_tokens_end_by_name(backend: tokenizers.Tokenizer) -> None:
    metadata = gguf_metadata(backend)
    metadata["tokenizer.ggml.token_type"][2] = 4
    assert tokenizer_from_gguf(metadata).eos_ids == {0}


# --- SentencePiece ---


@pytest.fixture
def spm(tmp_path: Path) -> Tokenizer:
    metadata = spm_metadata(SPM, user_defined=["\n\n", "  ", "<b>"])
    return tokenizer_from_gguf(metadata, cache=tmp_path)


def test_sentencepiece_ids(spm: Tokenizer) -> None:
    assert (spm.bos_id, spm.eos_ids) == (1, {2, 3})
    assert spm.pieces(spm.encode("hello")) == ["<s>", " hel", "lo"]
    assert spm.pieces(spm.encode("hello", add_special=False)) == [" hel", "lo"]
    assert spm.pieces(spm.encode("o é", add_special=False)) == [" ", "o", " ", "<0xC3>", "<0xA9>"]
    assert spm.pieces(spm.encode("hello  <b>\n\n", add_special=False)) == [" hel", "lo", "  ", "<b>", "\n\n"]


@pytest.mark.parametrize("text", [*TEXTS, "hello hello", "  hello", "hello<s>hello", "<0x41>", "é  é   "])
def test_sentencepiece_round_trip_without_the_prefix(tmp_path: Path, text: str) -> None:
    metadata = spm_metadata(SPM, user_defined=["\n\n", "  "], **{"ggml.add_space_prefix": False})
    tokenizer = tokenizer_from_gguf(metadata, cache=tmp_path)
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert tokenizer.decode(ids[1:], skip_special=False) == text
    assert tokenizer.decode(ids) == text.replace("<s>", "")


@pytest.mark.parametrize("text", ["hello", "hello o", " hello", "中 文", "o\no"])
def test_sentencepiece_round_trip_with_the_prefix(spm: Tokenizer, text: str) -> None:
    """The space that the tokenizer puts in front is not part of the text; one the text has itself is."""
    assert spm.decode(spm.encode(text)) == text == spm.backend.decode(spm.encode(text))


def test_sentencepiece_folder_decodes_like_the_gguf(spm: Tokenizer, tmp_path: Path) -> None:
    again = tokenizer_from_folder(write_folder(tmp_path / "folder", spm.backend))
    for text in TEXTS:
        ids = spm.encode(text, add_special=False)
        assert again.encode(text) == ids
        assert again.decode(ids) == spm.decode(ids)
        assert again.pieces(ids) == spm.pieces(ids)


# --- what cannot be read ---


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokenizer.ggml.model": "t5"}, "t5"),
        ({"tokenizer.ggml.model": None}, "kind"),
        ({"tokenizer.ggml.pre": "new-thing"}, "new-thing"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer"),
        ({"tokenizer.ggml.tokens": None}, "vocabulary"),
        ({"tokenizer.ggml.tokens": []}, "vocabulary"),
        ({"tokenizer.ggml.tokens": np.arange(5)}, "vocabulary"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges"),
        ({"tokenizer.ggml.token_type": np.ones(3, np.int32)}, "token_type"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id"),
        ({"tokenizer.ggml.eos_token_id": -1}, "eos_token_id"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id"),
    ],
)
def test_a_gguf_that_contradicts_itself_is_refused(
    backend: tokenizers.Tokenizer, change: dict[str, Any], complaint: str
) -> None:
    metadata = {key: value for key, value in (gguf_metadata(backend) | change).items() if value is not None}
    with pytest.raises(ModelLoadError, match=complaint):
        tokenizer_from_gguf(metadata)


def test_a_token_named_twice_is_refused(backend: tokenizers.Tokenizer) -> None:
    metadata = gguf_metadata(backend)
    metadata["tokenizer.ggml.tokens"][50] = metadata["tokenizer.ggml.tokens"][40]
    with pytest.raises(ModelLoadError, match="twice"):
        tokenizer_from_gguf(metadata)


def test_sentencepiece_without_scores_is_refused(tmp_path: Path) -> None:
    metadata = spm_metadata(SPM)
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelLoadError, match="scores"):
        tokenizer_from_gguf(metadata, cache=tmp_path)


def test_a_folder_without_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"only tokenizer\.model.*save_pretrained"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_damaged_files_are_named(backend: tokenizers.Tokenizer, tmp_path: Path, name: str, content: bytes) -> None:
    write_folder(tmp_path, backend)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=name):
        tokenizer_from_folder(tmp_path)


def test_eos_of_a_wrong_kind_is_refused(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        tokenizer_from_folder(write_folder(tmp_path, backend, config={"eos_token_id": "</s>"}))


def test_an_unknown_decoder_is_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        tokenizer_from_folder(write_folder(tmp_path, backend))


def test_half_a_surrogate_pair_is_a_request_error(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        byte_tokenizer.encode("a\ud83d")


# --- a real model ---


SMOLLM2_IDS = {  # as transformers gives them for the original checkpoint's tokenizer
    "Hello world, it's me.\n\n\tx = 1234": [
        19556,
        905,
        28,
        357,
        506,
        549,
        30,
        1116,
        197,
        104,
        446,
        216,
        33,
        34,
        35,
        36,
    ],
    "   a  b<|im_end|>": [256, 253, 216, 278, 2],
    "繁體中文 😀": [178, 134, 219, 180, 121, 238, 28589, 29184, 40303, 218],
    "1+1=½": [33, 27, 33, 45, 16738],
}


def test_smollm2_from_gguf() -> None:
    tokenizer = load_tokenizer(hub.resolve("smollm2-135m"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, {0, 2})
    assert {text: tokenizer.encode(text) for text in SMOLLM2_IDS} == SMOLLM2_IDS
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.chat_template is not None
    rendered = tokenizer.chat_template.render([{"role": "user", "content": "你好 👋"}])
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n你好 👋<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode(rendered, add_special=False)[:2] == [1, 9690]


def test_chat_template_travels_with_the_gguf(backend: tokenizers.Tokenizer) -> None:
    tokenizer = gguf(backend, chat_template=CHATML)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.origin == "GGUF metadata"
    ids = tokenizer.encode(tokenizer.chat_template.render([{"role": "user", "content": "a"}]))
    assert {1, 2} <= set(ids)  # <|im_start|> and <|im_end|>, each one token
