"""From a GenerateRequest to what the rank is told, or the reason why not."""

from core.errors import ContextLengthExceeded, InvalidRequest
from core.token_ids import num_ids, unpack_ids
from decode_worker.plan import pages_for
from engine.link.messages import Ready, Submit
from engine.server.sampling_check import check_sampling, check_token_ids
from proto import generate_pb2

MAX_STOP_TOKEN_IDS = 256


def submit_of(
    request: generate_pb2.GenerateRequest, key: str, ready: Ready, *, sees_prompt: bool = False
) -> Submit:
    """`key` names the request on this worker, whose rank `sees_prompt` in any case. Raises
    InvalidRequest naming the field, and ContextLengthExceeded for what could never fit into the
    context or the KV pool."""
    prompt, output = request.prompt_token_ids, request.output_token_ids
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt_token_ids")
    check_token_ids(prompt, ready.vocab_size, "prompt_token_ids")
    check_token_ids(output, ready.vocab_size, "output_token_ids")
    sampling = request.sampling
    _check_sampling(sampling, ready)
    if output and num_ids(output) >= sampling.max_tokens:
        raise InvalidRequest(
            f"{num_ids(output)} output tokens leave nothing of max_tokens {sampling.max_tokens}",
            param="output_token_ids",
        )
    _check_room(num_ids(prompt), sampling.max_tokens, ready)
    sees_prompt |= sampling.repetition_penalty not in (0, 1)
    return Submit(
        request_id=key,
        num_prompt_tokens=num_ids(prompt),
        prompt_token_ids=prompt if sees_prompt else b"",
        output_token_ids=output,
        last_token_id=unpack_ids(output or prompt)[-1],
        sampling=sampling.SerializeToString(),
        priority=request.priority,
    )


def _check_sampling(sampling: generate_pb2.SamplingParams, ready: Ready) -> None:
    check_sampling(sampling, ready.vocab_size)
    # A prompt's own log-probabilities may be all that is wanted.
    _check("max_tokens", sampling.max_tokens >= 1 or sampling.prompt_logprobs)
    _check("min_tokens", sampling.min_tokens <= sampling.max_tokens)
    _check("stop_token_ids", len(sampling.stop_token_ids) <= MAX_STOP_TOKEN_IDS)
    _check("top_logprobs", sampling.top_logprobs <= ready.vocab_size)
    _check("top_prompt_logprobs", sampling.top_prompt_logprobs <= ready.vocab_size)


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
