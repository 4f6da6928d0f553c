"""Another engine in a process of its own: loads a model, then does what it is told, a line of JSON for each thing.

    python peer.py transformers|llama.cpp|openvino|vllm

Run by its path, by whatever Python has the engine: it imports nothing of Kvine. Commands come on stdin, answers go to
stdout; whatever a library prints there goes to stderr. It ends when stdin does.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Sequence  # noqa: UP035  # a peer may have an older Python

now = time.perf_counter
Answer = dict[str, Any]


class Driver:
    """An engine as the bench drives it. What it cannot do raises NotImplementedError with the reason.

    `facts` are `version`, `weights` (what they are kept in), `kv_dtype`, and `step_bytes` and `held_bytes`: of the
    weights that a step reads, and of all; None where the engine does not tell, or keeps K and V as no dtype of Kvine's.
    """

    facts: Answer

    def generate(self, ids: Sequence[int], tokens: int) -> Answer:
        """Reads a prompt, nothing of it cached, and writes greedily.

        Answers `first_s`, `step_s` of each further token and `token_ids`; None where an engine does not tell them.
        """
        raise NotImplementedError("it generates nothing")

    def batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> Answer:
        """Prompts of one length at once, so many tokens for each: `seconds` for all of it."""
        raise NotImplementedError("it takes one prompt at a time")

    def prefix_hit(self, ids: Sequence[int]) -> Answer:
        """The first token where all but the prompt's last token is cached: `seconds`."""
        raise NotImplementedError("it keeps no prefixes")

    def memory(self) -> Answer:
        """The most memory that the process has had resident, its mapped files included: `peak_bytes`."""
        return {"peak_bytes": peak_bytes()}


class Transformers(Driver):
    """transformers' model and its own cache, stepped by hand: the least that it can be asked to do."""

    def __init__(self, task: Answer) -> None:
        torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
        torch.set_num_threads(task["threads"])
        path, dtype = Path(task["model"]), {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[task["dtype"]]
        where: Answer = {"pretrained_model_name_or_path": str(path)}
        packed: Answer = {}
        if path.suffix == ".gguf":
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
            if hasattr(transformers, "GgufConfig"):  # since 5.x it would keep them packed otherwise
                packed = {"quantization_config": transformers.GgufConfig(dequantize=True)}
        with contextlib.suppress(Exception):  # ids are fed: one that it cannot read is no obstacle
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(**where, **packed, dtype=getattr(torch, dtype))
        self._torch, self._model = torch, loaded.eval()
        takes = inspect.signature(loaded.forward).parameters
        self._cache_name = "cache" if "cache" in takes else "past_key_values"
        self._kept: tuple[list[int], Any] | None = None
        held = {p.data_ptr(): p.numel() * p.element_size() for p in loaded.parameters()}
        table, head = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
        tied = table.data_ptr() == head.data_ptr()
        self.facts = {
            "version": transformers.__version__,
            "weights": task["dtype"],
            "kv_dtype": task["dtype"],
            "held_bytes": sum(held.values()),
            "step_bytes": sum(held.values()) - (0 if tied else table.numel() * table.element_size()),
        }

    def generate(self, ids: Sequence[int], tokens: int) -> Answer:
        """See `Driver`."""
        self._kept = None
        began = now()
        chosen, cache = self._call([list(ids)], None)
        first, token_ids = now() - began, chosen
        began = now()
        for _ in range(tokens - 1):
            chosen, cache = self._call([chosen[-1:]], cache)
            token_ids = token_ids + chosen
        return {"first_s": first, "step_s": _each(now() - began, tokens), "token_ids": token_ids}

    def batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> Answer:
        """See `Driver`."""
        began = now()
        chosen, cache = self._call([list(ids) for ids in prompts], None)
        for _ in range(tokens - 1):
            chosen, cache = self._call([[token] for token in chosen], cache)
        return {"seconds": now() - began}

    def prefix_hit(self, ids: Sequence[int]) -> Answer:
        """It finds no prefixes by itself: a cache kept by hand, less its last token."""
        if self._kept is None or self._kept[0] != list(ids):
            self._kept = (list(ids), self._call([list(ids)], None)[1])
        cache = self._kept[1]
        cache.crop(-1)
        began = now()
        self._call([list(ids[-1:])], cache)
        return {"seconds": now() - began}

    def _call(self, rows: list[list[int]], cache: Any) -> tuple[list[int], Any]:
        """Likeliest next token of each row, and the cache."""
        more = {} if cache is None else {self._cache_name: cache}
        with self._torch.inference_mode():
            out = self._model(input_ids=self._torch.tensor(rows), use_cache=True, logits_to_keep=1, **more)
            return out.logits[:, -1].argmax(-1).tolist(), getattr(out, self._cache_name)


class LlamaCpp(Driver):
    """llama.cpp by llama-cpp-python: evaluates ids and takes the largest logit, without its sampler chain."""

    def __init__(self, task: Answer) -> None:
        self._lib: Any = importlib.import_module("llama_cpp")
        self._numpy: Any = importlib.import_module("numpy")
        self._task = task
        self._many: tuple[Any, Any] | None = None
        self._llama = self._lib.Llama(
            task["model"],
            n_ctx=task["context"],
            n_threads=task["threads"],
            n_threads_batch=task["threads"],
            n_batch=2048,
            verbose=False,
        )
        # What its weights take is in the file's header, which the bench reads itself.
        self.facts = {
            "version": self._lib.__version__,
            "weights": Path(task["model"]).stem,
            "kv_dtype": "fp16",
            "held_bytes": None,
            "step_bytes": None,
        }

    def generate(self, ids: Sequence[int], tokens: int) -> Answer:
        """See `Driver`."""
        self._llama.reset()
        began = now()
        token_ids = [self._next(ids)]
        first, began = now() - began, now()
        for _ in range(tokens - 1):
            token_ids.append(self._next(token_ids[-1:]))
        return {"first_s": first, "step_s": _each(now() - began, tokens), "token_ids": token_ids}

    def prefix_hit(self, ids: Sequence[int]) -> Answer:
        """Going back to all but the last token is what its own generate does with a prompt that begins alike."""
        if self._llama.input_ids[: self._llama.n_tokens].tolist() != list(ids):
            self._llama.reset()
            self._next(ids)
        self._llama.n_tokens = len(ids) - 1
        began = now()
        self._next(ids[-1:])
        return {"seconds": now() - began}

    def batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> Answer:
        """A context of its own for many sequences, which `Llama` does not offer."""
        if self._many is None:
            self._many = self._open_many()
        lib, (context, batch) = self._lib, self._many
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        began = now()
        rows = [[(token, position) for position, token in enumerate(ids)] for ids in prompts]
        for position in range(len(prompts[0]), len(prompts[0]) + tokens):
            chosen = self._decode(context, batch, rows)
            rows = [[(token, position)] for token in chosen]
        return {"seconds": now() - began}

    def _open_many(self) -> tuple[Any, Any]:
        lib, task = self._lib, self._task
        params = lib.llama_context_default_params()
        params.n_seq_max, params.n_ctx = task["sequences"], task["sequences"] * task["sequence_tokens"]
        params.n_batch = max(2048, task["sequences"] * task["sequence_tokens"])
        params.n_threads = params.n_threads_batch = task["threads"]
        context = lib.llama_init_from_model(self._llama.model, params)
        if not context:
            raise NotImplementedError(f"it makes no context for {task['sequences']} sequences")
        return context, lib.llama_batch_init(params.n_batch, 0, 1)

    def _decode(self, context: Any, batch: Any, rows: list[list[tuple[int, int]]]) -> list[int]:
        """One call for all sequences, a token and its position after the other; likeliest next token of each."""
        index, last = 0, []
        for sequence, row in enumerate(rows):
            for token, position in row:
                batch.token[index], batch.pos[index] = token, position
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
                batch.logits[index] = (token, position) == row[-1]
                index += 1
            last.append(index - 1)
        batch.n_tokens = index
        if status := self._lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        return [self._argmax(context, index) for index in last]

    def _next(self, ids: Sequence[int]) -> int:
        self._llama.eval(ids)
        return self._argmax(self._llama.ctx, -1)

    def _argmax(self, context: Any, index: int) -> int:
        logits = self._lib.llama_get_logits_ith(context, index)
        return int(self._numpy.ctypeslib.as_array(logits, (self._llama.n_vocab(),)).argmax())


class OpenVino(Driver):
    """OpenVINO GenAI's pipeline, which is told of its own times; ids go in and come out."""

    def __init__(self, task: Answer) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        self._tensor = openvino.Tensor
        self._pipe = self._genai.LLMPipeline(task["model"], "CPU", INFERENCE_NUM_THREADS=task["threads"])
        self._reads = 0
        self.facts = {
            "version": getattr(self._genai, "__version__", "unknown"),
            "weights": Path(task["model"]).name,
            "kv_dtype": None,
            "held_bytes": None,
            "step_bytes": None,
        }

    def generate(self, ids: Sequence[int], tokens: int) -> Answer:
        """It keeps prefixes: another first token each time, so that nothing of the prompt is found."""
        self._reads += 1
        metrics = self._run([[ids[0] + self._reads, *ids[1:]]], tokens)
        step = metrics.get_tpot().mean / 1e3 if tokens > 1 else None
        return {"first_s": metrics.get_ttft().mean / 1e3, "step_s": step, "token_ids": None}

    def batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> Answer:
        """See `Driver`."""
        began = now()
        self._run([list(ids) for ids in prompts], tokens)
        return {"seconds": now() - began}

    def prefix_hit(self, ids: Sequence[int]) -> Answer:
        """See `Driver`."""
        self._run([list(ids)], 1)
        return {"seconds": self._run([list(ids)], 1).get_ttft().mean / 1e3}

    def _run(self, rows: list[list[int]], tokens: int) -> Any:
        config = self._genai.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, ignore_eos=True, apply_chat_template=False
        )
        ids = self._numpy.array(rows, "int64")
        inputs = self._genai.TokenizedInputs(self._tensor(ids), self._tensor(self._numpy.ones_like(ids)))
        return self._pipe.generate(inputs, config).perf_metrics


class Vllm(Driver):
    """vLLM on the CPU, in this process; what it tells is whole generations, and a step is what one token more takes."""

    def __init__(self, task: Answer) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{task['threads'] - 1}")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._vllm: Any = importlib.import_module("vllm")
        dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[task["dtype"]]
        length = task["context"]
        self._llm = self._vllm.LLM(task["model"], dtype=dtype, max_model_len=length, enable_prefix_caching=True)
        self.facts = {
            "version": self._vllm.__version__,
            "weights": task["dtype"],
            "kv_dtype": task["dtype"],
            "held_bytes": None,
            "step_bytes": None,
        }

    def generate(self, ids: Sequence[int], tokens: int) -> Answer:
        """See `Driver`."""
        first, token_ids = self._run([ids], 1, forget=True)
        if tokens == 1:
            return {"first_s": first, "step_s": None, "token_ids": token_ids}
        # Of a prompt that is cached by now, so that its time does not hide that of the others.
        again, _ = self._run([ids], 1, forget=False)
        whole, token_ids = self._run([ids], tokens, forget=False)
        return {"first_s": first, "step_s": _each(whole - again, tokens), "token_ids": token_ids}

    def batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> Answer:
        """See `Driver`."""
        return {"seconds": self._run(prompts, tokens, forget=True)[0]}

    def prefix_hit(self, ids: Sequence[int]) -> Answer:
        """See `Driver`. It finds whole blocks only, so that it computes what the last one holds again."""
        self._run([ids], 1, forget=False)
        return {"seconds": self._run([ids], 1, forget=False)[0]}

    def _run(self, prompts: Sequence[Sequence[int]], tokens: int, *, forget: bool) -> tuple[float, list[int]]:
        if forget:
            self._llm.reset_prefix_cache()
        params = self._vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        began = now()
        results = self._llm.generate(asked, params, use_tqdm=False)
        return now() - began, list(results[0].outputs[0].token_ids)


DRIVERS: dict[str, Callable[[Answer], Driver]] = {
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "vllm": Vllm,
}


def serve(load: Callable[[Answer], Driver]) -> None:
    """Answers commands until stdin ends: `load` first, then the methods of the driver that it makes, by name."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    commands: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()
    driver: Any = None
    while True:
        command = commands.get()
        do = command.pop("do")
        try:
            if do == "load":
                driver = load(command)
                reply = {"ok": driver.facts}
            else:
                reply = {"ok": getattr(driver, do)(**command)}
        except NotImplementedError as error:
            reply = {"cannot": str(error)}
        except ModuleNotFoundError as error:
            reply = {"missing": str(error.name)}
        except BaseException as error:
            traceback.print_exc()
            reply = {"failed": str(error), "kind": type(error).__name__}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def peak_bytes() -> int:
    """The most memory that this process has had resident, its mapped files included."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _listen(commands: queue.SimpleQueue[Answer]) -> None:
    """Hears the end of stdin in the midst of work too: whoever asked has gone, and nobody else would end this."""
    for line in sys.stdin:
        commands.put(json.loads(line))
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _each(seconds: float, tokens: int) -> float | None:
    """Of each token after the first."""
    return seconds / (tokens - 1) if tokens > 1 else None


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]
    serve(DRIVERS[sys.argv[1]])
