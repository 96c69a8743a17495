"""Hooks of the schemathesis runs: generated requests reach the model, and ask little of it.

EPSERVE_MODEL is the model's name. What is of another type than it should be is left alone.
"""

import os
import random
from typing import Any

import schemathesis

MODEL = os.environ["EPSERVE_MODEL"]
# As many as the demo model makes in a moment, behind a limit that is to be refused.
MOST = {"max_tokens": 3, "max_completion_tokens": 3, "n": 2, "best_of": 2}
LARGEST_ACCEPTED = {"max_tokens": 4096, "max_completion_tokens": 4096, "n": 128, "best_of": 128}
REQUIRED = {"model", "messages", "prompt", "input", "max_tokens"}
# Here more than fits into the context is no error but an answer that goes on to its end.
BOUNDED_BY_CONTEXT = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]
) -> None:
    body = case.body
    if not isinstance(body, dict):
        return
    # Names of every other length stay what they are: no such model.
    if isinstance(body.get("model"), str) and len(body["model"]) % 4 != 3:
        body["model"] = MODEL
    rng = random.Random(repr(body))
    if rng.random() < 0.5:  # many fields at once mostly contradict each other
        kept = rng.sample(sorted(body), k=min(2, len(body)))
        for name in set(body) - REQUIRED - set(kept):
            del body[name]
    if case.path == "/v1/chat/completions":
        if rng.random() < 0.9 and isinstance(body.get("messages"), list):
            _complete_messages(body["messages"])
        # Without either the answer goes on to the end of the context.
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            body["max_tokens"] = 3
    if limit := BOUNDED_BY_CONTEXT.get(case.path):
        value = 3 if body.get(limit) is None else body[limit]
        body[limit] = min(value, 3) if type(value) is int else value
    for name, most in MOST.items():
        value = body.get(name)
        if type(value) is int and most < value <= LARGEST_ACCEPTED[name]:
            body[name] = most


def _complete_messages(messages: list[Any]) -> None:
    """Which fields a message needs depends on its role, which the document cannot say."""
    for message in messages:
        if not isinstance(message, dict):
            continue
        if message.get("role") != "assistant":
            message.pop("tool_calls", None)
            if message.get("content") is None:
                message["content"] = "What is 5 + 6?"
        if message.get("role") == "tool" and message.get("tool_call_id") is None:
            message["tool_call_id"] = "call_1"
