"""Tokens on the wire: the same on the other side."""

from engine.link.messages import TokenOut
from engine.server.wire import prompt_messages, token_of


def test_the_first_token_of_a_prompt_has_no_log_probability() -> None:
    tokens = [
        TokenOut(token_id=4),
        TokenOut(token_id=5, logprob=-1.5, top=((6, -0.5), (5, -1.5))),
        TokenOut(token_id=6),
    ]
    messages = prompt_messages(tokens)
    assert [message.has_logprob for message in messages] == [False, True, True]
    assert [token_of(message) for message in messages] == tokens
