"""A session in a file: found again in another process, refused whenever anything is not as it was."""

import errno
import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from session_scenes import BLOCK, BLOCKS, POLICIES, TEXT, Cold, computed, continues_like, greedy, open_llm
from tiny_text import write_tokenizer

from kvine import LLM, CacheConfig, SamplingParams
from kvine.cache import snapshot as snapshots
from kvine.engine.build import build_engine, standard_parts
from kvine.errors import ContextLengthError, RequestError, SessionError
from kvine.models.cache_specs import cache_specs

Tiny = Callable[..., tuple[Any, Path]]
LENGTHS = (1, 2, 9, 30, 33)  # with blocks of 4: nothing held, a begun block, full ones, wrapped windows


@pytest.fixture(scope="module", autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tiny: Tiny) -> dict[str, Path]:
    return {arch: write_tokenizer(tiny(arch, seed=3)[1]) for arch in ("TL", "TH")}


@pytest.fixture(scope="module")
def saved(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A small file with an open block beside packed ones, and its bytes."""
    path = tmp_path_factory.mktemp("saved") / "session"
    open_llm(folders["TL"], POLICIES["sinks"]).session(TEXT[:30]).save(path)
    return path, path.read_bytes()


LOADING = """
import dataclasses, json, sys
sys.path[:0] = sys.argv[2:]
from session_scenes import POLICIES, computed, greedy, open_llm
from pathlib import Path
told = {}
for folder, policy, names in json.loads(sys.argv[1]):
    llm = open_llm(Path(folder), POLICIES[policy])
    for name in names:
        llm.engine.manager.clear()
        with computed(llm) as fed:
            session = llm.load_session(name)
            answer = session.generate(greedy(6))
        llm.engine.manager.check()
        again = llm.generate(session.tokens[:-1], greedy(1))
        told[name] = [session.num_cached, answer.usage.cached_tokens, fed, answer.token_ids, again.usage.cached_tokens]
        session.close()
print(json.dumps(told))
"""


def test_h02_another_process_goes_on_without_computing_what_was_saved(folders: dict[str, Path], tmp_path: Path) -> None:
    """Windows and sinks have wrapped; blocks are begun, and full."""
    scenes = [("TL", policy) for policy in POLICIES] + [("TH", policy) for policy in ("exact", "k8v4", "moved sinks")]
    files, expected = [], {}
    for arch, policy in scenes:
        llm, cold = open_llm(folders[arch], POLICIES[policy]), Cold(folders[arch], POLICIES[policy])
        names = []
        for length in (28, 33):
            session = llm.session(TEXT[:length])
            answer = session.generate(greedy(5))
            names.append(str(tmp_path / f"{arch}-{policy}-{length}".replace("/", "-")))
            session.save(names[-1])
            session.close()
            expected[names[-1]] = (length + 5, cold(TEXT[:length] + answer.token_ids))
        files.append((str(folders[arch]), policy, names))
    assert len(list(tmp_path.iterdir())) == len(expected), "no other file is left"
    run = subprocess.run(
        [sys.executable, "-c", LOADING, json.dumps(files), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told.keys() == expected.keys()
    for name, (now, cached, fed, token_ids, found) in told.items():
        length, answer = expected[name]
        assert cached == length - 1, name
        assert fed == [[length - 1 + n, length + n] for n in range(6)], f"{name}: only the last token was left"
        assert (now, token_ids) == (length + 5, answer), name
        assert found >= (length + 4) // BLOCK * BLOCK - BLOCK, f"{name}: other requests find it too"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("caching", [True, False])
def test_what_is_loaded_is_what_was_saved(folders: dict[str, Path], tmp_path: Path, policy: str, caching: bool) -> None:
    cache = replace(POLICIES[policy], prefix_caching=caching)
    llm, cold = open_llm(folders["TH"], cache), Cold(folders["TH"], cache)
    manager = llm.engine.manager
    for length in LENGTHS:
        session = llm.session(TEXT[:length])
        bytes_held = session.num_bytes
        size = session.save(tmp_path / "session", note={"turns": [1, "é"]})
        assert size == (tmp_path / "session").stat().st_size
        session.close()
        manager.clear()
        loaded = llm.load_session(tmp_path / "session")
        assert (loaded.tokens, loaded.num_cached, loaded.num_bytes) == (TEXT[:length], length - 1, bytes_held)
        assert loaded.note == {"turns": [1, "é"]}
        assert manager.bytes_referenced == bytes_held
        again = llm.load_session(tmp_path / "session")
        full = (length - 1) // BLOCK
        if caching:
            assert manager.bytes_referenced <= 2 * bytes_held - bool(full) * manager.pools[0].bytes_per_block
        continues_like(again, cold, 3)
        loaded.append(TEXT[50:57])
        continues_like(loaded, cold, 3)
        loaded.crop(length // 2 + 1)
        continues_like(loaded, cold, 3)
        for session in (loaded, again):
            session.close()
        assert manager.bytes_referenced == 0


def test_an_empty_session_is_a_file_too(folders: dict[str, Path], tmp_path: Path) -> None:
    llm = open_llm(folders["TL"])
    llm.session().save(tmp_path / "session")
    loaded = llm.load_session(tmp_path / "session")
    assert (loaded.tokens, loaded.note) == ([], None)
    loaded.append(TEXT[:5])
    continues_like(loaded, Cold(folders["TL"], BLOCKS))


def test_saving_computes_what_has_given_way(folders: dict[str, Path], tmp_path: Path) -> None:
    llm = open_llm(folders["TL"], replace(BLOCKS, prefix_caching=False))
    session = llm.session(TEXT[:30])
    llm.engine.scheduler.held.give_way()
    assert session.num_cached == 0
    session.save(tmp_path / "session")
    assert llm.load_session(tmp_path / "session").num_cached == session.num_cached == 29


def test_a_file_holds_nothing_of_others(folders: dict[str, Path], tmp_path: Path) -> None:
    """Of a begun block only what the session has written: memory that was used before may hold another's values."""
    saved = []
    for before in (TEXT[60:160], TEXT[:100]):
        llm = open_llm(folders["TL"], replace(POLICIES["int8"], prefix_caching=False))
        llm.generate(before, greedy(1))
        llm.session(TEXT[:31]).save(tmp_path / "session")
        saved.append((tmp_path / "session").read_bytes())
    assert saved[0] == saved[1]
    assert stat.S_IMODE((tmp_path / "session").stat().st_mode) == 0o600


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(llm: LLM, path: Path, message: str, error: type[Exception] = SessionError) -> None:
    manager = llm.engine.manager
    before = (manager.bytes_referenced, manager.bytes_cached, manager.num_evictions)
    with pytest.raises(error, match=message):
        llm.load_session(path)
    assert (manager.bytes_referenced, manager.bytes_cached, manager.num_evictions) == before
    manager.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bf16"}, r"with dtype fp32 \(here bf16\): load the model as it was then, or make the session anew"),
        ({"cache": replace(POLICIES["sinks"], kv_dtype="int8")}, r"with kv_dtype exact \(here int8\): load"),
        ({"cache": BLOCKS}, r"with window 8 \(here None\), sink_tokens 5 \(here 0\): load"),
        ({"cache": replace(POLICIES["sinks"], block_size=8)}, r"with block_size 4 \(here 8\): load"),
        ({"cache": replace(POLICIES["sinks"], sink_rule="in_cache")}, r"with sink_rule absolute \(here in_cache\)"),
        ({"weights": "q8"}, r"for tiny and its weights, which are not those of tiny as it is loaded here"),
    ],
)
def test_h02_another_origin_is_refused_by_name(
    folders: dict[str, Path], saved: tuple[Path, bytes], options: dict[str, Any], message: str
) -> None:
    refused(open_llm(folders["TL"], **{"cache": POLICIES["sinks"], **options}), saved[0], message)


def test_another_model_is_refused(folders: dict[str, Path], saved: tuple[Path, bytes], tiny: Tiny) -> None:
    for folder in (folders["TH"], write_tokenizer(tiny("TL", seed=4)[1])):
        refused(open_llm(folder, POLICIES["sinks"]), saved[0], "not those of tiny")


def test_options_that_no_value_depends_on_may_differ(folders: dict[str, Path], saved: tuple[Path, bytes]) -> None:
    cache = replace(POLICIES["sinks"], kv_memory="1MiB", prefix_caching=False)
    assert open_llm(folders["TL"], cache).load_session(saved[0]).num_cached == 29


def test_what_is_no_session_is_refused(folders: dict[str, Path], tmp_path: Path, saved: tuple[Path, bytes]) -> None:
    llm = open_llm(folders["TL"], POLICIES["sinks"])
    cases = {
        "empty": (b"", "is empty"),
        "text": (b"Once upon a time\n" * 100, "no session's file"),
        "short": (saved[1][:3], "no session's file"),
        "weights": ((folders["TL"] / "model.safetensors").read_bytes(), "no session's file"),
        "later": (saved[1][:14] + b"\x07" + saved[1][15:], "of format 7, and this version of Kvine reads 1"),
        "longer": (saved[1] + b"\0", "damaged or cut off"),
        "twice": (saved[1] * 2, "damaged or cut off"),
        "long header": (saved[1][:18] + (2**63).to_bytes(8, "little") + saved[1][26:], "damaged or cut off"),
    }
    for name, (data, message) in cases.items():
        (tmp_path / name).write_bytes(data)
        refused(llm, tmp_path / name, message)
        assert (tmp_path / name).read_bytes() == data
    refused(llm, tmp_path / "missing", "cannot be read .*No such file")
    refused(llm, tmp_path, "is no file")
    os.mkfifo(tmp_path / "pipe")
    refused(llm, tmp_path / "pipe", "is no file")


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
@example(where=0.0, bit=0, cut=True)
@example(where=1 - 1e-9, bit=7, cut=False)
@example(where=1 - 1e-9, bit=0, cut=True)
def test_a_flipped_bit_or_a_lost_end_is_refused(
    folders: dict[str, Path], saved: tuple[Path, bytes], tmp_path: Path, where: float, bit: int, cut: bool
) -> None:
    at = int(where * len(saved[1]))
    data = saved[1][:at] if cut else saved[1][:at] + bytes([saved[1][at] ^ 1 << bit]) + saved[1][at + 1 :]
    (tmp_path / "broken").write_bytes(data)
    refused(open_llm(folders["TL"], POLICIES["sinks"]), tmp_path / "broken", "damaged|no session|is empty|of format")


def test_a_header_that_somebody_wrote_is_refused(
    folders: dict[str, Path], saved: tuple[Path, bytes], tmp_path: Path
) -> None:
    """Its checksum is right, and still nothing in it is believed."""
    head = 14 + 4
    length = int.from_bytes(saved[1][head : head + 8], "little")
    begin = head + 8 + 32
    header, blocks = json.loads(saved[1][begin : begin + length]), saved[1][begin + length :]
    llm = open_llm(folders["TL"], POLICIES["sinks"])
    other = [[shelf, at, size - 1] for shelf, at, size in header["blocks"]]
    for changed in (
        *({k: v for k, v in header.items() if k != gone} for gone in ("namespace", "tokens", "num_cached", "blocks")),
        {**header, "tokens": [*header["tokens"][:-1], 131]},
        {**header, "tokens": [*header["tokens"][:-1], 10**30]},
        {**header, "tokens": [9, *header["tokens"][1:]]},
        {**header, "tokens": [2**62, *header["tokens"][1:]]},
        {**header, "tokens": "abc"},
        {**header, "num_cached": 31},
        {**header, "num_cached": -1},
        {**header, "num_cached": 2**62},
        {**header, "num_cached": 28},
        {**header, "blocks": header["blocks"][:-1]},
        {**header, "blocks": other},
        {**header, "blocks": [[0, 0]]},
        {**header, "blocks": [[0, 10**9, 5], *header["blocks"]]},
        {**header, "namespace": 7, "options": 3},
        [header],
        "header",
    ):
        data = json.dumps(changed).encode()
        file = saved[1][:head] + len(data).to_bytes(8, "little") + snapshots._checksum(data) + data + blocks
        (tmp_path / "written").write_bytes(file)
        refused(llm, tmp_path / "written", "damaged|was saved")


def test_what_the_cache_cannot_hold_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    block = cache_specs(open_llm(folders["TL"]).model.config, BLOCKS)[0].bytes_per_block("fp32")
    open_llm(folders["TL"]).session(TEXT[:50]).save(tmp_path / "session")  # 13 blocks
    tight = open_llm(folders["TL"], replace(BLOCKS, kv_memory=12 * block))
    refused(tight, tmp_path / "session", "49 tokens, more than the cache of", ContextLengthError)
    llm = open_llm(folders["TL"], replace(BLOCKS, kv_memory=20 * block))
    running = llm.stream(TEXT[100:140], greedy(8))
    next(running)
    with pytest.raises(ContextLengthError, match="beside what is running"):
        llm.load_session(tmp_path / "session")
    llm.engine.manager.check()
    assert running.result.token_ids == Cold(folders["TL"], BLOCKS)(TEXT[100:140], 8)
    idle = llm.session(TEXT[140:190])
    loaded = llm.load_session(tmp_path / "session")
    assert (idle.num_cached, loaded.num_cached) == (0, 49), "an idle session gives way to it"
    continues_like(idle, Cold(folders["TL"], BLOCKS))


# -- what goes wrong while it is written ------------------------------------------------------------------------------


@pytest.fixture
def kept(folders: dict[str, Path], tmp_path: Path) -> tuple[LLM, Path, bytes]:
    llm = open_llm(folders["TL"])
    llm.session(TEXT[:20]).save(tmp_path / "session")
    return llm, tmp_path / "session", (tmp_path / "session").read_bytes()


def test_a_full_disk_leaves_the_old_file(kept: tuple[LLM, Path, bytes]) -> None:
    llm, path, before = kept
    session = llm.session(TEXT[50:150])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 1000, hard))
    try:
        with pytest.raises(SessionError, match=r"cannot be written .*One that was there is as it was"):
            session.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    session.save(path)
    assert llm.load_session(path).tokens == TEXT[50:150]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_ends_the_writing_leaves_the_old_file(
    kept: tuple[LLM, Path, bytes], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    llm, path, before = kept
    session = llm.session(TEXT[50:150])

    def fail(_: int) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(snapshots.os, "fsync", fail)
        with pytest.raises((SessionError, KeyboardInterrupt)):
            session.save(path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    assert session.num_cached == 99
    continues_like(session, Cold(Path(llm.source.path), BLOCKS))


def test_a_process_that_is_killed_leaves_the_old_file_or_the_new(
    kept: tuple[LLM, Path, bytes], folders: dict[str, Path]
) -> None:
    llm, path, before = kept
    killed = """
import os, signal, sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from session_scenes import TEXT, open_llm
from kvine.cache import snapshot
frames, frame = [], snapshot.frame
def framed(name, parts):
    frames.append(name)
    if len(frames) == 35: os.kill(os.getpid(), signal.SIGKILL)
    return frame(name, parts)
snapshot.frame = framed
open_llm(Path(sys.argv[2])).session(TEXT[50:150]).save(sys.argv[3])
"""
    arguments = [str(Path(__file__).parent), str(folders["TL"]), str(path)]
    assert subprocess.run([sys.executable, "-c", killed, *arguments], check=False).returncode == -9
    assert path.read_bytes() == before
    assert llm.load_session(path).tokens == TEXT[:20]


def test_files_that_cannot_be_written_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    session = open_llm(folders["TL"]).session(TEXT[:9])
    for path in (tmp_path, tmp_path / "missing" / "session", tmp_path / ("x" * 300)):
        with pytest.raises(SessionError, match=r"cannot be written|is no file"):
            session.save(path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    session.save(link)
    assert link.is_symlink() and (tmp_path / "target").exists(), "a link stays one"
    assert session.generate(SamplingParams(max_tokens=1)).usage.cached_tokens == 8


def test_what_is_no_file_is_never_replaced(folders: dict[str, Path], tmp_path: Path) -> None:
    session = open_llm(folders["TL"]).session(TEXT[:9])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "to\0nowhere"):
        with pytest.raises(SessionError, match=r"is no file|names no file|cannot be written"):
            session.save(path)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and list(tmp_path.iterdir()) == [pipe]
    with pytest.raises(SessionError, match="names no file that can hold a session"):
        session._llm.load_session(tmp_path / "to\0nowhere")


def test_what_json_cannot_say_is_no_note_and_positions_are_whole_numbers(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    session = open_llm(folders["TL"]).session(TEXT[:9])
    endless: list[Any] = []
    endless.append(endless)
    for note in (object(), {1, 2}, endless):
        with pytest.raises(RequestError, match="kept as JSON"):
            session.save(tmp_path / "file", note=note)
    wrong: tuple[Callable[[Any], object], ...] = (
        lambda s: s.crop(1.5),
        lambda s: s.crop(None),
        lambda s: s.edit(None, 2, ""),
        lambda s: s.edit(0, "2", ""),
    )
    for call in wrong:
        with pytest.raises(RequestError, match="counted in whole numbers"):
            call(session)
    with pytest.raises(RequestError, match="find looks for a text"):
        session.find(3)  # type: ignore[arg-type]
    assert session.tokens == TEXT[:9] and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_byte_is_under_a_checksum(folders: dict[str, Path], saved: tuple[Path, bytes], tmp_path: Path) -> None:
    llm = open_llm(folders["TL"], POLICIES["sinks"])
    data = bytearray(saved[1])
    for at in range(len(data)):
        data[at] ^= 0x10
        (tmp_path / "broken").write_bytes(data)
        with pytest.raises(SessionError):
            llm.load_session(tmp_path / "broken")
        data[at] ^= 0x10
    assert data == saved[1]
    assert llm.engine.manager.bytes_referenced == 0


# -- the real model ---------------------------------------------------------------------------------------------------


def test_smollm2_is_edited_saved_and_goes_on_like_a_cold_run(tmp_path: Path) -> None:
    cache = CacheConfig(kv_dtype="int8")
    llm = LLM(dtype="fp32", cache=cache)
    parts = standard_parts(
        llm.model, replace(cache, prefix_caching=False), llm.engine_config, vocab_size=49152, eos_ids=()
    )
    cold = build_engine(llm.engine_config, parts)

    def expected(tokens: list[int], count: int) -> list[int]:
        cold.add(tokens, greedy(count))
        return [event.sample.token_id for _ in range(count) for event in cold.step() if event.sample]

    session = llm.session("The museum opens at nine and closes at five. " * 8 + "Ask at the desk. We said:")
    start, stop = session.find(" nine", 40)
    with computed(llm) as fed:
        session.edit(start, stop, " ten")
        text = session.tokens
        answer = session.generate(greedy(8))
    assert fed[:2] == [(start // 32 * 32, len(text) - 1), (len(text) - 1, len(text))]
    assert answer.token_ids == expected(text, 8)
    session.save(tmp_path / "session")
    session.close()
    llm.engine.manager.clear()
    session = llm.load_session(tmp_path / "session")
    session.append(" And then")
    text = session.tokens
    answer = session.generate(greedy(8))
    assert answer.usage.cached_tokens == len(text) - 1
    assert answer.token_ids == expected(text, 8)
