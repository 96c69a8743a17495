"""The checkpoint's tokenizer: text to ids, and each id to the exact bytes it stands for."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders

from core.byte_level import BYTE_OF_CHARACTER
from core.errors import CheckpointError
from gateway.text.typed_tokens import TypedTokens, is_marked
from gateway.text.word_ids import WordIds, can_be_cut
from model.config import Fields

# Read by the library when it encodes: a batch of one needs no pool of threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Longer texts are encoded in a thread: the library lets go of the interpreter lock. These take
# a millisecond or two, about what the way to a thread and back costs a busy process.
INLINE_CHARACTERS = 4000
# Of words that are known so many take half as long.
WORDS_CHARACTERS = 2 * INLINE_CHARACTERS


class Tokenizer:
    """Byte-level BPE as in tokenizer.json, with the special tokens of tokenizer_config.json.

    `special_tokens` holds what chat templates may name: bos_token, eos_token, ...
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, special_tokens: dict[str, str], adds_bos: bool
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.special_tokens = special_tokens
        self._tokenizer = tokenizer
        self._special_ids = {
            token_id
            for token_id, added in tokenizer.get_added_tokens_decoder().items()
            if added.special
        }
        bos = special_tokens.get("bos_token")
        self._bos_id = tokenizer.token_to_id(bos) if adds_bos and bos else None
        self._spelled: dict[int, bytes] = {}
        self.typed_tokens = TypedTokens(tokenizer)
        self._words = WordIds(tokenizer) if can_be_cut(tokenizer) else None

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Raises CheckpointError when a file is missing, broken, or not byte-level BPE."""
        path = folder / "tokenizer.json"
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise CheckpointError(f"{path}: the decoder is not ByteLevel; no other is supported")
        config_path = folder / "tokenizer_config.json"
        if not config_path.is_file():
            return cls(tokenizer, special_tokens={}, adds_bos=False)
        fields = Fields.read(config_path)
        special_tokens = {
            name: text
            for name in fields.values
            if name.endswith("_token") and (text := _token_text(fields, name)) is not None
        }
        adds_bos = fields.flag("add_bos_token", False)
        return cls(tokenizer, special_tokens=special_tokens, adds_bos=adds_bos)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; a chat template has put the special tokens in already."""
        if self._words is not None and not add_special_tokens and len(text) <= WORDS_CHARACTERS:
            known_ids = self._words.encode(text)
            if known_ids is not None:
                return known_ids
        if len(text) <= INLINE_CHARACTERS:
            await asyncio.sleep(0)  # as long as all the rest of a request: others between
            token_ids = self._encode(text, add_special_tokens)
            await asyncio.sleep(0)
            return token_ids
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    async def encode_marked(self, text: str) -> list[int]:
        """Ids of a rendered chat in which `typed_tokens` has marked what users typed."""
        if is_marked(text):
            return await asyncio.to_thread(self.typed_tokens.encode, text)
        return await self.encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The same ids as of `encode` in two thirds of the time: without offsets, which nobody
        # wants.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        token_ids: list[int] = encoding.ids
        # NOTE: `add_bos_token` is carried out by transformers' class, not by tokenizer.json.
        if add_special_tokens and self._bos_id is not None and token_ids[:1] != [self._bos_id]:
            token_ids.insert(0, self._bos_id)
        return token_ids

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written `text`, if there is one."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    @property
    def bos_token_id(self) -> int | None:
        """The token that `encode` puts before a text, if it does."""
        return self._bos_id

    def vocabulary(self) -> list[str]:
        """All tokens as tokenizer.json writes them, by id; "" where an id has none."""
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        by_id = {token_id: token for token, token_id in self._tokenizer.get_vocab().items()}
        return [by_id.get(token_id, "") for token_id in range(max(by_id, default=size - 1) + 1)]

    def shown_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: nothing for special and unknown ones. Tokens that
        were added but are not special (<think>) are shown."""
        return b"" if token_id in self._special_ids else self.spelled_bytes(token_id)

    def spelled_text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return b"".join(map(self.spelled_bytes, token_ids)).decode("utf-8", "replace")

    def spelled_bytes(self, token_id: int) -> bytes:
        """The bytes a token is written with, special or not; none for unknown ids."""
        spelled = self._spelled.get(token_id)
        if spelled is None:
            token = self._tokenizer.id_to_token(token_id) or ""
            try:
                spelled = bytes(BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token: written as it is
                spelled = token.encode()
            self._spelled[token_id] = spelled
        return spelled


def _token_text(fields: Fields, name: str) -> str | None:
    """Special tokens are texts, or objects with the text under `content`."""
    value = fields.values[name]
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
