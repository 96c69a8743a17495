"""Replies of POST /tokenize and /detokenize."""

from collections.abc import Sequence
from typing import Any

from fastapi import Response

from gateway.replies.logprob_text import token_text
from gateway.replies.reply_form import encode_json
from gateway.text.tokenizer import Tokenizer


def tokenize_reply(
    token_ids: Sequence[int], tokenizer: Tokenizer, *, max_model_len: int, with_texts: bool
) -> Response:
    texts = [token_text(tokenizer, token_id) for token_id in token_ids] if with_texts else None
    return _json_response(
        {
            "count": len(token_ids),
            "max_model_len": max_model_len,
            "tokens": token_ids,
            "token_strs": texts,
        }
    )


def detokenize_reply(token_ids: Sequence[int], tokenizer: Tokenizer) -> Response:
    """Control tokens are written out; bytes that are no characters become U+FFFD."""
    spelled = b"".join(tokenizer.spelled_bytes(token_id) for token_id in token_ids)
    return _json_response({"prompt": spelled.decode("utf-8", "replace")})


def _json_response(body: dict[str, Any]) -> Response:
    return Response(encode_json(body), media_type="application/json")
