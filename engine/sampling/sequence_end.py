"""When a sequence ends, the same on both workers (prefill samples the first token).

Positions count from the first prompt token: a sequence of n tokens samples its next one at
position n. Output tokens are those after `num_prompt_tokens`, whoever produced them.
"""

from engine.link.messages import Finish
from engine.sampling.sampling_params import Sampling


def finish_after(
    token_id: int,
    *,
    num_tokens: int,
    num_prompt_tokens: int,
    sampling: Sampling,
    eos_token_ids: tuple[int, ...],
    max_model_len: int,
) -> Finish:
    """What `token_id`, just sampled and counted in `num_tokens`, does to the sequence."""
    num_output = num_tokens - num_prompt_tokens
    if num_output >= sampling.min_tokens and _ends(token_id, sampling, eos_token_ids):
        return Finish.STOP
    most = most_tokens(
        num_prompt_tokens=num_prompt_tokens, sampling=sampling, max_model_len=max_model_len
    )
    return Finish.LENGTH if num_tokens >= most else Finish.NONE


def most_tokens(*, num_prompt_tokens: int, sampling: Sampling, max_model_len: int) -> int:
    """Of a sequence, whatever they are."""
    return min(num_prompt_tokens + sampling.max_tokens, max_model_len)


def suppressed_token_ids(
    *,
    num_tokens: int,
    num_prompt_tokens: int,
    sampling: Sampling,
    eos_token_ids: tuple[int, ...],
) -> tuple[int, ...]:
    """Tokens that must not be sampled next: those that would end a sequence of `num_tokens`
    tokens before it has `min_tokens` output tokens."""
    if num_tokens - num_prompt_tokens + 1 >= sampling.min_tokens:
        return ()
    ids = sampling.stop_token_ids
    return ids if sampling.ignore_eos else (*ids, *eos_token_ids)


def _ends(token_id: int, sampling: Sampling, eos_token_ids: tuple[int, ...]) -> bool:
    if token_id in sampling.stop_token_ids:
        return True
    return not sampling.ignore_eos and token_id in eos_token_ids
