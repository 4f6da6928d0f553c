"""What restoring and recomputing a block cost here, as measured: a block is only restored where that is faster."""

import json
from dataclasses import asdict, dataclass

_WEIGHT = 0.3  # of a new measurement beside those before
_LEAST_TOKENS = 64  # a smaller step's time is mostly that of reading weights, which a restored prompt needs too
_TRY_AGAIN = 16  # every so many refusals restore all the same: a bad measurement must not be the last


@dataclass
class Costs:
    """Running estimates.

    Attributes:
        compute_s_per_token: seconds that a step takes for each token of a prompt; None before the first measurement.
        restore_s_per_byte: seconds from the store into the cache's memory for each byte; likewise.
    """

    compute_s_per_token: float | None = None
    restore_s_per_byte: float | None = None
    _refusals: int = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens."""
        if num_tokens >= _LEAST_TOKENS:
            self.compute_s_per_token = _mixed(self.compute_s_per_token, seconds / num_tokens)

    def restored(self, num_bytes: int, seconds: float) -> None:
        """So many bytes have been restored."""
        if num_bytes:
            self.restore_s_per_byte = _mixed(self.restore_s_per_byte, seconds / num_bytes)

    def worth_restoring(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether num_bytes come back sooner than num_tokens are computed; true as long as one is not measured."""
        if self.compute_s_per_token is None or self.restore_s_per_byte is None:
            return True
        if num_bytes * self.restore_s_per_byte < num_tokens * self.compute_s_per_token:
            return True
        self._refusals += 1
        return self._refusals % _TRY_AGAIN == 0

    def to_json(self, label: str) -> bytes:
        """The estimates as a store's remark; `label` says whose they are."""
        return json.dumps({"label": label} | {k: v for k, v in asdict(self).items() if k[0] != "_"}).encode()

    def take_over(self, remark: bytes) -> None:
        """Begins with what an earlier process has measured; what cannot be read is left alone."""
        try:
            earlier = json.loads(remark)
            values = [earlier[key] for key in ("compute_s_per_token", "restore_s_per_byte")]
        except (ValueError, KeyError, TypeError):
            return
        compute, restore = (v if isinstance(v, float) and v > 0 else None for v in values)
        self.compute_s_per_token = self.compute_s_per_token or compute
        self.restore_s_per_byte = self.restore_s_per_byte or restore


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else (1 - _WEIGHT) * before + _WEIGHT * now
