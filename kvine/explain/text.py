"""An explanation as plain text, for `print`."""

from collections.abc import Iterator, Sequence

from kvine.explain import words
from kvine.explain.explanation import NOT_CACHED, Explanation

BAR_WIDTH = 24
STEP_HEADING = ("", "with cache", "", "", "without", "", "")


def as_text(explanation: Explanation) -> str:
    """Tokens with their attention weights, the ranking, the steps."""
    return "\n".join(_lines(explanation))


def _lines(explanation: Explanation) -> Iterator[str]:
    yield words.summary(explanation)
    yield from _columns([words.GROUP_COLUMNS, *map(words.group_row, explanation.groups)])
    attention = explanation.attention(explanation.layer, explanation.head)
    yield ""
    yield f"Attention of position {attention.position}, {words.view_name(attention)}:"
    largest = max(attention.weights)
    for token, weight in zip(explanation.tokens, attention.weights, strict=True):
        bar = "█" * round(BAR_WIDTH * weight / largest)
        yield f"{token.position:5} {token.token_id:7} {weight:.4f} {bar:{BAR_WIDTH}} {words.piece(token)}"
    yield ""
    yield "Most likely next:"
    for candidate in explanation.candidates:
        yield f"{candidate.token_id:13} {candidate.probability:.4f} {candidate.logit:9.3f}  {candidate.text!r}"
    for step in explanation.steps:
        yield ""
        yield words.step_title(step)
        yield from _columns([STEP_HEADING, words.STEP_COLUMNS, *words.step_rows(step)])
        yield words.step_lesson(step)
    if (ended := words.ending(explanation)) is not None:
        yield ended
    yield ""
    yield f"Queries are not cached. {NOT_CACHED['queries']}"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(widths[0]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        yield "  ".join(cells).rstrip()
