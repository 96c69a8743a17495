"""Fields that OpenAI's API does not have, by its SDK, against a running cluster."""

import re
from typing import Any

import openai
import pytest

from tests.cluster.harness import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

QUESTION = "What is 37 + 48?"


def test_fields_of_other_engines(served: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    def chosen(**fields: object) -> tuple[openai.types.chat.ChatCompletion, Any]:
        reply = client.chat.completions.create(
            model=served.model,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=60,
            extra_body={"return_token_ids": True, **fields},
        )
        assert reply.usage is not None
        assert len(reply.choices[0].token_ids) == reply.usage.completion_tokens  # type: ignore[attr-defined]
        return reply, reply.choices[0]

    free, choice = chosen(prompt_logprobs=1)
    free_ids = choice.token_ids
    assert len(free.prompt_logprobs) == len(free.prompt_token_ids)  # type: ignore[attr-defined]
    assert choice.stop_reason is None
    for budget in (0, 4):
        bounded, choice = chosen(thinking_budget=budget, structured_outputs={"regex": "[0-9]{2}!"})
        assert bounded.usage is not None
        assert bounded.usage.completion_tokens_details is not None
        assert bounded.usage.completion_tokens_details.reasoning_tokens == budget
        assert re.fullmatch("[0-9]{2}!", choice.message.content)
    banned = tuple(free_ids[3:6])
    spelled = served.client.post("/detokenize", json={"tokens": banned}).json()["prompt"]
    _, choice = chosen(bad_words=[spelled])
    assert choice.token_ids[:3] == free_ids[:3]
    assert banned not in zip(*(choice.token_ids[at:] for at in range(3)), strict=False)
    _, choice = chosen(allowed_token_ids=free_ids[:5], stop_token_ids=free_ids[4:5])
    assert {*choice.token_ids} <= {*free_ids[:5]}
    assert choice.stop_reason in (None, free_ids[4])
