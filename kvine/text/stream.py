"""Token ids to text as they come: whole characters only, and nothing of a stop string.

Works on each token's bytes through an incremental UTF-8 decoder and an automaton over the stop strings, so a token
costs time in proportion to its own text, however much came before.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvine.errors import RequestError
from kvine.text.tokenizer import Tokenizer


class TextStream:
    """Incremental detokenizer and stop strings for one request.

    The stop string that is complete first ends the text; of several that end at the same character, the one that begins
    first. The text is cut before it. How tokens are grouped between calls of `take` changes nothing.

    A stream continues a prompt, so it keeps a SentencePiece model's leading space, which `Tokenizer.decode` drops.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        """`min_tokens`: a stop string complete before this many tokens is text. RequestError for an empty one."""
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._node = self._root = _automaton(stop)
        self._num_tokens = 0
        self._held: deque[str] = deque()  # may begin a stop string
        self._num_held = 0  # its characters
        self._safe: list[str] = []
        self._taken: list[str] = []
        self._stopped = False

    @property
    def text(self) -> str:
        """All that `take` and `finish` have returned."""
        return "".join(self._taken)

    def append(self, token_id: int) -> bool:
        """Takes in one token; true once a stop string is complete, after which further tokens are ignored."""
        if not self._stopped:
            self._num_tokens += 1
            self._feed(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return self._stopped

    def take(self) -> str:
        """New text that is safe to show: no part of a character, no possible beginning of a stop string."""
        new = "".join(self._safe)
        self._safe.clear()
        if new:
            self._taken.append(new)
        return new

    def finish(self) -> str:
        """The rest of the text, an unfinished character as U+FFFD; after the last token. Once more, it returns ""."""
        if not self._stopped:
            self._feed(self._decoder.decode(b"", final=True))
        if not self._stopped:
            self._release("", self._num_held)
            self._node = self._root
        return self.take()

    def _feed(self, new: str) -> None:
        node = self._node
        for end, character in enumerate(new, start=1):
            node = node.after(character)
            if node.stop_length and self._num_tokens >= self._min_tokens:
                self._stopped = True
                self._release(new, self._num_held + end - node.stop_length)
                return
        self._node = node
        self._release(new, self._num_held + len(new) - node.pending)

    def _release(self, new: str, count: int) -> None:
        """Holds the new text and lets go of the first `count` characters of all that is held."""
        self._held.append(new)
        self._num_held += len(new) - count
        while count > 0:
            piece = self._held.popleft()
            if len(piece) > count:
                self._held.appendleft(piece[count:])
            self._safe.append(piece[:count])
            count -= len(piece)


@dataclass(eq=False)
class _Node:
    """A beginning of some stop string, the longest that the text so far ends in (Aho and Corasick, 1975)."""

    depth: int = 0
    children: dict[str, "_Node"] = field(default_factory=dict)
    shorter: "_Node | None" = None  # the longest other beginning that this one ends in
    stop_length: int = 0  # of the longest stop string that ends here; 0: none does
    pending: int = 0  # characters at the end of the text that a longer stop string may begin with

    def after(self, character: str) -> "_Node":
        """The node once one more character has come."""
        node = self
        while character not in node.children:
            if node.shorter is None:
                return node
            node = node.shorter
        return node.children[character]


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node()
    for stop in stops:
        if not stop:
            raise RequestError("A stop string is empty and would end every text at once: leave it out.")
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(depth=node.depth + 1))
        node.stop_length = len(stop)
    queue = deque([root])
    while queue:  # breadth first: a node's shorter ones are complete before it
        node = queue.popleft()
        for character, child in node.children.items():
            child.shorter = node.shorter.after(character) if node.shorter is not None else root
            child.stop_length = child.stop_length or child.shorter.stop_length
            child.pending = child.depth if child.children else child.shorter.pending
            queue.append(child)
    return root
