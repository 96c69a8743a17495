"""Fields of OpenAI's API and its usual extensions that are known here but not supported.

They are accepted with the values that change nothing and refused by name with any other, so
that nobody believes that they took effect. Unknown fields are ignored.
"""

from collections.abc import Mapping
from typing import Any

from core.errors import InvalidRequest
from core.log import get_logger

log = get_logger("gateway.unsupported")

# Field -> values that change nothing; JSON null is always among them. Some of them only one of
# the endpoints knows.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "early_stopping": (False,),
    "ebnf": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prediction": (),
    "prompt_logprobs": (0,),
    "reasoning": (),
    "reasoning_effort": ("none", "minimal"),
    "regex": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stop_regex": (),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking": (),
    "thinking_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

# Part of the API, without any effect on the reply: not worth a line in the log.
WITHOUT_EFFECT: dict[str, type] = {
    "guided_decoding_backend": str, "include_reasoning": bool, "metadata": dict,
    "parallel_tool_calls": bool, "prompt_cache_key": str, "prompt_cache_retention": str,
    "safety_identifier": str, "service_tier": str, "user": str,
    "verbosity": str,
}  # fmt: skip
TYPE_NAMES = {str: "a string", bool: "true or false", dict: "an object of strings"}

MAX_NAMES_LOGGED = 10
MAX_NAME_CHARACTERS = 40


def refuse_unsupported(extra: Mapping[str, Any]) -> None:
    """Looks at the fields that the request model does not have.

    Raises InvalidRequest for one that is known and set to something that would matter, or to what
    it can never be.
    """
    unknown = []
    for name, value in extra.items():
        neutral = NEUTRAL_VALUES.get(name)
        if neutral is None:
            if name in WITHOUT_EFFECT:
                _check_type(name, value)
            else:
                unknown.append(name[:MAX_NAME_CHARACTERS])
        elif value is not None and not _is_one_of(value, neutral):
            raise InvalidRequest(f"{name} is not supported", param=name)
    if unknown:
        log.info("unknown fields ignored", fields=sorted(unknown)[:MAX_NAMES_LOGGED])


def _check_type(name: str, value: object) -> None:
    wanted = WITHOUT_EFFECT[name]
    fits = value is None or isinstance(value, wanted)
    if isinstance(value, dict):
        fits = fits and all(isinstance(one, str) for one in value.values())
    if not fits:
        raise InvalidRequest(f"{name} must be {TYPE_NAMES[wanted]}", param=name)


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    # True == 1 and False == 0 in Python, not in JSON.
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
