"""Fields of other engines that cannot be done: refused by name."""

from typing import Any

import pytest

from tests.gateway.conftest import MODEL, Gateway
from tests.gateway.model_folder import VOCAB_SIZE
from tests.gateway.requests.test_bad_requests import TOOLS, refused

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHARED: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a"}, "ebnf": 'root ::= "a"'}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {"type": "no"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties"),
    ({"structured_outputs": {"structural_tag": {"format": {"type": "nothing"}}}},
     "structured_outputs.structural_tag"),
    ({"response_format": {"type": "structural_tag", "structures": [{}], "triggers": ["<"]}},
     "response_format"),
    ({"response_format": {"type": "structural_tag", "format": {
        "type": "json_schema", "json_schema": {"type": "array", "contains": {}}}}},
     "response_format"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"regex": "("}, "regex"),
    ({"ebnf": "root ::= nothing"}, "ebnf"),
    ({"json_schema": "{"}, "json_schema"),
    ({"no_stop_trim": 1}, "no_stop_trim"),
    ({"include_stop_str_in_output": True, "no_stop_trim": True}, "no_stop_trim"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "regex": "a"}, "allowed_token_ids"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ({"stream_options": {"every": 5}, "stream": True}, "stream_options.every"),
    ({"cache_salt": "a"}, "cache_salt"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"wholly_unknown": False}, "wholly_unknown"),
]  # fmt: skip
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"thinking_budget": 5}, "thinking_budget"),
    ({"echo": True, "prompt_logprobs": 0, "stream": False}, "prompt_logprobs"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"thinking": {"type": "enabled", "budget": 5}}, "thinking.budget"),
    ({"thinking_budget": -1}, "thinking_budget"),
    ({"max_thinking_tokens": "few"}, "max_thinking_tokens"),
    ({"thinking_budget": 5, "max_thinking_tokens": 5}, "max_thinking_tokens"),
    ({"thinking_budget": 5, "thinking": {"type": "disabled", "budget_tokens": 6}},
     "thinking_budget"),
    ({"tools": TOOLS, "tool_choice": "required", "allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"stream_reasoning": False}, "stream_reasoning"),
    ({"input_ids": [5]}, "input_ids"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), SHARED + COMPLETIONS)
async def test_completions(gateway: Gateway, change: dict[str, Any], param: str) -> None:
    await refused(gateway, "/v1/completions", {"model": MODEL, "prompt": "plain"} | change, param)


@pytest.mark.parametrize(("change", "param"), SHARED + CHAT)
async def test_chat(gateway: Gateway, change: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | change
    await refused(gateway, "/v1/chat/completions", body, param)
