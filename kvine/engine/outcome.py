"""What a sampled token means for its line: may it be drawn, and does it end the text?"""

from collections.abc import Collection

from kvine.engine.request import FinishReason, Line
from kvine.sampling.params import SamplingParams
from kvine.sampling.sampler import SampleRow


def end_ids(params: SamplingParams, eos_ids: Collection[int]) -> set[int]:
    """The tokens that end a text."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}


def sample_row(line: Line, eos_ids: Collection[int], index: int | None = None) -> SampleRow:
    """What the sampler must know of a line; ids that would end it are banned before min_tokens.

    `index` is the sample's number where a line draws for those that are yet to fork from it.
    """
    request = line.owner
    params = request.params
    banned: Collection[int] = ()
    if len(line.output_ids) < params.min_tokens:
        banned = end_ids(params, eos_ids)
    number = line.index if index is None else index
    return SampleRow(params, line.prompt_ids, line.output_ids, request.seed, number, banned)


def finish_reason(line: Line, token: int, eos_ids: Collection[int]) -> FinishReason | None:
    """Why a line ends with `token`, which its output already holds; None if it goes on.

    The ending token itself never reaches the stop checker, so that its text is not part of the answer.
    """
    params = line.owner.params
    if (token in eos_ids and not params.ignore_eos) or token in params.stop_token_ids:
        return "stop"
    if line.stop is not None and line.stop.append(token):
        return "stop"
    if params.max_tokens is not None and len(line.output_ids) >= params.max_tokens:
        return "length"
    return "context" if line.num_tokens >= line.owner.limit else None
