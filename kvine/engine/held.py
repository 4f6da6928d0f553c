"""Texts that outlive their requests, and the sequences that keep their past between these.

What they hold counts in the cache's budget, and it gives way: whoever needs the room has the least recently used text
let go of its sequence. That becomes cached like any finished request's; the text finds it again, or computes it again.
"""

from collections.abc import Sequence

from kvine.cache.manager import CachedSequence, CacheManager
from kvine.cache.prefix import common_prefix
from kvine.errors import RequestError
from kvine.spans import Spans


class HeldText:
    """A text that goes on from request to request.

    Its sequence need not hold all of it, and never decides what the text is: what the two do not share is computed.

    Attributes:
        tokens: the text.
        sequence: its hold on the cache while no request has it; None where it has none.
        busy: whether a request is under way for it.
        closed: whether it is to hold nothing any more.
        pinned: positions that stay visible whatever the windows, in every request for it.
    """

    def __init__(self, tokens: Sequence[int] = (), pinned: Spans = ()) -> None:
        self.tokens = list(tokens)
        self.pinned = pinned
        self.sequence: CachedSequence | None = None
        self.busy = False
        self.closed = False
        self._then: list[int] = []
        self._grows = False

    def begin(self, then: Sequence[int], *, grows: bool) -> None:
        """Notes that a request begins.

        Args:
            then: what the text will be when it has ended well.
            grows: whether what it has generated comes behind that.

        Raises:
            RequestError: if one is under way.
        """
        if self.busy:
            raise RequestError("A text is still being generated in this session: take all of it, or close it, first.")
        self.busy, self._then, self._grows = True, list(then), grows

    def end(self, output_ids: Sequence[int] | None) -> None:
        """Notes what the request has generated; None, and the text is as it was, if it came to nothing."""
        if output_ids is not None:
            self.tokens = [*self._then, *output_ids] if self._grows else self._then
        self.busy, self._then = False, []


class HeldTexts:
    """All texts that are held, by the order of their last use. Called by whoever may change the cache.

    Args:
        manager: of the cache.

    Attributes:
        num_kept: times that a sequence was left with a text, which may have to give way since.
        forgotten: texts that nobody can use any more; only noted, as that may be in mid-step.
    """

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._idle: dict[HeldText, None] = {}  # those that have a sequence, the least recently used first
        self.num_kept = 0
        self.forgotten: list[HeldText] = []

    def keep(self, text: HeldText, sequence: CachedSequence) -> None:
        """Leaves a sequence with a text, as far as it is that text. Room reserved and not committed is given up."""
        if text.closed:
            self._manager.release(sequence)
            return
        self._manager.crop(sequence, common_prefix(sequence.tokens, text.tokens))
        text.sequence = sequence
        self._idle[text] = None
        self.num_kept += 1

    def lend(self, text: HeldText) -> CachedSequence | None:
        """Hands a text's sequence out, to a request or to whoever reads it."""
        self._idle.pop(text, None)
        sequence, text.sequence = text.sequence, None
        return sequence

    def change(self, text: HeldText, tokens: Sequence[int]) -> None:
        """Makes a text another one, and keeps of its sequence what both begin with."""
        text.tokens = list(tokens)
        if (sequence := self.lend(text)) is not None:
            self.keep(text, sequence)

    def fork(self, text: HeldText) -> HeldText:
        """A second text that is equal; blocks are shared until one of the two writes."""
        twin = HeldText(text.tokens, text.pinned)
        if text.sequence is not None:
            self.keep(twin, self._manager.fork(text.sequence))
        return twin

    def close(self, text: HeldText) -> None:
        """Has a text hold nothing any more. What it held stays cached as long as there is room."""
        text.closed = True
        self._let_go(text)

    def give_way(self) -> bool:
        """Has the text that was used least recently let go of its sequence; false if none has one."""
        self.sweep()
        for text in self._idle:
            self._let_go(text)
            return True
        return False

    def sweep(self) -> None:
        """Closes the texts that nobody can use any more."""
        while self.forgotten:
            self.close(self.forgotten.pop())

    def _let_go(self, text: HeldText) -> None:
        if (sequence := self.lend(text)) is not None:
            self._manager.release(sequence)
