"""Log-probabilities as OpenAI's two APIs show them."""

from collections.abc import Sequence
from typing import Any

from gateway.output.choice_delta import TokenEntry
from gateway.text.tokenizer import Tokenizer
from proto.generate_pb2 import Token

# JSON has no infinities; what OpenAI's API shows for tokens that cannot be.
LEAST_LOGPROB = -9999.0


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """How a token is written; one that is not whole characters as `bytes:\\xe2\\x82`, as in
    OpenAI's API, so that no two tokens look the same."""
    spelled = tokenizer.spelled_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def chat_logprob(tokenizer: Tokenizer, entry: TokenEntry) -> dict[str, Any]:
    """One element of a chat choice's `logprobs.content`."""
    top = [_chat_alternative(tokenizer, token_id, logprob) for token_id, logprob in entry.top]
    assert entry.logprob is not None, "chats do not echo"
    chosen = _chat_alternative(tokenizer, entry.token_id, entry.logprob)
    return {**chosen, "top_logprobs": top}


def completion_logprobs(tokenizer: Tokenizer, entries: list[TokenEntry]) -> dict[str, Any]:
    """A completion choice's `logprobs`: parallel lists; the chosen token is always among
    `top_logprobs`, so that there may be one more than asked for. An echoed prompt's first
    token has neither."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            tops.append(None)
            continue
        top = {token_text(tokenizer, token_id): _shown(logprob) for token_id, logprob in entry.top}
        top.setdefault(token_text(tokenizer, entry.token_id), _shown(entry.logprob))
        tops.append(top)
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [
            None if entry.logprob is None else _shown(entry.logprob) for entry in entries
        ],
        "tokens": [token_text(tokenizer, entry.token_id) for entry in entries],
        "top_logprobs": tops,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[Token]
) -> list[dict[str, dict[str, Any]] | None]:
    """As vLLM tells them: of each prompt token the likeliest ones and itself, by token id; the
    first has none. The rank of a token that is not among the likeliest is not known."""
    told: list[dict[str, dict[str, Any]] | None] = []
    for token in tokens:
        ranked: list[tuple[int, float, int | None]] = [
            (one.token_id, one.logprob, rank) for rank, one in enumerate(token.top_logprobs, 1)
        ]
        if all(token_id != token.token_id for token_id, _, _ in ranked):
            ranked.append((token.token_id, token.logprob, None))
        of_token = {
            str(token_id): {
                "logprob": _shown(logprob),
                "rank": rank,
                "decoded_token": token_text(tokenizer, token_id),
            }
            for token_id, logprob, rank in ranked
        }
        told.append(of_token if token.has_logprob else None)
    return told


def _chat_alternative(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.spelled_bytes(token_id)
    return {
        "token": spelled.decode("utf-8", "replace"),
        "logprob": _shown(logprob),
        "bytes": list(spelled),
    }


def _shown(logprob: float) -> float:
    # Also maps NaN: every comparison with it is false.
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
