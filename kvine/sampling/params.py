"""What a request asks of the sampler, checked where it is said.

A bad value is refused here, before it reaches a batch that it shares with others. No torch: `kvine --help` loads this.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvine.errors import RequestError

GREEDY_TEMPERATURE = 1e-4
"""At and below this, sampling is arg-max: dividing by less only blows up the rounding of the logits themselves."""


@dataclass(frozen=True)
class SamplingParams:
    """How many tokens to generate and how to choose each. A `RequestError` says what is allowed where a value is not.

    The order in which the options apply is documented at `kvine.sampling.sampler.Sampler`.

    Attributes:
        max_tokens: Most tokens to generate. 0 generates none; None goes on to the end of the model's context.
        min_tokens: EOS and stop ids cannot be drawn before this many tokens, at most `max_tokens`.
        temperature: Divides the logits. Up to 1e-4 it is greedy: the arg-max, the lowest id among equals.
        top_k: Keep the k most likely tokens. 0, -1 and anything from the vocabulary's size on: off.
        top_p: Keep the most likely tokens until their probability reaches this (nucleus sampling, arXiv:1904.09751).
            0 keeps the most likely one only, 1 is off.
        min_p: Keep tokens at least this times as likely as the most likely one (arXiv:2407.01082).
            1 keeps those tied for the first place, 0 is off.
        repetition_penalty: Over prompt and output; positive logits are divided by it, others multiplied
            (CTRL, arXiv:1909.05858). Above 0, 1 is off.
        presence_penalty: Subtracted once from each token of the output; -2 to 2, as OpenAI defines it.
        frequency_penalty: Subtracted for each time a token occurs in the output; -2 to 2, as OpenAI defines it.
        penalty_window: The three penalties look at the last n tokens of prompt and output together. None: at all.
        logit_bias: Added to the logits of these ids; `-inf` bans one. Ids may be strings of digits, as JSON has them;
            ids that the vocabulary lacks change nothing.
        seed: 0 to 2**64 - 1: the request draws the same tokens in any company. None: a fresh seed for each request.
        logprobs: How many of the most likely tokens to report beside the chosen one; None reports nothing.
        stop: Strings that end the text; one string is accepted as one stop. Kept as a tuple.
        stop_token_ids: Ids that end the text beside the model's own EOS. Kept as a tuple.
        ignore_eos: Go on past the model's EOS; `stop` and `stop_token_ids` still end the text.
        n: Texts drawn from the one prompt, which is computed and kept once. Sample i of a seed is the same for every n;
            from the second on, texts differ only where there is noise, so n above 1 needs a temperature.
        num_beams: Above 1, beam search: the num_beams most likely texts so far go on side by side, and as many finished
            ones are returned, the best first. Nothing is drawn, so it takes none of the options that choose or change
            logits, and no stop strings; `stop_token_ids` and `min_tokens` it does take.
        length_penalty: Beam search divides a text's sum of log-probabilities by its length to this power, -10 to 10.
            The sums are negative: above 0 favours long texts, below 0 short ones, 0 takes the sum itself.
        early_stopping: When beam search ends, once there are num_beams texts. True: at once. False: when the best
            unfinished one, scored at its present length, cannot beat the worst of them. `"never"`: when it could not
            at any length up to the limit. As in transformers.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    logprobs: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, lowest, or_none in _INTEGERS:
            value = getattr(self, name)
            if not (or_none and value is None):
                self._set(name, _integer(name, value, lowest, or_none=or_none))
        for name, low, high, rule in _NUMBERS:
            self._set(name, _number(name, getattr(self, name), low, high, rule))
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty must be a finite number above 0 (1 turns it off), not 0.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}.")
        if self.seed is not None and self.seed >= 2**64:
            raise RequestError(f"seed must be an integer from 0 to 2**64 - 1, or None, not {self.seed}.")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, not {self.ignore_eos!r}.")
        self._set("logit_bias", _logit_bias(self.logit_bias))
        self._set("stop", _stop_strings(self.stop))
        ids = _items("stop_token_ids", self.stop_token_ids, "a list of token ids")
        self._set("stop_token_ids", tuple(_integer("each of stop_token_ids", i, 0) for i in ids))
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise RequestError(f'early_stopping must be true, false or "never", not {self.early_stopping!r}.')
        self._check_lines()

    def _check_lines(self) -> None:
        """Refuses what several texts of one prompt do not go with."""
        if self.num_beams > 1:
            _refuse_with_beams(self)
        elif self.length_penalty != 1.0 or self.early_stopping is not False:
            raise RequestError("length_penalty and early_stopping belong to beam search: give num_beams above 1 too.")
        elif self.n > 1 and self.greedy:
            raise RequestError(
                f"n={self.n} greedy samples would all be the same: give a temperature above {GREEDY_TEMPERATURE}, or "
                "num_beams for several likely texts."
            )

    @property
    def num_lines(self) -> int:
        """Texts that go on side by side: samples or beams."""
        return max(self.n, self.num_beams)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, so that no noise is drawn."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def edits_logits(self) -> bool:
        """Whether a bias or a penalty changes the logits before a token is chosen."""
        penalties = (self.repetition_penalty - 1.0, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or any(penalties)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


_INTEGERS = (  # name, lowest allowed, whether None is
    ("max_tokens", 0, True),
    ("min_tokens", 0, False),
    ("top_k", -1, False),
    ("penalty_window", 0, True),
    ("seed", 0, True),
    ("logprobs", 0, True),
    ("n", 1, False),
    ("num_beams", 1, False),
)

_NUMBERS = (  # name, lowest, highest, the rule in words
    ("temperature", 0.0, math.inf, "a finite number of at least 0 (0 is greedy)"),
    ("top_p", 0.0, 1.0, "a number from 0 to 1 (1 turns it off)"),
    ("min_p", 0.0, 1.0, "a number from 0 to 1 (0 turns it off)"),
    ("repetition_penalty", 0.0, math.inf, "a finite number above 0 (1 turns it off)"),
    ("presence_penalty", -2.0, 2.0, "a number from -2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "a number from -2 to 2"),
    ("length_penalty", -10.0, 10.0, "a number from -10 to 10"),
)

NOT_WITH_BEAMS: tuple[tuple[str, Any, str], ...] = (  # name, the value that is none, why
    ("n", 1, "beam search draws no samples, and returns num_beams texts as it is"),
    ("temperature", None, "beam search draws nothing: it takes the most likely texts"),
    ("top_k", None, "beam search draws nothing: it ranks all tokens"),
    ("top_p", 1.0, "beam search draws nothing: it ranks all tokens"),
    ("min_p", 0.0, "beam search draws nothing: it ranks all tokens"),
    ("repetition_penalty", 1.0, "beams are ranked by the model's own log-probabilities"),
    ("presence_penalty", 0.0, "beams are ranked by the model's own log-probabilities"),
    ("frequency_penalty", 0.0, "beams are ranked by the model's own log-probabilities"),
    ("logit_bias", {}, "beams are ranked by the model's own log-probabilities"),
    ("logprobs", None, "each beam reports its score instead"),
    ("stop", (), "a text is ranked before it is decoded: give stop_token_ids instead"),
)
"""What beam search refuses, and why. `None` where no one value says that an option is off."""


def _refuse_with_beams(params: "SamplingParams") -> None:
    off = {"temperature": params.greedy, "top_k": params.top_k <= 0, "logprobs": params.logprobs is None}
    for name, none, why in NOT_WITH_BEAMS:
        if not off.get(name, getattr(params, name) == none):
            raise RequestError(f"num_beams={params.num_beams} does not go with {name}: {why}.")


def _integer(name: str, value: Any, lowest: int, *, or_none: bool = False) -> int:
    rule = f"{name} must be an integer of at least {lowest}{', or None' if or_none else ''}, not {value!r}."
    if isinstance(value, bool):  # Python's bool is an int; a request that says `true` means something else
        raise RequestError(rule)
    try:
        number = operator.index(value)  # also takes numpy's integers
    except TypeError:
        raise RequestError(rule) from None
    if number < lowest:
        raise RequestError(rule)
    return number


def _float(value: Any) -> float:
    """The value as a float; NaN for what is not a number."""
    if isinstance(value, (bool, str, bytes)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return math.nan


def _number(name: str, value: Any, low: float, high: float, rule: str) -> float:
    number = _float(value)
    if not (low <= number <= high and math.isfinite(number)):
        raise RequestError(f"{name} must be {rule}, not {value!r}.")
    return number


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, not be {bias!r}.")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        digits = isinstance(key, str) and key.isascii() and key.isdecimal()
        token_id = _integer("each token id in logit_bias", int(key) if digits else key, 0)
        amount = _float(value)
        if math.isnan(amount) or amount == math.inf:
            raise RequestError(
                f"logit_bias must give token {token_id} a finite number, or -inf to ban it, not {value!r}."
            )
        if token_id in checked:
            raise RequestError(f"logit_bias must name each token id once; {token_id} is there twice.")
        checked[token_id] = amount
    return checked


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _items("stop", stop, "a string or a list of strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(f"stop must hold strings that are not empty, not {string!r}.")
    return strings


def _items(name: str, value: Any, rule: str) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be {rule}, not {value!r}.")
    return tuple(value)
