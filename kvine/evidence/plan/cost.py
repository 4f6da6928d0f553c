"""What one request costs: tokens computed, tokens taken from the cache, tokens generated, each at its price."""

from dataclasses import dataclass

from kvine.config import MOST_TOKENS
from kvine.errors import ConfigError
from kvine.evidence.plan.answer import Plan

MOST_PRICE = 1e15  # of a million tokens: with it no sum of a request leaves the range of numbers


@dataclass(frozen=True)
class Prices:
    """Prices of a million tokens, in any currency: of a prompt that is computed or cached, and of output."""

    prefill: float = 0.0
    cached: float = 0.0
    decode: float = 0.0

    def __post_init__(self) -> None:
        for name, price in vars(self).items():
            if not 0 <= price <= MOST_PRICE:
                raise ConfigError(
                    f"The price of {name} tokens is {price!r}: give a number of at least 0 and at most {MOST_PRICE:g}."
                )


@dataclass(frozen=True)
class RequestCost:
    """A request alone on the machine.

    Attributes:
        prefill_tokens, cached_tokens, decode_tokens: of the prompt computed, of the prompt found in the cache, and
            generated.
        prefill_price, cached_price, decode_price: of all of them.
        uncached_price: of the same request if nothing of it were cached.
        attention_pairs: pairs of query and key that the prefill computes in a layer and head, averaged over the layers.
        decode_bytes: read by its decode steps; the first token comes from the prefill, so they are one fewer.
        decode_ms: floor of the time of these steps. None, as decode_bytes is, where the weights are unknown.
    """

    prefill_tokens: int
    cached_tokens: int
    decode_tokens: int
    prefill_price: float
    cached_price: float
    decode_price: float
    uncached_price: float
    attention_pairs: float
    decode_bytes: int | None
    decode_ms: float | None

    @property
    def price(self) -> float:
        """Of the whole request."""
        return self.prefill_price + self.cached_price + self.decode_price


def request_cost(planned: Plan, *, prompt: int, cached: int = 0, output: int = 0, prices: Prices) -> RequestCost:
    """The cost of a request on the planned model.

    Args:
        planned: the plan.
        prompt: its tokens of prompt; `cached` of them are found in the cache, at most all but one.
        cached: see there.
        output: tokens generated.
        prices: of a million tokens.

    Raises:
        ConfigError: for numbers that no request has.
    """
    for name, value, least, most in (
        ("prompt", prompt, 1, MOST_TOKENS),
        ("cached", cached, 0, prompt - 1),
        ("output", output, 0, MOST_TOKENS),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"The request's {name} tokens are {value!r}: give a whole number from {least} to {most}.")
    million = 1e6
    steps = max(0, output - 1)
    layers = sum(spec.num_layers for spec in planned.specs)
    pairs = sum((s.num_visible_pairs(prompt) - s.num_visible_pairs(cached)) * s.num_layers for s in planned.specs)
    decode_bytes = None
    if planned.subject.weights is not None:
        read = [s.num_visible_pairs(prompt + steps) - s.num_visible_pairs(prompt) for s in planned.specs]
        of_kv = sum(number * group.bytes_per_token for number, group in zip(read, planned.groups, strict=True))
        decode_bytes = of_kv + steps * planned.subject.weights.bytes_per_step(1)
    return RequestCost(
        prefill_tokens=prompt - cached,
        cached_tokens=cached,
        decode_tokens=output,
        prefill_price=(prompt - cached) * prices.prefill / million,
        cached_price=cached * prices.cached / million,
        decode_price=output * prices.decode / million,
        uncached_price=(prompt * prices.prefill + output * prices.decode) / million,
        attention_pairs=pairs / layers,
        decode_bytes=decode_bytes,
        decode_ms=None if decode_bytes is None else decode_bytes / planned.walls.bandwidth.value * 1e3,
    )
