"""A tiktoken file that was converted as docs/install.md says gives the ids of tiktoken itself."""

import base64
from pathlib import Path

import pytest
from transformers.convert_slow_tokenizer import TikTokenConverter

from gateway.text.tokenizer import Tokenizer
from model.tokenizer_file import tokenizer_problem

tiktoken = pytest.importorskip("tiktoken")

MERGES = [b"he", b"ll", b"hell", b"hello", b" w", b"wo"]
# Of Kimi's kind: a class of letters less another, and one script by itself.
PATTERN = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


async def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {token: 256 + index for index, token in enumerate(MERGES)}
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (tmp_path / "tiktoken.model").write_bytes(b"".join(lines))
    assert "TikTokenConverter" in tokenizer_problem(tmp_path)
    ids = {"[EOS]": len(ranks) + 1, "[BOS]": len(ranks)}
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=ids)
    special = sorted(encoding._special_tokens, key=encoding._special_tokens.get)
    converter = TikTokenConverter(
        str(tmp_path / "tiktoken.model"), encoding._pat_str, extra_special_tokens=special
    )
    converter.converted().save(str(tmp_path / "tokenizer.json"))
    assert not tokenizer_problem(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("hello world", "a\n\n b  c", "1234567", "\u4e2d\u6587hello!", "[BOS]hello[EOS]"):
        got = await tokenizer.encode(text, add_special_tokens=False)
        assert got == encoding.encode(text, allowed_special="all"), text
