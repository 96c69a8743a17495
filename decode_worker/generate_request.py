"""From a GenerateRequest to what the rank is told, or the reason why not."""

from core.errors import ContextLengthExceeded, InvalidRequest
from decode_worker.plan import pages_for
from engine.link.messages import Ready, Sampling, Submit
from engine.server.wire import check_sampled_ids, check_token_ids, sampling_of
from proto import generate_pb2

MAX_STOP_TOKEN_IDS = 256


def submit_of(request: generate_pb2.GenerateRequest, key: str, ready: Ready) -> Submit:
    """`key` names the request on this worker. Raises InvalidRequest naming the field, and
    ContextLengthExceeded for what could never fit into the context or the KV pool."""
    prompt, output = tuple(request.prompt_token_ids), tuple(request.output_token_ids)
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt_token_ids")
    check_token_ids(prompt, ready.vocab_size, "prompt_token_ids")
    check_token_ids(output, ready.vocab_size, "output_token_ids")
    sampling = _sampling(request.sampling, ready)
    if output and len(output) >= sampling.max_tokens:
        raise InvalidRequest(
            f"{len(output)} output tokens leave nothing of max_tokens {sampling.max_tokens}",
            param="output_token_ids",
        )
    _check_room(len(prompt), sampling.max_tokens, ready)
    return Submit(
        request_id=key,
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
        sampling=sampling,
        priority=request.priority,
    )


def _sampling(params: generate_pb2.SamplingParams, ready: Ready) -> Sampling:
    sampling = sampling_of(params)
    check_sampled_ids(sampling, ready.vocab_size)
    # A prompt's own log-probabilities may be all that is wanted.
    _check("max_tokens", sampling.max_tokens >= 1 or sampling.prompt_logprobs)
    _check("min_tokens", sampling.min_tokens <= sampling.max_tokens)
    _check("stop_token_ids", len(sampling.stop_token_ids) <= MAX_STOP_TOKEN_IDS)
    _check("top_logprobs", sampling.top_logprobs <= ready.vocab_size)
    _check("top_prompt_logprobs", sampling.top_prompt_logprobs <= ready.vocab_size)
    return sampling


def _check_room(num_prompt_tokens: int, max_tokens: int, ready: Ready) -> None:
    total = num_prompt_tokens + max_tokens
    wanted = f"prompt of {num_prompt_tokens} tokens and max_tokens {max_tokens}"
    if total > ready.max_model_len:
        raise ContextLengthExceeded(
            f"{wanted} exceed the context of {ready.max_model_len} tokens", param="max_tokens"
        )
    # The last output token is never fed back: it needs no KV.
    if pages_for(max(total - 1, num_prompt_tokens), ready.page_tokens) > ready.pages_total:
        most = ready.pages_total * ready.page_tokens
        raise ContextLengthExceeded(
            f"{wanted} exceed the {most} tokens of KV that a rank holds", param="max_tokens"
        )


def _check(name: str, valid: bool) -> None:
    if not valid:
        raise InvalidRequest(f"{name} is out of range", param=name)
