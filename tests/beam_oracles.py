"""What a beam search must find: by definition, over a model's function of whole texts; and as transformers finds it."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from kvine.engine.engine import Engine
from kvine.sampling.beam_search import Hypothesis
from kvine.sampling.params import SamplingParams

PAD = 1


def brute_force(
    logits_of: Callable[[list[int]], Sequence[float]],
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    ends: Collection[int],
    limit: int | None = None,
) -> list[tuple[list[int], float]]:
    """The texts and scores of a beam search, best first: each text is a list of tokens, computed whole at each step.

    Args:
        logits_of: of the token after a text.
        prompt: before all texts.
        params: with num_beams, length_penalty, early_stopping, max_tokens, min_tokens.
        ends: tokens that end a text.
        limit: most tokens, if there is no max_tokens.
    """
    width, power, most = params.num_beams, params.length_penalty, params.max_tokens or limit
    assert most is not None
    alive: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        grown = []
        for total, text in alive:
            row = [float(x) for x in logits_of([*prompt, *text])]
            top = max(row)
            norm = top + math.log(math.fsum(math.exp(x - top) for x in row))
            for token, logit in enumerate(row):
                if not (token in ends and length <= params.min_tokens):
                    grown.append((total + logit - norm, [*text, token]))
        grown.sort(key=lambda pair: -pair[0])
        ended = [(total / length**power, text) for total, text in grown[:width] if text[-1] in ends or length == most]
        done = sorted(done + ended, key=lambda pair: -pair[0])[:width]
        alive = [pair for pair in grown if pair[1][-1] not in ends][:width]
        if len(done) == width and params.early_stopping is True:
            break
        reach = most if params.early_stopping == "never" and power > 0 else length
        if len(done) == width and alive[0][0] / reach**power <= done[-1][0]:
            break
    return [(text, score) for score, text in done]


def transformers_beams(
    model: Any, prompts: Sequence[Sequence[int]], params: SamplingParams, ends: Sequence[int]
) -> list[list[tuple[list[int], float]]]:
    """What `model.generate` finds for prompts side by side, padded on the left: for each its texts, best first."""
    from transformers import GenerationConfig

    assert PAD not in ends
    width, count = max(map(len, prompts)), params.num_beams
    ids = torch.tensor([[PAD] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config = GenerationConfig(
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens,
        num_beams=count,
        num_return_sequences=count,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        eos_token_id=list(ends),
        pad_token_id=PAD,
        output_scores=True,
        return_dict_in_generate=True,
    )
    out = model.generate(ids, attention_mask=mask, generation_config=config)
    texts = [_to_its_end(sequence[width:].tolist(), ends) for sequence in out.sequences]
    scores = out.sequences_scores.tolist()
    both = list(zip(texts, scores, strict=True))
    return [both[i : i + count] for i in range(0, len(both), count)]


def beams_of(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[list[tuple[list[int], float]]]:
    """What the engine finds for prompts side by side; its cache is checked after each step."""
    ids = [engine.add(prompt, params) for prompt in prompts]
    found: dict[int, list[Hypothesis]] = {i: [] for i in ids}
    while engine.busy:
        for event in engine.step():
            assert event.error is None, event.error
            if event.hypothesis is not None:
                assert event.index == len(found[event.request_id])
                found[event.request_id].append(event.hypothesis)
        engine.manager.check()
    assert engine.manager.bytes_referenced == 0
    return [[(list(h.token_ids), h.score) for h in found[i]] for i in ids]


def same_beams(
    got: Sequence[list[tuple[list[int], float]]], expected: Sequence[list[tuple[list[int], float]]], rel: float = 1e-4
) -> None:
    """The same texts, token for token, in the same order, with scores that agree within rounding."""
    assert [[text for text, _ in beams] for beams in got] == [[text for text, _ in beams] for beams in expected]
    for ours, theirs in zip(got, expected, strict=True):
        for (_, score), (_, other) in zip(ours, theirs, strict=True):
            assert math.isclose(score, other, rel_tol=rel, abs_tol=rel), (score, other)


def _to_its_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """A text without its padding."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    while tokens and tokens[-1] == PAD:
        tokens.pop()
    return tokens
