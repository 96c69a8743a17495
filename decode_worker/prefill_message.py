"""Prefill calls in protobuf, from and to messages of the rank."""

from decode_worker.call import Call
from engine.link.messages import Prefilled, Reserved
from engine.server.wire import target_message, token_of
from proto import generate_pb2


def prefill_request(call: Call, reserved: Reserved, model: str) -> generate_pb2.PrefillRequest:
    """The request that has `reserved` filled."""
    return generate_pb2.PrefillRequest(
        request_id=call.request_id,
        attempt_id=reserved.attempt_id,
        model=model,
        token_ids=call.token_ids,
        num_prompt_tokens=call.num_prompt_tokens,
        sampling=call.request.sampling,
        kv_target=target_message(reserved.target),
        prefill_epoch=call.prefill.epoch,
        priority=call.request.priority,
        prefix_hashes=call.request.prefix_hashes,
    )


def prefilled_of(key: str, attempt_id: str, reply: generate_pb2.PrefillResponse) -> Prefilled:
    """What the rank is told of a prefill that went well; `key` is the request's name there."""
    return Prefilled(
        request_id=key,
        attempt_id=attempt_id,
        token=token_of(reply.first_token) if reply.HasField("first_token") else None,
        num_cached_tokens=reply.num_cached_tokens,
        num_computed_tokens=reply.num_computed_tokens,
        kv_bytes=reply.kv_bytes,
        queue_seconds=reply.queue_seconds,
        compute_seconds=reply.compute_seconds,
        transfer_seconds=reply.transfer_seconds,
    )
