"""`LLM`: a model, its tokenizer and its cache behind the few calls that most users need."""

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from kvine.cache.prefix import common_prefix
from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import build_engine, dense_attention, standard_parts
from kvine.engine.cache_free import DenseRunner, cache_free_engine
from kvine.engine.engine import Engine, ModelCall
from kvine.engine.held import HeldText
from kvine.engine.request import Event, checked_ids
from kvine.engine.resources import checked_threads
from kvine.engine.runner import Runner
from kvine.engine.stepped import SteppedCache
from kvine.errors import ContextLengthError, RequestError
from kvine.explain import Explanation, explain
from kvine.formats.gguf import GGUFFile
from kvine.generation import Generation, TextGeneration
from kvine.hub import DEFAULT_MODEL, ModelSource, resolve
from kvine.models.load import load_model
from kvine.sampling.params import SamplingParams
from kvine.session import Session, load_session
from kvine.spans import Spans
from kvine.text.tokenizer import load_tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A language model that answers through the block cache.

    Threads may share it: their requests run side by side in the same steps, of which one thread at a time makes one.

    Args:
        model: an alias, a Hugging Face hub id, a checkpoint folder or a `.gguf` file; or a source already resolved.
        device: `auto`, `cpu`, `cuda` or `mps`.
        dtype: `auto`, `fp32`, `bf16` or `fp16`.
        weights: `exact`, decoded to the dtype; `packed`, as a GGUF file has them; `auto`, packed on a CPU with compiled
            kernels but in fp32, and exact elsewhere; `q8` or `q4`, which round the others to 8 or 4 bits. What is
            multiplied with packed weights is rounded to 8 bits.
        cache: how the past is kept.
        engine: how requests share the model.
        threads: of the CPU; by default `OMP_NUM_THREADS`, or as many as the process may use (with a KvineWarning where
            that variable asks for more).

    Raises:
        FetchError, ModelLoadError, ConfigError: with a sentence that says what to do.
    """

    def __init__(
        self,
        model: str | ModelSource = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: str = "auto",
        weights: str = "auto",
        cache: CacheConfig | None = None,
        engine: EngineConfig | None = None,
        threads: int | None = None,
    ) -> None:
        torch.set_num_threads(checked_threads(threads))
        self.source = model if isinstance(model, ModelSource) else resolve(model)
        self.cache_config = cache or CacheConfig()
        self.engine_config = engine or EngineConfig()
        file = GGUFFile(self.source.path) if self.source.format == "gguf" else None  # its header is read once
        self.model = load_model(self.source, dtype=dtype, device=device, weights=weights, file=file)
        self.tokenizer = load_tokenizer(self.source, file)
        self.parts = standard_parts(
            self.model,
            self.cache_config,
            self.engine_config,
            vocab_size=self.tokenizer.vocab_size,
            eos_ids=self.tokenizer.eos_ids,
        )
        self.engine = build_engine(self.engine_config, self.parts)
        self.dense = DenseRunner(self.model.decoder, dense_attention(self.model, self.cache_config), self.model.device)
        self.cache_free_engine = cache_free_engine(self.parts, self.dense)
        assert isinstance(self.parts.runner, Runner)
        self.lock = self.parts.runner.lock  # held by whoever changes an engine
        self.parts.runner.make_room = self.engine.scheduler.held.give_way
        self._live: weakref.WeakValueDictionary[tuple[int, int], TextGeneration] = weakref.WeakValueDictionary()
        self.forgotten: list[tuple[Engine, int]] = []
        tier = self.parts.manager.tier
        self._close_store = None if tier is None else weakref.finalize(self, tier.close)  # at the latest at exit

    def close(self) -> None:
        """Writes to `cache_dir` what is not there yet, and lets go of the folder. Otherwise the LLM goes on as it is.

        The end of the process does this too.
        """
        if self._close_store is not None:
            with self.lock:
                self._close_store()

    # -- text in, text out --------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, but it is one prompt here
        self, prompts: Prompt, params: SamplingParams | None = None, *, use_cache: bool = True, pinned: Spans = ()
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_cache: bool = True,
        pinned: Spans = (),
    ) -> list[Generation]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_cache: bool = True,
        pinned: Spans = (),
    ) -> Generation | list[Generation]:
        """Generates from one prompt, or from several side by side.

        Args:
            prompts: a text, a list of token ids, or a list of these.
            params: for all prompts, or one for each; greedy by default.
            use_cache: false recomputes the whole text for every token.
            pinned: runs of positions of each prompt, `(first, end)` with the end outside, that the cache's window never
                drops.

        Returns:
            A `Generation`, or a list of them where several prompts were given.

        Raises:
            RequestError: if a prompt or parameter is wrong; nothing has been generated then.
        """
        single = _is_one_prompt(prompts)
        several: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[list-item, assignment]
        each = list(params) if isinstance(params, Sequence) else [params] * len(several)
        if len(each) != len(several):
            raise RequestError(
                f"There are {len(several)} prompts and {len(each)} sets of parameters: give one for each."
            )
        ids = [self.encode(prompt) for prompt in several]
        running: list[TextGeneration] = []
        try:
            for prompt_ids, request_params in zip(ids, each, strict=True):
                running.append(self.begin(prompt_ids, request_params, use_cache, pinned=pinned))
            results = [request.result for request in running]
        finally:
            for request in running:
                request.close()
        return results[0] if single else results

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, use_cache: bool = True, pinned: Spans = ()
    ) -> TextGeneration:
        """Generates from one prompt; iterate over the return value for the text as it comes.

        Raises:
            RequestError: as `generate`, and for several texts of one prompt, which no single stream can show.
        """
        return self.begin(self.encode(prompt), _of_one_text(params), use_cache, pinned=pinned)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        use_cache: bool = True,
        pin_system: bool = False,
    ) -> Generation:
        """Answers a conversation, written with the model's own chat template.

        Args:
            messages: mappings with `role` and `content`.
            params: greedy by default.
            use_cache: false recomputes the whole text for every token.
            pin_system: whether the cache's window never drops the system message, see `system_span`.

        Raises:
            RequestError: if the model has no chat template or the template refuses the messages.
        """
        pinned = self.system_span(messages) if pin_system else ()
        return self.begin(self.encode_chat(messages), params, use_cache, pinned=pinned).result

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        use_cache: bool = True,
        pin_system: bool = False,
    ) -> TextGeneration:
        """Like `chat`, as it comes; of one text, see `stream`."""
        pinned = self.system_span(messages) if pin_system else ()
        return self.begin(self.encode_chat(messages), _of_one_text(params), use_cache, pinned=pinned)

    def system_span(self, messages: Messages) -> Spans:
        """Where in a conversation its system message lies: what all conversations that open with it begin with.

        Raises:
            RequestError: if it opens with none.
        """
        opening = [message for message in messages if message.get("role") == "system"][:1]
        if not opening:
            raise RequestError("There is no system message to pin: give one, or leave it out.")
        first, second = (self.encode_chat([*opening, {"role": "user", "content": text}]) for text in ("0", "?"))
        return ((0, common_prefix(first, second)),)

    def session(self, prompt: Prompt = "", *, pinned: Spans = ()) -> Session:
        """Begins a text that goes on: what is appended and generated stays in the cache until the session is closed.

        Args:
            prompt: how it begins, computed at once: a text or token ids, such as `encode_chat` gives; may be empty.
            pinned: runs of positions, `(first, end)` with the end outside, that the cache's window never drops.

        Raises:
            RequestError, ContextLengthError, StepError: as `generate`.
        """
        session = Session(self, HeldText(pinned=self.engine.checked_pins(pinned)))
        session.append(prompt)
        return session

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """Goes on from a file that `Session.save` has written, without computing what it holds.

        Every byte of it is checked before anything changes.

        Raises:
            SessionError: if it is no such file, cut off, damaged, of another version, or was saved with another model,
                dtype or other options of the cache.
            ContextLengthError: if the cache has no room for it.
        """
        return load_session(self, Path(path))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, by the tokenizer's own BOS rule; ids are taken as they are."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable):
            raise RequestError(f"A prompt is a text or a list of token ids, not {prompt!r}.")
        return list(prompt)

    def encode_chat(self, messages: Messages, *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. The template writes its own BOS, so none is added."""
        template = self.tokenizer.chat_template
        if template is None:
            raise RequestError(
                f"{self.source.name} has no chat template: use generate with a plain prompt, or a model that is tuned "
                "for conversations."
            )
        text = template.render(messages, add_generation_prompt=add_generation_prompt)
        return self.tokenizer.encode(text, add_special=False)

    # -- one step at a time -------------------------------------------------------------------------------------------

    def logits(self, prompt: Prompt | Tensor, *, last: bool = False) -> Tensor:
        """Logits of every position of a text, computed without a cache.

        Args:
            prompt: a text, token ids, or a tensor of ids, [N] or [1, N].
            last: of the last position only.

        Returns:
            [1, N, vocabulary] fp32, or [1, 1, vocabulary].

        Raises:
            ContextLengthError: if the text is longer than the model's context.
        """
        ids, context = self._ids(prompt), self.parts.max_context
        if context is not None and len(ids) > context:
            raise ContextLengthError(f"{len(ids)} tokens do not fit the model's context of {context}.")
        return self.dense.logits(ids, last=last)[None]

    def forward(
        self, ids: Prompt | Tensor, cache: SteppedCache | None = None, *, last: bool = False
    ) -> tuple[Tensor, SteppedCache]:
        """Computes tokens after those that `cache` holds, and keeps their K and V.

        Args:
            ids: a text, token ids, or a tensor of ids, [N] or [1, N].
            cache: what an earlier call returned; None begins a new text.
            last: logits of the last token only.

        Returns:
            Logits, [1, N, vocabulary] fp32 (or [1, 1, vocabulary]), and the cache to continue from.

        Raises:
            RequestError: if there is nothing to compute, or the cache is closed or another LLM's.
            ContextLengthError: if the model's context or the cache has no room.
        """
        if cache is not None and cache.runner is not self.parts.runner:
            raise RequestError("This cache belongs to another LLM: begin a new one.")
        with self.lock:
            self.end_forgotten()
            if cache is None:
                assert isinstance(self.parts.runner, Runner)
                cache = SteppedCache(self.parts.runner, self.engine_config, self.parts.max_context)
            return cache.extend(self._ids(ids), last=last), cache

    def explain(
        self, prompt: Prompt, *, steps: int = 4, layer: int | None = None, head: int | None = None, top: int = 10
    ) -> Explanation:
        """Follows a prompt and greedy decode steps after it through the cache; shows itself in a notebook or by print.

        Args:
            prompt: a text or token ids.
            steps: decode steps, 0 or more.
            layer: whose attention weights are shown; None: the mean of all. `attention` has the others.
            head: likewise.
            top: how many of the most likely next tokens are listed.

        Raises:
            RequestError, ContextLengthError, StepError: see `kvine.explain.explain`.
        """
        with self.lock:
            self.end_forgotten()
            return explain(self, self._ids(prompt), steps=steps, layer=layer, head=head, top=top)

    def trace(self, on_call: Callable[[ModelCall], None] | None) -> None:
        """Has a function called after each model call; None stops it."""
        self.engine.on_call = self.cache_free_engine.on_call = on_call

    # -- inside -------------------------------------------------------------------------------------------------------

    def _ids(self, prompt: Prompt | Tensor) -> list[int]:
        if isinstance(prompt, Tensor):
            if prompt.ndim > 2 or (prompt.ndim == 2 and prompt.shape[0] != 1):
                raise RequestError(f"Token ids of shape {list(prompt.shape)} are not one text: give [N] or [1, N].")
            prompt = prompt.flatten().tolist()
        return checked_ids(self.encode(prompt), self.parts.vocab_size)

    def begin(
        self,
        prompt_ids: list[int],
        params: SamplingParams | None,
        use_cache: bool = True,
        *,
        held: HeldText | None = None,
        pinned: Spans = (),
    ) -> TextGeneration:
        """Starts a request over token ids; of a text that is `held`, and of what is `pinned`, see `Engine.add`."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"Say how to sample with SamplingParams(...), not with {params!r}.")
        engine = self.engine if use_cache else self.cache_free_engine
        with self.lock:
            self.end_forgotten()
            request = TextGeneration(self, engine, prompt_ids, params, held, pinned)
            self._live[id(engine), request.request_id] = request
        return request

    def pump(self, engine: Engine) -> None:
        """One step; hands each event to the request that it belongs to."""
        self.end_forgotten()
        self.deliver(engine, engine.step())

    def end_forgotten(self) -> None:
        """Ends requests whose `TextGeneration` nobody holds any more; finished ones are known to have ended."""
        while self.forgotten:
            engine, request_id = self.forgotten.pop()
            engine.abort(request_id)

    def drain(self, engine: Engine) -> None:
        """Delivers what needs no step, such as the end of an aborted request."""
        self.deliver(engine, engine.take_pending())

    def deliver(self, engine: Engine, events: Sequence[Event]) -> None:
        """Hands events to the requests that they belong to."""
        for request_id, own in groupby(events, key=lambda event: event.request_id):
            key = (id(engine), request_id)
            if (request := self._live.get(key)) is not None:
                request.receive(brought := list(own))
                if brought[-1].finish_reason is not None and not brought[-1].more:
                    self._live.pop(key, None)


def _is_one_prompt(prompts: Any) -> bool:
    """Whether it is one text or one list of token ids, numpy's and torch's too, rather than several prompts."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence | np.ndarray | Tensor):
        raise RequestError(f"Give a prompt (a text or a list of token ids) or a list of prompts, not {prompts!r}.")
    return len(prompts) > 0 and not isinstance(prompts[0], str | Sequence) and np.ndim(prompts[0]) == 0


def _of_one_text(params: SamplingParams | None) -> SamplingParams | None:
    if isinstance(params, SamplingParams) and params.num_lines > 1:
        asked = f"num_beams={params.num_beams}" if params.num_beams > 1 else f"n={params.n}"
        raise RequestError(
            f"A stream shows one text as it comes, and {asked} asks for several, of which beams are known at the end "
            "only: use generate or chat, whose result has them in choices."
        )
    return params
