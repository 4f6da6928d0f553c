"""How each engine is driven: Kvine and transformers for real, the others by stand-ins that keep account of it."""

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_models import VOCAB, random_prompt, write_checkpoint, write_tokenizer

from kvine.evidence.bench import peer
from kvine.evidence.bench.own import Kvine
from kvine.llm import LLM
from kvine.models.packing import packed_bytes

IDS = random_prompt(40)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama")
    write_tokenizer(folder)
    room = {"context": 60, "sequences": 3, "sequence_tokens": 50}
    more = {"device": "cpu", "weights": "exact", "kv_memory": 4 << 20}
    return {"model": str(folder), "dtype": "fp32", "threads": 1, **room, **more}


@pytest.fixture(scope="module")
def by_hand(task: dict[str, Any]) -> list[int]:
    """The greedy tokens after IDS, by the loop of a textbook."""
    llm, token_ids = LLM(task["model"], dtype="fp32", device="cpu", threads=1), []
    logits, cache = llm.forward(IDS, last=True)
    while len(token_ids) < 6:
        token_ids.append(int(logits[0, -1].argmax()))
        logits, cache = llm.forward(token_ids[-1:], cache, last=True)
    return token_ids


def test_kvine_computes_a_prompt_anew_each_time_but_on_a_hit(task: dict[str, Any], by_hand: list[int]) -> None:
    kvine = Kvine(task)
    calls: list[tuple[int, int]] = []
    kvine._llm.trace(lambda call: calls.append(call.input_shape))
    for _ in range(2):
        answer = kvine.generate(IDS, 6)
        assert answer["token_ids"] == by_hand and answer["first_s"] > 0 and answer["step_s"] > 0
    assert calls == [(1, 40), *[(1, 1)] * 5] * 2
    assert kvine.generate(IDS, 1)["step_s"] is None
    calls.clear()
    assert kvine.prefix_hit(IDS)["seconds"] > 0 and kvine.prefix_hit(IDS)["seconds"] > 0
    assert calls == [(1, 40), (1, 1), (1, 1), (1, 1)]
    calls.clear()
    assert kvine.batch([IDS, [1, *IDS[1:]], [2, *IDS[1:]]], 3)["seconds"] > 0
    assert calls == [(3, 120), (3, 3), (3, 3)]
    calls.clear()
    assert kvine.cache_free(IDS)["seconds"] > 0 and calls == [], "not by the engine, and not from its cache"
    assert kvine.facts["step_bytes"] == kvine.facts["held_bytes"] - VOCAB * 64 * 4, "a table that is no head too"
    assert kvine.memory()["peak_bytes"] > 1 << 20
    assert kvine.facts["weights"] == "fp32"


def test_kvine_says_what_its_weights_are_kept_in(task: dict[str, Any]) -> None:
    """What most of their bytes are, of embedding and head too; a floor reads them packed."""
    for weights, kept in (("q8", "Q8_0"), ("q4", "Q4_1")):
        kvine = Kvine({**task, "dtype": "bf16", "weights": weights})
        assert kvine.facts["weights"] == kept
        table = packed_bytes("Q8_0", (VOCAB, 64))
        assert kvine.facts["step_bytes"] == kvine.facts["held_bytes"] - table < 2 * 3 * 64 * 10 * 64


def test_transformers_is_stepped_with_its_cache(task: dict[str, Any], by_hand: list[int]) -> None:
    driver = peer.Transformers(task)
    shapes: list[tuple[int, ...]] = []
    forward = driver._model.forward

    def watched(input_ids: Any, **more: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids=input_ids, **more)

    driver._model.forward = watched
    assert driver.generate(IDS, 6)["token_ids"] == by_hand
    assert shapes == [(1, 40), *[(1, 1)] * 5]
    shapes.clear()
    assert driver.prefix_hit(IDS)["seconds"] > 0 and driver.prefix_hit(IDS)["seconds"] > 0
    assert shapes == [(1, 40), (1, 1), (1, 1)]
    assert driver._kept is not None and driver._kept[1].get_seq_length() == 40
    shapes.clear()
    assert driver.batch([IDS, [1, *IDS[1:]]], 3)["seconds"] > 0
    assert shapes == [(2, 40), (2, 1), (2, 1)]
    assert driver.facts["step_bytes"] == driver.facts["held_bytes"] - VOCAB * 64 * 4


class FakeLlama:
    """Its likeliest next token is the number of tokens that it has read."""

    def __init__(self, path: str, **options: Any) -> None:
        self.path, self.options = path, options
        self.model, self.ctx, self.n_tokens, self.fed = "weights", self, 0, []
        self.input_ids = np.zeros(100, np.intc)

    def reset(self) -> None:
        self.n_tokens = 0

    def n_vocab(self) -> int:
        return 50

    def eval(self, ids: list[int]) -> None:
        self.input_ids[self.n_tokens : self.n_tokens + len(ids)] = ids
        self.n_tokens += len(ids)
        self.fed.append(len(ids))


class FakeLlamaLibrary(SimpleNamespace):
    """The functions beside `Llama`; of many sequences the likeliest next token is the position read last."""

    __version__ = "0"
    Llama = FakeLlama

    def __init__(self) -> None:
        super().__init__(steps=[], seen=None)
        self.llama_context_default_params = SimpleNamespace
        self.llama_get_memory = lambda context: context
        self.llama_memory_clear = lambda memory, data: None

    def llama_init_from_model(self, model: str, params: Any) -> Any:
        assert model == "weights"
        self.params = params
        return "many"

    def llama_batch_init(self, tokens: int, embd: int, sequences: int) -> Any:
        rows = {name: [0] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(**rows, seq_id=[[0] for _ in range(tokens)], n_tokens=0)

    def llama_decode(self, context: str, batch: Any) -> int:
        rows = range(batch.n_tokens)
        self.steps.append([(batch.seq_id[r][0], batch.token[r], batch.pos[r], batch.logits[r]) for r in rows])
        return 0

    def llama_get_logits_ith(self, context: Any, index: int) -> Any:
        best = context.n_tokens if isinstance(context, FakeLlama) else self.steps[-1][index][2] + 1
        logits = (ctypes.c_float * 50)()
        logits[best] = 1.0
        self.seen = logits  # keeps the memory that is pointed to
        return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))


def test_llama_cpp_is_fed_ids_one_call_a_step(task: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLlamaLibrary()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    driver = peer.LlamaCpp({**task, "model": "some-q4.gguf"})
    llama = driver._llama
    assert (llama.path, llama.options["n_ctx"], llama.options["n_threads"]) == ("some-q4.gguf", 60, 1)
    assert driver.generate([5, 6, 7], 3)["token_ids"] == [3, 4, 5]
    assert llama.fed == [3, 1, 1]
    llama.fed.clear()
    driver.prefix_hit([5, 6, 7])
    driver.prefix_hit([5, 6, 7])
    assert llama.fed == [3, 1, 1] and llama.n_tokens == 3
    assert driver.batch([[5, 6], [7, 8]], 3)["seconds"] > 0
    read, *further = library.steps
    assert read == [(0, 5, 0, False), (0, 6, 1, True), (1, 7, 0, False), (1, 8, 1, True)]
    assert further == [[(0, 2, 2, True), (1, 2, 2, True)], [(0, 3, 3, True), (1, 3, 3, True)]]
    assert (library.params.n_seq_max, library.params.n_ctx) == (3, 150)


def test_vllm_forgets_its_prefixes_but_for_a_hit(task: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class FakeVllm:
        def __init__(self, model: str, **options: Any) -> None:
            assert options == {"dtype": "float32", "max_model_len": 60, "enable_prefix_caching": True}

        def reset_prefix_cache(self) -> None:
            asked.append("forget")

        def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
            assert params.temperature == 0 and params.ignore_eos
            asked.append(([prompt["prompt_token_ids"] for prompt in prompts], params.max_tokens))
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(params.max_tokens))])]

    library = SimpleNamespace(LLM=FakeVllm, SamplingParams=SimpleNamespace, __version__="0")
    monkeypatch.setitem(sys.modules, "vllm", library)
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "as it was")
    driver = peer.Vllm(task)
    assert driver.generate([5, 6], 4)["token_ids"] == [0, 1, 2, 3]
    assert asked == ["forget", ([[5, 6]], 1), ([[5, 6]], 1), ([[5, 6]], 4)]
    asked.clear()
    driver.prefix_hit([5, 6])
    driver.batch([[5], [6]], 3)
    assert asked == [([[5, 6]], 1), ([[5, 6]], 1), "forget", ([[5], [6]], 3)]


def test_openvino_reads_another_prompt_each_time_but_for_a_hit(
    task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    time = SimpleNamespace(mean=500.0)

    class FakePipeline:
        def __init__(self, model: str, device: str, **options: Any) -> None:
            assert (device, options) == ("CPU", {"INFERENCE_NUM_THREADS": 1})

        def generate(self, rows: Any, config: Any) -> Any:
            assert config.ignore_eos and not config.do_sample and not config.apply_chat_template
            ids, mask = rows
            assert mask.shape == ids.shape and mask.all()
            asked.append((ids.tolist(), config.max_new_tokens))
            return SimpleNamespace(perf_metrics=SimpleNamespace(get_ttft=lambda: time, get_tpot=lambda: time))

    genai = SimpleNamespace(
        LLMPipeline=FakePipeline,
        GenerationConfig=SimpleNamespace,
        TokenizedInputs=lambda ids, mask: (ids, mask),
        __version__="0",
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda array: array))
    driver = peer.OpenVino({**task, "model": "/models/ov-int8"})
    assert driver.facts["weights"] == "ov-int8"
    assert driver.generate([5, 6], 4) == {"first_s": 0.5, "step_s": 0.5, "token_ids": None}
    assert driver.generate([5, 6], 1)["step_s"] is None
    assert driver.prefix_hit([5, 6])["seconds"] == 0.5
    driver.batch([[5, 6], [7, 8]], 3)
    assert asked == [([[6, 6]], 4), ([[7, 6]], 1), ([[5, 6]], 1), ([[5, 6]], 1), ([[5, 6], [7, 8]], 3)]


def test_the_script_needs_nothing_of_kvine() -> None:
    """It runs in environments that do not have it."""
    lines = Path(peer.__file__).read_text().splitlines()
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported <= set(sys.stdlib_module_names) | {"__future__"}
