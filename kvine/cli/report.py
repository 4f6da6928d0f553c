"""What a run has come to: as one JSON object for programs, as a few lines for people."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvine.cli.terminal import human_bytes, note, show, write

if TYPE_CHECKING:
    from kvine.engine.engine import ModelCall
    from kvine.generation import Choice, Generation
    from kvine.llm import LLM
    from kvine.sampling.sampler import Sample
    from kvine.text.tokenizer import Tokenizer


def model_json(llm: "LLM") -> dict[str, Any]:
    """Which model has run, and how its weights are kept: `packings` counts packed ones by type."""
    from kvine.models.packing import count_packings

    return {
        "model": llm.source.name,
        "dtype": dtype_name(llm),
        "dtype_reason": llm.model.dtype_reason,
        "packings": count_packings(llm.model.packings),
        "weight_bytes": llm.model.weight_bytes,
    }


def generation_json(llm: "LLM", result: "Generation", ready_s: float) -> dict[str, Any]:
    """The outcome of one request, without the model's part; `ready_s` is in seconds since the process started."""
    return {
        "text": result.text,
        "prompt_ids": result.prompt_ids,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "detail": result.detail,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "cached_tokens": result.usage.cached_tokens,
            "completion_tokens": result.usage.completion_tokens,
        },
        "timings": {
            "ready_s": round(ready_s, 4),
            "prefill_s": round(result.timings.prefill_s, 6),
            "decode_ms": round(result.timings.decode_ms, 4),
        },
        "choices": [choice_json(llm.tokenizer, choice) for choice in result.choices],
    } | ({} if result.logprobs is None else {"logprobs": logprobs_json(llm.tokenizer, result.logprobs)})


def choice_json(tokenizer: "Tokenizer", choice: "Choice") -> dict[str, Any]:
    """One of the texts that a request has come to; `score` of a beam, null of a sample."""
    return {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "detail": choice.detail,
        "score": choice.score,
    } | ({} if choice.logprobs is None else {"logprobs": logprobs_json(tokenizer, choice.logprobs)})


def write_choices(result: "Generation") -> None:
    """All texts of a request to stdout, each under its number and a beam's score."""
    for number, choice in enumerate(result.choices, start=1):
        score = "" if choice.score is None else f" score {choice.score:.4f}"
        write(f"[{number}]{score}\n{choice.text}\n")


def trace_json(calls: Sequence["ModelCall"]) -> list[dict[str, Any]]:
    """A row for each model call of a single request: positions fed are first … last, those of its first text."""
    return [
        {
            "step": call.step,
            "input_shape": list(call.input_shape),
            "positions": [call.positions[0][0], call.positions[0][1] - 1],
            "cache_length": call.cache_length[0],
            "kv_bytes": call.kv_bytes,
            "ms": round(call.ms, 4),
        }
        for call in calls
    ]


def logprobs_json(tokenizer: "Tokenizer", samples: Sequence["Sample"]) -> list[dict[str, Any]]:
    """Natural log-probabilities, the chosen token's and the most likely ones'; null where they are not finite."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        finite = logprob is not None and math.isfinite(logprob)
        return {
            "token_id": token_id,
            "token": tokenizer.pieces([token_id])[0],
            "logprob": logprob if finite else None,
        }

    return [
        entry(sample.token_id, sample.logprob) | {"top": [entry(*pair) for pair in sample.top_logprobs]}
        for sample in samples
    ]


def dtype_name(llm: "LLM") -> str:
    """What the model computes in: `fp32`, `bf16` or `fp16`."""
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[str(llm.model.dtype).removeprefix("torch.")]


def show_summary(llm: "LLM", result: "Generation", ready_s: float) -> None:
    """Two dim lines: what ran, and what it took. A full context is explained."""
    show_ready(llm, ready_s)
    note(outcome_line(result))
    show_full_context(result)


def show_ready(llm: "LLM", ready_s: float) -> None:
    """A dim line: which model runs, in what, and how long it took until it could."""
    note(f"{llm.source.name}: {llm.model.dtype_reason} · ready in {ready_s:.2f} s")


def outcome_line(result: "Generation") -> str:
    """Tokens, times and why the text ended. The time of a token is that of those after the first, where there are."""
    usage, timings = result.usage, result.timings
    computed = usage.prompt_tokens - usage.cached_tokens
    several = len(result.choices) > 1
    answer = f"{len(result.choices)} answers" if several else "answer"
    per_token = f", {timings.decode_ms:.1f} ms/{'step' if several else 'token'}" if usage.completion_tokens > 1 else ""
    ends = " ".join(dict.fromkeys(choice.finish_reason for choice in result.choices))
    return (
        f"prompt: {_tokens(usage.prompt_tokens)}, {usage.cached_tokens} reused, {computed} computed in "
        f"{timings.prefill_s:.2f} s · {answer}: {_tokens(usage.completion_tokens)}{per_token} · {ends}"
    )


def show_full_context(result: "Generation") -> None:
    """Says what was full and what to do, where that has cut the answer short."""
    if result.detail is not None:
        note(result.detail, style="yellow")


def show_trace(calls: Sequence["ModelCall"]) -> None:
    """A row for each model call: what was fed, what the cache holds after it, and what that costs."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("step", "input → cached", "positions", "K/V bytes", "held", "ms"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in trace_json(calls):
        first, last = row["positions"]
        cells = (
            str(row["step"]),
            f"{row['input_shape']} → {row['cache_length']}",
            f"{first}" if first == last else f"{first}–{last}",
            f"{row['kv_bytes']:,}",
            human_bytes(row["kv_bytes"]),
            f"{row['ms']:.1f}",
        )
        table.add_row(*map(Text, cells))  # Text: brackets are no markup here
    show(table)


def show_logprobs(tokenizer: "Tokenizer", samples: Sequence["Sample"]) -> None:
    """A row for each token: its log-probability, and the most likely tokens with theirs."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("id", "token", "logprob", "most likely"):
        table.add_column(title, justify="left" if title == "most likely" else "right")
    for row in logprobs_json(tokenizer, samples):
        likely = ", ".join(f"{top['token']!r} {_decimal(top['logprob'])}" for top in row["top"])
        table.add_row(*map(Text, (str(row["token_id"]), repr(row["token"]), _decimal(row["logprob"]), likely)))
    show(table)


def _decimal(logprob: float | None) -> str:
    return "-inf" if logprob is None else f"{logprob:.4f}"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
