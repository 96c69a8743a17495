"""The tokens between which a model thinks, and whether a prompt has left it thinking."""

from typing import NamedTuple

from gateway.formats.deepseek_r1 import DEEPSEEK_R1
from gateway.formats.reasoning_format import ReasoningFormat
from gateway.text.tokenizer import Tokenizer

OPEN, CLOSE = DEEPSEEK_R1.opens, DEEPSEEK_R1.closes


class ThinkMarks(NamedTuple):
    """Token ids; `also_ends_at` ends thoughts and is a part of the answer."""

    open: int
    close: int
    also_ends_at: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, form: ReasoningFormat = DEEPSEEK_R1) -> "ThinkMarks | None":
        """None for a vocabulary that does not have both as tokens: its model does not think."""
        ids = tokenizer.token_id(form.opens), tokenizer.token_id(form.closes)
        also = tokenizer.token_id(form.also_ends_at) if form.also_ends_at else None
        return None if ids[0] is None or ids[1] is None else cls(ids[0], ids[1], also)


def leaves_open(prompt: str, *, final_message: str | None) -> bool:
    """Whether what comes after `prompt` are thoughts: the template opened them (R1's ends
    with `<think>\n`, V3.1's may before the message that is to be continued), or they are
    open in that message."""
    if final_message is not None:
        if OPEN in final_message or CLOSE in final_message:
            return final_message.rfind(OPEN) > final_message.rfind(CLOSE)
        prompt = prompt.rstrip().removesuffix(final_message.strip())
    return prompt.rstrip().endswith(OPEN)
