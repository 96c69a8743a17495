"""docs/fields.md, made from the models of request bodies.

python scripts/fields_doc.py           # writes the page
python scripts/fields_doc.py --check   # fails when the page is not what it would write
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import AliasChoices
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gateway.requests.chat_request import ChatRequest  # noqa: E402 - needs the path
from gateway.requests.completion_request import CompletionRequest  # noqa: E402
from gateway.requests.unsupported import NEUTRAL_VALUES, WITHOUT_EFFECT  # noqa: E402
from scripts import configuration_doc  # noqa: E402

PAGE = ROOT / "docs" / "fields.md"

HEADER = """# Fields of chat and text completions

Made by `make docs` from the code; do not edit.

A field is done, or refused by name with 400: OpenAI's, and those of vLLM, SGLang, TensorRT-LLM and
DeepSeek's API. `null` is as good as absent. `/v1/messages` and `/v1/responses` take what their own
APIs have, and refuse all else.

## Done

Fields that say nothing else mean what they mean in OpenAI's API. They hold for a request's whole
way: one that moves to another worker goes on by the same rules.

| field | in | what it does |
|---|---|---|"""

# Of whatever is not OpenAI's, or is more than that.
MEANINGS = {
    "add_generation_prompt": "false: the prompt does not begin the assistant's turn",
    "add_special_tokens": "false: a text's prompt is without the tokens that begin texts",
    "allowed_token_ids": "no other tokens come; not beside a form of the output",
    "bad_words": "texts whose tokens do not come one behind the other, at the begin of a text or "
    "behind a space; other spellings in tokens are not looked for",
    "best_of": "so many choices are generated, and the `n` likeliest told",
    "chat_template_kwargs": "variables for the chat template",
    "continue_final_message": "the output goes on with the last message; `prefix` (`partial`) in "
    "that message says the same",
    "ebnf": "the output is of this grammar",
    "guided_choice": "the output is one of these texts",
    "guided_grammar": "as `ebnf`",
    "guided_json": "the output is JSON of this schema, an object or its text",
    "guided_regex": "as `regex`",
    "ignore_eos": "the end-of-sequence token does not end the output",
    "include_reasoning": "false: thoughts are counted but not told",
    "include_stop_str_in_output": "the text has the stop string, or stop token, that ended it",
    "json_schema": "as `guided_json`",
    "min_p": "tokens less likely than this share of the likeliest do not come",
    "min_tokens": "the output is at least so long",
    "priority": "higher ones go first",
    "prompt_logprobs": "so many alternatives for each token of the prompt, and the token itself, "
    "as `prompt_logprobs` in the choice, or beside the choices of a chat",
    "regex": "the output matches this expression",
    "repetition_penalty": "logits of tokens in prompt or output are divided by it",
    "response_format": "OpenAI's, and `structural_tag` in both of its forms",
    "return_token_ids": "choices have `token_ids`, and `prompt_token_ids` are told; chunks have "
    "those that are new",
    "separate_reasoning": "false: thoughts stay in the text",
    "skip_special_tokens": "false: they are in the text",
    "stop_token_ids": "tokens that end the output",
    "stream_options": "`include_usage`, and `continuous_usage_stats`: the usage so far in each "
    "chunk",
    "structured_outputs": "one of `json`, `json_object`, `regex`, `choice`, `grammar`, "
    "`structural_tag`; JSON is always without free whitespace",
    "thinking": "`enabled` or `disabled`; `budget_tokens` is a `thinking_budget`",
    "thinking_budget": "thoughts of so many tokens are closed; then the answer comes, in its form",
    "top_k": "only the likeliest so many tokens come; 0 or -1: all",
}

ANSWERS = """
Answers have more than OpenAI's as well: `reasoning_content` in messages, `stop_reason` in choices
that have ended (the stop string or the id of `stop_token_ids` that ended it, else null), and
`prompt_cache_hit_tokens` and `prompt_cache_miss_tokens` in `usage`.

## Taken where they change nothing

Any other value is refused.

| field | values |
|---|---|"""

REFUSED = """
Hints without effect, taken with any value of their type: {hints}.

## Refused

Every other field, among them those of other engines that are not done here: `cache_salt`,
`chat_template`, `custom_logit_processor`, `documents`, `input_ids`, `kv_transfer_params`,
`logprob_token_ids`, `lora_path`, `reasoning`, `request_id`, `rid`, `session_params`, `stop_regex`,
`truncate_prompt_tokens`, `vllm_xargs`. The id of a request is the header `x-request-id`.
"""


def page() -> str:
    """The whole of docs/fields.md."""
    hints = ", ".join(f"`{name}`" for name in WITHOUT_EFFECT)
    lines = [HEADER, *_done(), ANSWERS, *_neutral()]
    return "\n".join(lines) + "\n" + REFUSED.format(hints=hints)


def _done() -> Iterator[str]:
    chat, text = ChatRequest.model_fields, CompletionRequest.model_fields
    for name in sorted({*chat, *text}):
        where = "both" if name in chat and name in text else "chat" if name in chat else "text"
        names = ", ".join(f"`{one}`" for one in _names(name, (chat | text)[name]))
        yield f"| {names} | {where} | {MEANINGS.get(name, '')} |"


def _names(name: str, field: FieldInfo) -> list[str]:
    alias = field.validation_alias
    return [str(one) for one in alias.choices] if isinstance(alias, AliasChoices) else [name]


def _neutral() -> Iterator[str]:
    for name, values in NEUTRAL_VALUES.items():
        yield f"| `{name}` | {', '.join(f'`{json.dumps(value)}`' for value in values)} |"


if __name__ == "__main__":
    sys.exit(configuration_doc.main(sys.argv[1:], PAGE, page()))
