"""An explanation as self-contained HTML, for notebooks."""

from kvine.explain import words
from kvine.explain.explanation import NOT_CACHED, DecodeStep, Explanation
from kvine.notebook import Html, bar, page, table

STEP_COLUMNS = ("", *(f"{name}, {side}" for side in ("with the cache", "without") for name in words.STEP_COLUMNS[1:4]))


def as_html(explanation: Explanation) -> str:
    """Tokens with their attention weights, the ranking, the steps: tables with captions and row headers."""
    parts: list[str] = [
        words.summary(explanation),
        table("Groups of layers that cache alike", words.GROUP_COLUMNS, map(words.group_row, explanation.groups)),
        _attention(explanation),
        _candidates(explanation),
        *(part for step in explanation.steps for part in _step(step)),
    ]
    if (ended := words.ending(explanation)) is not None:
        parts.append(ended)
    return page(*parts, f"Queries are not cached. {NOT_CACHED['queries']}")


def _attention(explanation: Explanation) -> Html:
    attention = explanation.attention(explanation.layer, explanation.head)
    largest = max(attention.weights)
    return table(
        f"Attention of position {attention.position}, {words.view_name(attention)}",
        ("position", "id", "token", "weight"),
        [
            (
                f"{token.position}",
                f"{token.token_id}",
                words.piece(token),
                bar(weight / largest, f"{weight:.4f}") if seen else "not seen",
            )
            for token, weight, seen in zip(explanation.tokens, attention.weights, attention.visible, strict=True)
        ],
    )


def _candidates(explanation: Explanation) -> Html:
    most = explanation.candidates[0].probability
    return table(
        "Most likely next",
        ("id", "token", "logit", "probability"),
        [
            (f"{c.token_id}", repr(c.text), c.logit, bar(c.probability / most, f"{c.probability:.4f}"))
            for c in explanation.candidates
        ],
    )


def _step(step: DecodeStep) -> tuple[str, str]:
    return table(words.step_title(step), STEP_COLUMNS, words.step_rows(step)), words.step_lesson(step)
