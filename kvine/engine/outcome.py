"""What a sampled token means for its request: may it be drawn, and does it end the text?"""

from collections.abc import Collection

from kvine.engine.request import FinishReason, Request
from kvine.sampling.sampler import SampleRow


def sample_row(request: Request, eos_ids: Collection[int]) -> SampleRow:
    """What the sampler must know of a request; ids that would end it are banned before min_tokens."""
    params = request.params
    banned: Collection[int] = ()
    if len(request.output_ids) < params.min_tokens:
        banned = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    return SampleRow(params, request.prompt_ids, request.output_ids, request.seed, 0, banned)


def finish_reason(request: Request, token: int, eos_ids: Collection[int]) -> FinishReason | None:
    """Why a request ends with `token`, which its output already holds; None if it goes on.

    The ending token itself never reaches the stop checker, so that its text is not part of the answer.
    """
    params = request.params
    if (token in eos_ids and not params.ignore_eos) or token in params.stop_token_ids:
        return "stop"
    if request.stop is not None and request.stop.append(token):
        return "stop"
    if params.max_tokens is not None and len(request.output_ids) >= params.max_tokens:
        return "length"
    return "context" if request.num_tokens >= request.limit else None
