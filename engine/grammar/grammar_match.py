"""Grammars by llguidance: compiled ones, and how far an output has come in one. Torch-free."""

import re
from collections.abc import Sequence
from copy import copy
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from engine.grammar.token_bytes import token_bytes
from engine.sampling.sampling_params import Grammar

# What one call may do, and so how long it may take: 20 to 50 ms at 129,000 tokens. Objects of
# 2,000 properties that may all be left out need the rows.
LIMITS = LLParserLimits(
    max_items_in_row=10_000,
    step_max_items=10_000,
    step_lexer_fuel=200_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
TOO_LONG = "it takes too long to match: ambiguous or nested repeats do"
NUM_THREADS = 4

# Where in a grammar something is, and what the library was at.
_PLACE = re.compile(
    r"(at )?\d+\(\d+\): |failed to compile JSON schema: |invalid regex .*? \(in regex\): "
)
_EXCERPT = re.compile(r"\n *\d+ \| .*|: +\((And|Or|Not|Regex|SearchRegex) .*", re.DOTALL)
MAX_REASON = 500


def reason_of(error: str) -> str:
    """What the library says of a grammar, without its excerpts of what users have not written."""
    text = _PLACE.sub("", _EXCERPT.sub("", error))
    return text.rpartition("\nerror: ")[2].partition("\n")[0][:MAX_REASON]


class _Vocabulary:
    """As the library asks for one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos

    def __call__(self, text: object) -> list[int]:
        raise AssertionError("grammars force no tokens")


class GrammarCompiler:
    """For one checkpoint; thread-safe. Making one holds the interpreter lock for half a second at
    129,000 tokens.

    Added tokens (<think>, those around tool calls) are possible only where a grammar names them by
    id: they stand for more than the same characters one by one.

    texts    bytes of each token; none for ids that are no text by themselves
    marks    texts of added tokens that show, and of all others
    """

    def __init__(
        self, folder: Path, vocab_size: int | None, eos_token_ids: tuple[int, ...]
    ) -> None:
        """`vocab_size` None: as many as tokenizer.json has. Raises CheckpointError for a tokenizer
        that cannot be used."""
        self.texts, self.marks, self.special = token_bytes(folder, vocab_size)
        tokens = self.texts.copy()
        for token_id, text in self.marks.items():
            tokens[token_id] = text.encode()
        self.eos_token_ids = eos_token_ids
        self._tokenizer = LLTokenizer(
            _Vocabulary(tokens, [*self.marks], eos_token_ids[0]),  # type: ignore[arg-type]
            n_vocab=len(tokens),
            eos_token=[*eos_token_ids],
        )
        self._executor = LLExecutor(NUM_THREADS)

    def match(self, grammar: Grammar, stop_token_ids: Sequence[int] = ()) -> "GrammarMatch":
        """At the begin of an output. Stop tokens that are no text end it where it may end.
        Raises ValueError saying why a grammar is none."""
        textless = [token for token in stop_token_ids if not self.texts[token]]
        matcher = LLMatcher(self._tokenizer, grammar.lark, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(reason_of(matcher.get_error()))
        other = LLMatcher(self._tokenizer, "", log_level=0)
        stops = {*self.eos_token_ids, *textless}
        return GrammarMatch(matcher, self._executor, other, stops, len(self.texts), grammar)


class GrammarMatch:
    """Not fast in every case: see `engine.grammar.paced_match`."""

    def __init__(
        self,
        matcher: LLMatcher,
        executor: LLExecutor,
        other: LLMatcher,
        stop_token_ids: set[int],
        vocab_size: int,
        grammar: Grammar,
    ) -> None:
        self._matcher = matcher
        self._executor, self._other = executor, other
        self._stop_token_ids = stop_token_ids
        self._stops = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        for token_id in stop_token_ids:
            self._stops[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._after_token_id = grammar.after_token_id
        self._begins_with_token_id = grammar.begins_with_token_id
        self._thoughts = grammar.thoughts  # until the first token
        self._begun = grammar.after_token_id is None
        self._complete = False
        self._mask: np.ndarray | None = None

    @property
    def is_active(self) -> bool:
        return self._begun and not self._complete

    @property
    def is_complete(self) -> bool:
        return self._complete

    def copied(self) -> "GrammarMatch":
        """Goes its own way from here. What the lexer finds out is of use to both."""
        made = copy(self)
        made._matcher = self._matcher.deep_copy()
        return made

    def accept(self, token_id: int) -> bool:
        """Whether the token may come next. Raises as `mask`."""
        thoughts, self._thoughts = self._thoughts, None
        if thoughts is not None and token_id == thoughts[0]:
            self._begun, self._after_token_id, self._mask = False, thoughts[1], None
            return True
        if not self._begun and not (self.may_begin_with(token_id) and self._allows(token_id)):
            self._begun = token_id == self._after_token_id
            return True
        self._begun = True
        if self._complete or not self._allows(token_id):
            return False
        if token_id in self._stop_token_ids:
            self._complete = True
        else:
            # The library lets go of the interpreter lock when it takes tokens in for several.
            self._executor.consume_token_par([(self._matcher, token_id), (self._other, 0)])
        self._mask = None
        self._complete = self._complete or not (self.mask() & ~self._stops).any()
        return True

    def may_begin_with(self, token_id: int) -> bool:
        """Whether the token, if the grammar allows it first, ends what is not constrained."""
        return not self._begun and token_id == self._begins_with_token_id

    def _allows(self, token_id: int) -> bool:
        return bool(self.mask()[token_id // 32] >> token_id % 32 & 1)

    def mask(self) -> np.ndarray:
        """[ceil(V / 32)] uint32: tokens that may come next, once the match is active.
        Raises ValueError where there is none, or working it out is past the limits."""
        if self._mask is None:
            bits = np.zeros_like(self._stops)
            if not self._complete:
                self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
                if self._matcher.is_error():
                    is_void = "NoExtension" in self._matcher.get_error()
                    raise ValueError("no output can match it" if is_void else TOO_LONG)
            if (bits & self._stops).any():  # those of the model: the output may end
                bits |= self._stops
            if self._thoughts is not None:
                opens = self._thoughts[0]
                bits[opens // 32] |= np.uint32(1 << opens % 32)
            self._mask = bits
        return self._mask
