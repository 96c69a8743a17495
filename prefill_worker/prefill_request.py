"""From a PrefillRequest to what the rank is told, or the reason why not."""

from core.errors import ContextLengthExceeded, InvalidRequest
from core.token_ids import num_ids
from engine.link.messages import Ready, SubmitPrefill
from engine.server.sampling_check import check_sampling, check_token_ids
from engine.server.wire import target_of
from proto import generate_pb2


def submit_of(request: generate_pb2.PrefillRequest, ready: Ready) -> SubmitPrefill:
    """Checked as far as the front can. Raises InvalidRequest naming the field, and
    ContextLengthExceeded."""
    for param in ("request_id", "attempt_id"):
        if not getattr(request, param):
            raise InvalidRequest(f"{param} is empty", param=param)
    token_ids = request.token_ids
    num_tokens = num_ids(token_ids)
    if not 0 < request.num_prompt_tokens <= num_tokens:
        raise InvalidRequest(
            f"num_prompt_tokens is {request.num_prompt_tokens} of {num_tokens} tokens",
            param="num_prompt_tokens",
        )
    if num_tokens > ready.max_model_len:
        raise ContextLengthExceeded(
            f"{num_tokens} tokens exceed the context of {ready.max_model_len}", param="token_ids"
        )
    check_token_ids(token_ids, ready.vocab_size, "token_ids")
    check_sampling(request.sampling, ready.vocab_size)
    return SubmitPrefill(
        request_id=request.request_id,
        attempt_id=request.attempt_id,
        token_ids=token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling.SerializeToString(),
        target=target_of(request.kv_target),
        priority=request.priority,
    )
