"""The sampling pipeline written a second time, in plain Python and from its documentation, as an oracle."""

import math
from collections.abc import Collection, Sequence

from kvine.sampling.params import SamplingParams

MASK = 2**64 - 1


def philox4x64(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x64-10 after Salmon et al. 2011."""
    c, k = list(counter), list(key)
    for round_number in range(10):
        if round_number:
            k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
        first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(second >> 64) ^ c[1] ^ k[0], second & MASK, (first >> 64) ^ c[3] ^ k[1], first & MASK]
    return c


def expected_uniform(seed: int, sample_index: int, position: int) -> float:
    return (philox4x64([1, position, 0, 0], [seed, sample_index])[0] >> 11) / 2**53


def expected_scores(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: Collection[int] = (),
) -> list[float]:
    """The logits after bias, penalties and bans."""
    n = params.penalty_window
    history = [(i, False) for i in prompt] + [(i, True) for i in output]
    if n is not None:
        history = history[-n:] if n else []
    scores = []
    for token_id, logit in enumerate(logits):
        x = logit + params.logit_bias.get(token_id, 0.0)
        if any(i == token_id for i, _ in history):
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        times = sum(i == token_id and generated for i, generated in history)
        x -= params.frequency_penalty * times + (params.presence_penalty if times else 0.0)
        scores.append(-math.inf if token_id in banned else x)
    return scores


def expected_distribution(scores: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Weights, not yet normalized, of the ids that are left after temperature, top-k, top-p and min-p."""
    highest = max(scores)
    scaled = [(x - highest) / params.temperature for x in scores]
    ranked = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        target = params.top_p * math.fsum(math.exp(scaled[i]) for i in ranked)
        kept, mass = [], 0.0
        for i in ranked:
            kept.append(i)
            mass += math.exp(scaled[i])
            if mass >= target:
                break
        ranked = kept
    if params.min_p > 0:
        ranked = [i for i in ranked if scaled[i] >= math.log(params.min_p)]
    return {i: math.exp(scaled[i]) for i in sorted(ranked)}


def expected_token(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: Collection[int] = (),
    *,
    seed: int,
    sample_index: int = 0,
) -> int:
    scores = expected_scores(logits, params, prompt, output, banned)
    if params.temperature <= 1e-4:
        return scores.index(max(scores))
    weights = expected_distribution(scores, params)
    left = expected_uniform(seed, sample_index, len(output)) * math.fsum(weights.values())
    for token_id, weight in weights.items():
        if left < weight:
            return token_id
        left -= weight
    raise AssertionError("the draw fell past the last token")
