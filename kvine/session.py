"""`Session`: a text that goes on, is cut, forked and edited at any place, and kept in a file; its past stays cached."""

import json
import operator
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvine.cache.block_bytes import PoolBytes
from kvine.cache.sequence import CachedSequence
from kvine.cache.snapshot import Origin, read_snapshot, restore, write_snapshot
from kvine.engine.build import DTYPE_NAMES
from kvine.engine.held import HeldText
from kvine.engine.interrupt import uninterrupted
from kvine.engine.request import checked_ids
from kvine.engine.runner import Runner
from kvine.errors import ContextLengthError, RequestError
from kvine.sampling.params import SamplingParams
from kvine.spans import Spans

if TYPE_CHECKING:
    from kvine.generation import Generation, TextGeneration
    from kvine.llm import LLM

_COMPUTE = SamplingParams(max_tokens=1)  # the token is dropped: what counts is what was computed before it
_NOT_OF_KV = ("kv_memory", "prefix_caching", "cache_dir", "cache_size")  # options that no key or value depends on


class Session:
    """A text and its past in the cache, made by `LLM.session` or `LLM.load_session`.

    Keys and values of all tokens but the last are computed at once, the last one's together with what follows it. They
    are held until `close`, the end of a `with` block, or until nobody has the session any more. Where requests need the
    room, sessions that are not generating let go of what they hold, the least recently used first. They are never wrong
    for it: what they do not find in the cache any more is computed again.

    Threads may share it, but it does one thing at a time.

    Args:
        llm: the model.
        text: what it holds.
        note: what was saved beside it.
    """

    def __init__(self, llm: "LLM", text: HeldText, note: Any = None) -> None:
        self._llm = llm
        self._text = text
        self.note = note
        self._texts = llm.engine.scheduler.held
        self._running: weakref.ref[TextGeneration] | None = None
        # Only noted, for this may run in mid-step.
        weakref.finalize(self, self._texts.forgotten.append, text).atexit = False

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """The text's token ids. What a stream generates is part of it once the stream has ended."""
        return list(self._text.tokens)

    @property
    def text(self) -> str:
        """The text, without special tokens."""
        return self._llm.tokenizer.decode(self._text.tokens)

    @property
    def pinned(self) -> Spans:
        """Runs of positions that the cache's window never drops."""
        return self._text.pinned

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return len(self._text.tokens)

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values it holds now, those included that windows have let go."""
        sequence = self._text.sequence
        return 0 if sequence is None else sequence.num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V in its blocks, those included that it shares."""
        with self._llm.lock:
            sequence = self._text.sequence
            return 0 if sequence is None else self._llm.engine.manager.bytes_held(sequence)

    def find(self, text: str, start: int = 0) -> tuple[int, int]:
        """Where a text stands: the tokens start … stop - 1 that it lies in, for `edit`.

        They may begin before it and end behind it, by part of a token. Special tokens are found as they are spelled.

        Args:
            text: what to look for.
            start: the first token that it may begin in.

        Raises:
            RequestError: if it is not there.
        """
        if not isinstance(text, str):
            raise RequestError(f"find looks for a text, not for {text!r}.")
        wanted, number = text.encode(errors="surrogatepass"), max(_whole(start), 0)
        pieces = [self._llm.tokenizer.token_bytes(t, skip_special=False) for t in self._text.tokens[number:]]
        at = b"".join(pieces).find(wanted)
        if at < 0 or not wanted:
            raise RequestError(f"{text!r} does not stand in the session from token {number} on.")
        begin = end = None
        passed = 0
        for token, piece in enumerate(pieces, start=number):
            passed += len(piece)
            if begin is None and passed > at:
                begin = token
            if passed >= at + len(wanted):
                end = token + 1
                break
        assert begin is not None and end is not None
        return begin, end

    # -- what can be done with it -------------------------------------------------------------------------------------

    def append(self, more: str | Sequence[int]) -> None:
        """Adds to the text, and computes it.

        Args:
            more: a text, which is tokenized by itself, or token ids. Before a text that begins the session stands BOS
                where the tokenizer puts one.

        Raises:
            RequestError, ContextLengthError, StepError: as `LLM.generate`; the session is as it was then.
        """
        with self._llm.lock:
            text = self._usable()
            grown = [*text.tokens, *self._encode(more, at=len(text.tokens))]
        self._compute(grown)

    def generate(self, params: SamplingParams | None = None, *, after: str | Sequence[int] = "") -> "Generation":
        """Continues the text; the generated tokens, the ending one included, become part of it.

        Args:
            params: greedy by default.
            after: what to append before, see `append`; one request does both.

        Raises:
            RequestError, ContextLengthError, StepError: as `LLM.generate`, and for several texts, of which a session
                can be only one; the session is as it was then.
        """
        with closing(self.stream(params, after=after)) as running:
            return running.result

    def stream(self, params: SamplingParams | None = None, *, after: str | Sequence[int] = "") -> "TextGeneration":
        """Like `generate`; iterate over the return value for the text as it comes.

        Whoever closes it early, or drops it, leaves what was generated until then in the session.
        """
        with self._llm.lock:
            text = self._usable()
            if isinstance(params, SamplingParams) and params.num_lines > 1:
                raise RequestError("A session goes on as one text: fork it for each one that you want.")
            ids = [*text.tokens, *self._encode(after, at=len(text.tokens))]
            if not ids:
                raise RequestError("The session is empty: append a text first.")
            return self._begin(ids, params, ids, grows=True)

    def crop(self, num_tokens: int) -> None:
        """Forgets all but the first num_tokens tokens.

        Raises:
            RequestError: if there are fewer, or the number is negative: it counts what stays, not what goes.
        """
        num_tokens = _whole(num_tokens)
        with self._llm.lock:
            text = self._usable()
            if not 0 <= num_tokens <= len(text.tokens):
                raise RequestError(f"crop takes the number of tokens that stay, 0 to {len(text.tokens)}.")
            self._change(text.tokens[:num_tokens])

    def fork(self) -> "Session":
        """A second session with the same text; blocks are shared until one of the two writes."""
        with self._llm.lock, uninterrupted():
            return Session(self._llm, self._texts.fork(self._usable()), self.note)

    def edit(self, start: int, stop: int, new: str | Sequence[int]) -> None:
        """Puts something else in the place of tokens start … stop - 1, and computes what follows from there on.

        That begins at the first token that differs, with packed codecs at the start of its block. Where windows have
        let go of what that token's query sees, and the cache has not kept it, it begins as much earlier as it must.

        Args:
            start: first token that goes; the session's length to append.
            stop: the one after the last that goes; as start to insert.
            new: see `append`; may be empty.

        Raises:
            RequestError: if there are no such tokens; also as `append`. The session is as it was then.
        """
        start, stop = _whole(start), _whole(stop)
        with self._llm.lock:
            old = self._usable().tokens
            if not 0 <= start <= stop <= len(old):
                raise RequestError(
                    f"There are no tokens {start} to {stop} to edit: give 0 <= start <= stop <= {len(old)}."
                )
            edited = [*old[:start], *self._encode(new, at=start), *old[stop:]]
        self._compute(edited)

    def save(self, path: str | os.PathLike[str], *, note: Any = None) -> int:
        """Writes text, keys and values to a file, which only its owner can read; returns its bytes.

        The file takes the place of one with that name when it is complete and on the disk. It can be loaded where the
        model, its dtype and the cache's options are the same.

        Args:
            path: of the file.
            note: anything that JSON can say, to be found as `note` of the session that is loaded.

        Raises:
            RequestError: for a note that JSON cannot say.
            SessionError: if it cannot be written; a file that was there is as it was, and what is no file too.
        """
        _check_note(note)
        self._compute(self.tokens)
        memories = PoolBytes(self._runner.attention.pools)
        return write_snapshot(Path(path), _origin(self._llm), self._borrowed, self._llm.engine.manager, memories, note)

    def close(self) -> None:
        """Ends the session and what it generates. What it held stays cached for later requests while there is room."""
        with self._llm.lock:
            if self._running is not None and (running := self._running()) is not None:
                running.close()
            self._llm.end_forgotten()
            self._texts.close(self._text)
            self._runner.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _runner(self) -> Runner:
        runner = self._llm.parts.runner
        assert isinstance(runner, Runner)
        return runner

    def _usable(self) -> HeldText:
        """The text, if nothing else is being done with it."""
        self._llm.end_forgotten()
        if self._text.closed:
            raise RequestError("This session is closed: begin a new one.")
        if self._text.busy:
            raise RequestError("A text is still being generated in this session: take all of it, or close it, first.")
        return self._text

    @contextmanager
    def _borrowed(self) -> Iterator[tuple[list[int], CachedSequence]]:
        """The text and its sequence while nobody changes the cache."""
        manager = self._llm.engine.manager
        with self._llm.lock:
            text = self._usable()
            self._runner.make_copies()
            if text.sequence is not None:
                yield text.tokens, text.sequence
                return
            nothing = manager.open((), self._llm.parts.namespace(None, text.pinned), text.pinned)
            try:
                yield text.tokens, nothing
            finally:
                manager.release(nothing, keep_tail=False)

    def _encode(self, more: str | Sequence[int], *, at: int) -> list[int]:
        if isinstance(more, str):
            return self._llm.tokenizer.encode(more, add_special=at == 0) if more else []
        ids = list(more) if isinstance(more, Iterable) else self._llm.encode(more)
        return checked_ids(ids, self._llm.parts.vocab_size) if ids else []

    def _compute(self, tokens: list[int]) -> None:
        """Makes the text these tokens, all but the last computed."""
        with self._llm.lock:
            text, context = self._usable(), self._llm.parts.max_context
            if context is not None and len(tokens) > context:
                raise ContextLengthError(
                    f"The session would have {len(tokens)} tokens, and the model's context is {context}: shorten it, "
                    "or keep a window with in_cache sinks."
                )
            num_wanted = max(0, len(tokens) - 1)
            held = [] if text.sequence is None else text.sequence.tokens
            if held[:num_wanted] == tokens[:num_wanted]:
                self._change(tokens)
                return
            running = self._begin(tokens[:-1], _COMPUTE, tokens, grows=False)
        with closing(running):
            running.result  # noqa: B018  # computes

    def _begin(
        self, ids: list[int], params: SamplingParams | None, then: list[int], *, grows: bool
    ) -> "TextGeneration":
        self._text.begin(then, grows=grows)
        try:
            running = self._llm.begin(ids, params, held=self._text)
        except BaseException:
            self._text.end(None)
            raise
        self._running = weakref.ref(running)
        return running

    def _change(self, tokens: list[int]) -> None:
        with uninterrupted():
            self._texts.change(self._text, tokens)
            self._runner.give_back()


def _whole(number: object) -> int:
    try:
        return operator.index(number)  # type: ignore[arg-type]  # that is what it finds out
    except TypeError:
        raise RequestError(f"Tokens of a session are counted in whole numbers, not in {number!r}.") from None


def _check_note(note: Any) -> None:
    try:
        json.dumps(note)
    except (TypeError, ValueError, RecursionError):
        raise RequestError(
            "The note of a session is kept as JSON: give texts, numbers, lists and mappings by text."
        ) from None


def load_session(llm: "LLM", path: Path) -> Session:
    """See `LLM.load_session`."""
    manager, runner = llm.engine.manager, llm.parts.runner
    assert isinstance(runner, Runner)
    origin, memories = _origin(llm), PoolBytes(runner.attention.pools)
    snapshot = read_snapshot(path, origin, manager, memories, llm.parts.vocab_size)
    if not manager.fits_ever(snapshot.num_cached, 1, pinned=snapshot.pinned):
        raise ContextLengthError(
            f"{path} holds {snapshot.num_cached} tokens, more than the cache of {manager.budget:,} bytes can hold: "
            "raise kv_memory."
        )
    with llm.lock, uninterrupted():
        runner.make_copies()  # what is to be copied must not be copied over what is loaded
        texts = llm.engine.scheduler.held
        sequence = restore(manager, memories, origin, snapshot, texts.give_way)
        if sequence is None:
            raise ContextLengthError(
                f"There is no room for the {snapshot.num_cached} tokens of {path} beside what is running: load it when "
                "that has ended, or raise kv_memory."
            )
        text = HeldText(snapshot.tokens, snapshot.pinned)
        texts.keep(text, sequence)
    return Session(llm, text, snapshot.note)


def _origin(llm: "LLM") -> Origin:
    options = {name: value for name, value in asdict(llm.cache_config).items() if name not in _NOT_OF_KV}
    return Origin(
        lambda pinned: llm.parts.namespace(None, pinned),
        llm.source.name,
        llm.model.fingerprint.hex(),
        {"dtype": DTYPE_NAMES[llm.model.dtype], **options},
    )
