"""Grammars by xgrammar: compiled ones, and how far an output has come in one."""

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.grammar.token_bytes import token_bytes
from engine.grammar.xgrammar_core import VOCABULARY_OF_BYTES, load_core
from engine.sampling.sampling_params import Grammar

_core: Any = load_core()

# Free whitespace between JSON's tokens is allowed up to this many characters: a weak model
# would go on with it for ever.
COMPACT_SEPARATORS = (",", ":")  # inside values without a type the library writes ", " all the same
MAX_WHITESPACE = 64
ANY_OBJECT = json.dumps({"type": "object"})
# Each takes some MB: one for grammars that name no marks, one for tool calls, hardly more.
MAX_COMPILERS = 4
_ESCAPED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U00([0-9a-fA-F]{6}))")
# xgrammar tells where in its own sources an error was found.
_ORIGIN = re.compile(r"^\s*(\[[\d:]+\])?\s*\S+\.(cc|h):\d+:\s*")


class GrammarCompiler:
    """For one checkpoint; thread-safe.

    Marks (<think>, those around tool calls) are spelled by their own tokens where the grammar
    names them, and are not possible elsewhere: inside of a string they would be taken for what
    they are not. Of special ones the request says which it names: clients do not see others.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Raises CheckpointError for a tokenizer that cannot be used."""
        self._texts, self._marks, self._special = token_bytes(folder, vocab_size)
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._compilers: dict[frozenset[int], Any] = {}

    def compile(self, grammar: Grammar) -> Any:  # noqa: ANN401 - an object of the library
        """Raises ValueError saying why a grammar is none. `after_token_id` and
        `thoughts` do not matter."""
        try:
            compiled = self._compile(grammar)
            first = _matcher(compiled, self._eos_token_ids)
            bits = torch.zeros(1, -(-len(self._texts) // 32), dtype=torch.int32)
            first.fill_next_token_bitmask(bits, 0, False)
        except (RuntimeError, TypeError) as error:
            text = _ORIGIN.sub("", str(error)).strip() or "it cannot be compiled"
            raise ValueError(text) from error
        if not bits.any():
            raise ValueError("no output can match it")
        return compiled

    def match(
        self,
        grammar: Grammar,
        compiled: Any,  # noqa: ANN401 - of `compile`
        stop_token_ids: Sequence[int],
    ) -> "GrammarMatch":
        """At the begin of an output. Stop tokens that are no text end it where it may end."""
        textless = [token for token in stop_token_ids if not self._texts[token]]
        matcher = _matcher(compiled, (*self._eos_token_ids, *textless))
        return GrammarMatch(matcher, len(self._texts), grammar)

    def _compile(self, grammar: Grammar) -> Any:  # noqa: ANN401 - as `compile`
        compiler = self._compiler_for(grammar)
        if grammar.regex is not None:
            return compiler.compile_regex(grammar.regex)
        if grammar.ebnf is not None:
            return compiler.compile_grammar_from_strings(grammar.ebnf, "root")
        most: int | None = MAX_WHITESPACE
        any_whitespace, separators = True, None
        if grammar.compact:
            any_whitespace, most, separators = False, None, COMPACT_SEPARATORS
        indent = None
        is_strict, any_order = True, False
        return compiler.compile_json_schema(
            grammar.json_schema or ANY_OBJECT,
            *(any_whitespace, indent, separators, is_strict, most, any_order),
        )

    def _compiler_for(self, grammar: Grammar) -> Any:  # noqa: ANN401 - of the library
        """One whose vocabulary has the marks that the grammar names."""
        source = grammar.regex or grammar.ebnf or grammar.json_schema or ""
        source = _ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), source)
        named = frozenset(
            token
            for token, text in self._marks.items()
            if text in source and (token not in self._special or token in grammar.special_token_ids)
        )
        with self._lock:
            if named not in self._compilers:
                if len(self._compilers) >= MAX_COMPILERS:
                    self._compilers.clear()
                self._compilers[named] = self._make_compiler(named)
            return self._compilers[named]

    def _make_compiler(self, named: frozenset[int]) -> Any:  # noqa: ANN401 - of the library
        texts = self._texts.copy()
        for token in named:
            texts[token] = self._marks[token].encode()
        stop_token_ids, adds_space = list(self._eos_token_ids), False
        info = _core.TokenizerInfo(
            texts, VOCABULARY_OF_BYTES, len(texts), stop_token_ids, adds_space
        )
        num_threads, remembers, most_bytes = 1, False, -1
        return _core.GrammarCompiler(info, num_threads, remembers, most_bytes)


class GrammarMatch:
    """Not fast in every case: see `engine.grammar.paced_match`."""

    def __init__(
        self,
        matcher: Any,  # noqa: ANN401 - of `_matcher`
        vocab_size: int,
        grammar: Grammar,
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._after_token_id = grammar.after_token_id
        self._thoughts = grammar.thoughts  # until the first token
        self._begun = grammar.after_token_id is None
        self._complete = False
        self._mask: torch.Tensor | None = None

    @property
    def is_active(self) -> bool:
        return self._begun and not self._complete

    @property
    def is_complete(self) -> bool:
        return self._complete

    def accept(self, token_id: int) -> bool:
        thoughts, self._thoughts = self._thoughts, None
        if thoughts is not None and token_id == thoughts[0]:
            self._begun, self._after_token_id, self._mask = False, thoughts[1], None
            return True
        if not self._begun:
            self._begun = token_id == self._after_token_id
            return True
        if self._complete or not self._matcher.accept_token(token_id, False):
            return False
        self._mask = None
        self._complete = self._matcher.is_terminated() or (
            self._matcher.is_completed() and self._can_only_end()
        )
        return True

    def mask(self) -> torch.Tensor:
        """[ceil(V / 32)] int32: tokens that may come next, once the match is active."""
        if self._mask is None:
            bits = torch.zeros(1, -(-self._vocab_size // 32), dtype=torch.int32)
            if not self._complete:
                self._matcher.fill_next_token_bitmask(bits, 0, False)
            if self._thoughts is not None:
                opens = self._thoughts[0]
                bits.numpy().view("uint32")[0, opens // 32] |= 1 << (opens % 32)
            self._mask = bits[0]
        return self._mask

    def _can_only_end(self) -> bool:
        words = self.mask().numpy().view("uint32").copy()
        for token_id in self._matcher.stop_token_ids():
            words[token_id // 32] &= ~(1 << (token_id % 32)) & 0xFFFFFFFF
        return not words.any()


def _matcher(compiled: Any, stop_token_ids: Sequence[int]) -> Any:  # noqa: ANN401 - of the library
    ends_by_itself, unlimited, temperature = False, -1, None
    stops = sorted(set(stop_token_ids))
    return _core.GrammarMatcher(compiled, stops, ends_by_itself, unlimited, temperature)
