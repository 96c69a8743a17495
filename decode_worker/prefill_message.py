"""Prefill calls in protobuf, from and to messages of the rank."""

from decode_worker.call import Call
from engine.messages import Prefilled, Reserved, Sampling, Sink, TokenOut
from proto import generate_pb2


def prefill_request(call: Call, reserved: Reserved, model: str) -> generate_pb2.PrefillRequest:
    """The request that has `reserved` filled."""
    return generate_pb2.PrefillRequest(
        request_id=call.request_id,
        attempt_id=reserved.attempt_id,
        model=model,
        token_ids=reserved.token_ids,
        num_prompt_tokens=call.num_prompt_tokens,
        sampling=_sampling_message(call.sampling),
        sink=_sink_message(reserved.sink),
        prefill_epoch=call.prefill.epoch,
    )


def prefilled_of(key: str, attempt_id: str, reply: generate_pb2.PrefillResponse) -> Prefilled:
    """What the rank is told of a prefill that went well; `key` is the request's name there."""
    token = reply.first_token
    return Prefilled(
        request_id=key,
        attempt_id=attempt_id,
        token=TokenOut(
            token_id=token.token_id,
            logprob=token.logprob,
            top=tuple((top.token_id, top.logprob) for top in token.top_logprobs),
        ),
        num_cached_tokens=reply.num_cached_tokens,
        num_computed_tokens=reply.num_computed_tokens,
        kv_bytes=reply.kv_bytes,
        queue_seconds=reply.queue_seconds,
        compute_seconds=reply.compute_seconds,
        transfer_seconds=reply.transfer_seconds,
    )


def _sampling_message(sampling: Sampling) -> generate_pb2.SamplingParams:
    return generate_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
    )


def _sink_message(sink: Sink) -> generate_pb2.KvSink:
    return generate_pb2.KvSink(
        agent=sink.agent,
        runs=[generate_pb2.PageRun(first=run.first, count=run.count) for run in sink.runs],
        kv_fingerprint=sink.kv_fingerprint,
    )
