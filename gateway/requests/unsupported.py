"""Fields that no body's model has: of OpenAI's API, of other engines, of none.

They are accepted with the values that change nothing and refused by name with any other, so
that nobody believes that they took effect.
"""

from collections.abc import Mapping
from typing import Any

from core.errors import InvalidRequest

# Field -> values that change nothing; JSON null is always among them. Some of them only one of
# the endpoints knows.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_ignore_length": (0,),
    "reasoning_effort": ("none", "minimal"),
    "return_assistant_tokens_mask": (False,),
    "return_cached_tokens_details": (False,),
    "return_context_logits": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "store": (False,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_p_min": (0,),
    "use_beam_search": (False,),
}

# Part of the API, without any effect on the reply: not worth a line in the log.
WITHOUT_EFFECT: dict[str, type] = {
    "guided_decoding_backend": str, "include_reasoning": bool, "metadata": dict,
    "parallel_tool_calls": bool, "prompt_cache_key": str, "prompt_cache_retention": str,
    "safety_identifier": str, "service_tier": str, "spaces_between_special_tokens": bool,
    "user": str, "verbosity": str,
}  # fmt: skip
TYPE_NAMES = {str: "a string", bool: "true or false", dict: "an object of strings"}

MAX_NAME_CHARACTERS = 80


def refuse_unsupported(extra: Mapping[str, Any]) -> None:
    """Looks at the fields that the request model does not have.

    Raises InvalidRequest for one that is set to something that would matter, or to what it can
    never be.
    """
    for name, value in extra.items():
        if name in WITHOUT_EFFECT:
            _check_type(name, value)
        elif value is not None and not _is_one_of(value, NEUTRAL_VALUES.get(name, ())):
            shown = name[:MAX_NAME_CHARACTERS]
            raise InvalidRequest(f"{shown} is not supported", param=shown)


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
