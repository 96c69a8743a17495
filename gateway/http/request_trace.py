"""The span of one HTTP request: begun with it, named and described by what it turns out to be.

Names and attributes are those of OpenTelemetry's conventions for HTTP and for generative AI, our
own begin with `epserve.`. None of them holds text of a prompt, a reply or a stop string.
"""

from starlette.types import Scope

from core import tracing
from core.trace_context import TraceContext, parse_trace
from gateway.cluster.job import Job
from gateway.cluster.run import RequestRun

# The span in the request's scope, where there is one.
SPAN = "epserve.span"
OPERATIONS = {
    "chat": "chat",
    "completions": "text_completion",
    "messages": "chat",
    "responses": "chat",
}


def trace_of(scope: Scope) -> TraceContext | None:
    """What the client's headers say."""
    traceparent, tracestate = "", []
    for name, value in scope["headers"]:
        if name == b"traceparent":
            traceparent = value.decode("latin-1")
        elif name == b"tracestate":  # may come in parts
            tracestate.append(value.decode("latin-1"))
    return parse_trace(traceparent, ",".join(tracestate)) if traceparent else None


def begin_request(
    scope: Scope, route: str, request_id: str, trace: TraceContext | None
) -> tracing.Span:
    """`route` is the path, or what stands for those that may not be named."""
    method: str = scope["method"]
    attributes: dict[str, str | bool | int | float | list[str]] = {
        "http.request.method": method,
        "http.route": route,
        "epserve.request_id": request_id,
    }
    if scope.get("server"):
        attributes["server.address"], attributes["server.port"] = scope["server"]
    span = tracing.begin(f"{method} {route}", tracing.Kind.SERVER, attributes, parent=trace)
    scope[SPAN] = span
    return span


def end_request(span: tracing.Span, status: int) -> None:
    """`status` as in HTTP; 499 when the client left before there was any."""
    if span.is_recording:
        span.note({"http.response.status_code": status})
    span.end(str(status) if status >= 500 else "")


def describe_job(scope: Scope, job: Job, model: str) -> None:
    """What is asked for."""
    span: tracing.Span = scope.get(SPAN, tracing.NOTHING)
    if not span.is_recording:
        return
    operation = OPERATIONS[job.endpoint]
    sampling = job.sampling
    span.rename(f"{operation} {model}")
    span.note(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "epserve",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": job.id,
            "gen_ai.request.choice.count": job.num_choices,
            "gen_ai.request.max_tokens": max(prompt.max_tokens for prompt in job.prompts),
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p or 1.0,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.stream": job.stream,
            "gen_ai.output.type": "json" if sampling.HasField("grammar") else "text",
        }
    )


def describe_end(scope: Scope, run: RequestRun, outcome: str) -> None:
    """What came of it; `outcome` as in the metrics."""
    span: tracing.Span = scope.get(SPAN, tracing.NOTHING)
    if not span.is_recording:
        return
    usage = run.usage()
    span.note(
        {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.response.finish_reasons": run.finish_reasons(),
            "epserve.num_moves": run.num_moves,
            "epserve.outcome": outcome,
        }
    )
    if outcome not in ("ok", "disconnected"):
        span.fail(outcome)
