"""An explanation's numbers in words and rows: what the terminal, notebooks and plain text have in common."""

from collections.abc import Sequence

from kvine.config import human_bytes
from kvine.explain.explanation import Amount, Attention, DecodeStep, Explanation, LayerGroup, Token, Work
from kvine.models.packing import computes_in

STEP_COLUMNS = ("", "numbers", "bytes", "FLOPs", "numbers", "bytes", "FLOPs")  # with the cache, then without
GROUP_COLUMNS = ("layers", "query heads", "K/V heads", "sees", "K, V of a layer", "stored as", "K and V")


def piece(token: Token) -> str:
    """A token's text in quotes, so that its spaces and line breaks show; special tokens stand without."""
    if not token.special:
        return repr(token.text)
    return repr(token.text)[1:-1] or "(no text)"


def count(number: int) -> str:
    """A count in at most seven characters: `12,345`, `1.23 M`."""
    if number < 100_000:
        return f"{number:,}"
    size = number / 1000
    for unit in "kMGT":
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} P"


def layer_list(layers: Sequence[int]) -> str:
    """Numbers in ascending order, runs joined: `0–4, 6–10`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in runs)


def view_name(attention: Attention) -> str:
    """Which layer and head, in words."""
    layer = "all layers" if attention.layer is None else f"layer {attention.layer}"
    if attention.head is None:
        return f"mean over all heads of {layer}"
    head = f"head {attention.head} (K/V head {attention.kv_head})"
    return f"{'mean over all layers' if attention.layer is None else layer}, {head}"


def group_row(group: LayerGroup) -> tuple[str, ...]:
    """The cells of `GROUP_COLUMNS`."""
    sees = "all before it" if group.window is None else f"the last {group.window:,}"
    if group.sink_tokens:
        sees += f", the first {group.sink_tokens:,}"
    sees += "".join(f", {first:,}:{end:,}" for first, end in group.kept)
    return (
        layer_list(group.layers),
        f"{group.query_heads}",
        f"{group.kv_heads}",
        sees,
        str(list(group.k_shape)),
        group.stored_as,
        human_bytes(group.num_bytes),
    )


def step_title(step: DecodeStep) -> str:
    """What a step fed and what it led to."""
    token = step.token
    return (
        f"Position {token.position}: {piece(token)} ({token.token_id}) goes in, "
        f"{step.next.text!r} ({step.next.token_id}) is most likely next"
    )


def step_rows(step: DecodeStep) -> list[tuple[str, ...]]:
    """The cells of `STEP_COLUMNS`: what is computed, then what is read from the cache."""
    ours, theirs = step.computed, step.cache_free
    numbers = count(step.read.numbers)
    return [
        ("tokens", count(ours.tokens), "", "", count(theirs.tokens), "", ""),
        ("compute Q", *_amount(ours.q), *_amount(theirs.q)),
        ("compute K", *_amount(ours.k), *_amount(theirs.k)),
        ("compute V", *_amount(ours.v), *_amount(theirs.v)),
        ("attention", *_scores(ours), *_scores(theirs)),
        ("o_proj, MLP", "", "", count(ours.other_flops), "", "", count(theirs.other_flops)),
        ("in all", "", "", count(ours.flops), "", "", count(theirs.flops)),
        ("read K", numbers, human_bytes(step.read.k_bytes), "", "–", "–", ""),
        ("read V", numbers, human_bytes(step.read.v_bytes), "", "–", "–", ""),
    ]


def step_lesson(step: DecodeStep) -> str:
    """What a step shows, in a sentence."""
    saved = 1 - step.computed.flops / step.cache_free.flops
    read = human_bytes(step.read.k_bytes + step.read.v_bytes)
    return f"The cache saves {saved:.1%} of the arithmetic; its {read} of K and V are read all the same."


def summary(explanation: Explanation) -> str:
    """What ran, and what the cache holds, in a sentence."""
    held = human_bytes(sum(group.num_bytes for group in explanation.groups))
    blocks = human_bytes(explanation.block_bytes)
    dtype = computes_in(explanation.dtype, explanation.packings)
    return (
        f"{explanation.model}, {dtype} on {explanation.device}: {len(explanation.tokens):,} tokens of "
        f"prompt, whose K and V take {held} ({blocks} in whole blocks)."
    )


def ending(explanation: Explanation) -> str | None:
    """Says that the model ended the text before all steps were taken, where it did."""
    if not explanation.ended:
        return None
    return f"The model ends the text after {len(explanation.steps)} steps."


def _amount(amount: Amount) -> tuple[str, str, str]:
    return count(amount.numbers), human_bytes(amount.num_bytes), count(amount.flops)


def _scores(work: Work) -> tuple[str, str, str]:
    return count(work.scores), "", count(work.attention_flops)
