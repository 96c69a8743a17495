"""The tokens between which a model thinks, and whether a prompt has left it thinking."""

from typing import NamedTuple

from gateway.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


class ThinkMarks(NamedTuple):
    """Token ids of `<think>` and `</think>`."""

    open: int
    close: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ThinkMarks | None":
        """None for a vocabulary that does not have both as tokens: its model does not think."""
        ids = tokenizer.token_id(OPEN), tokenizer.token_id(CLOSE)
        return None if ids[0] is None or ids[1] is None else cls(ids[0], ids[1])


def leaves_open(prompt: str, *, final_message: str | None) -> bool:
    """Whether what comes after `prompt` are thoughts: the template opened them (R1's ends
    with `<think>\n`, V3.1's may before the message that is to be continued), or they are
    open in that message."""
    if final_message is not None:
        if OPEN in final_message or CLOSE in final_message:
            return final_message.rfind(OPEN) > final_message.rfind(CLOSE)
        prompt = prompt.rstrip().removesuffix(final_message.strip())
    return prompt.rstrip().endswith(OPEN)
