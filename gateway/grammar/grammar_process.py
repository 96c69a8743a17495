"""The process that compiles grammars before they are sent to a worker: `python -m
gateway.grammar.grammar_process MODEL_FOLDER EOS_ID...`; with `parse-only` instead of a model, it
finds errors and does not compile.

It compiles as workers do, so that what passes here compiles there. It runs beside the gateway:
what it is asked may take long, or more memory than there is. An output is tried, and a grammar
whose masks take too long is refused. It runs without torch.

One JSON object a line, from standard input and to standard output:

                                                                    -> {"ready": true}
    {"kind": "json_schema" | "regex" | "ebnf" | "choice", "text": ...}
    {"kind": "structural_tag", "text": ..., "marks": [...]}         -> {"lark": ...}
    {"kind": "tool_calls", "tools": [[HEAD, SCHEMA], ...], "number": ...,
     "begins": [[TRIGGER, REST], ...], "tail": ..., "between": ..., "end": ...,
     "at_most_one": ..., "is_free": ..., "not_in_text": [...],
     "instead": null or one of the above}
                                                                    -> {"lark": ...}
                                                    what cannot be  -> {"error": ...}
"""

import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher

from core.process import die_with_parent
from engine.grammar.grammar_match import LIMITS, TOO_LONG, GrammarCompiler, reason_of
from engine.sampling.sampling_params import Grammar
from gateway.grammar.lark import lark_of

MAX_MEMORY_BYTES = 4 * 2**30
MAX_ERROR_CHARACTERS = 500
# CPU time of one token of the output that is tried, and of all of it.
MASK_SECONDS, TRIAL_SECONDS, TRIAL_TOKENS = 0.1, 2.0, 128
# Streams in progress go before grammars, and before this process's own start.
NICENESS = 10


class Compiler:
    """For the vocabulary of one model; without a `folder` it parses only."""

    def __init__(self, folder: Path | None, eos_token_ids: tuple[int, ...]) -> None:
        self._compiler = GrammarCompiler(folder, None, eos_token_ids) if folder else None
        marks, special = {}, frozenset[int]()
        if self._compiler is not None:
            marks, special = self._compiler.marks, self._compiler.special
        self._marks = {text: token_id for token_id, text in marks.items()}
        self._shown = {text: i for text, i in self._marks.items() if i not in special}

    def answer(self, request: dict[str, Any]) -> dict[str, str]:
        """Raises ValueError for what is no grammar, and for one that takes too long."""
        lark = lark_of(request, self._shown, self._marks)
        if self._compiler is not None:
            self._try(self._compiler, Grammar(lark=lark))
        elif fault := LLMatcher.validate_grammar(lark, None, limits=LIMITS):
            raise ValueError(reason_of(fault))
        return {"lark": lark}

    def _try(self, compiler: GrammarCompiler, grammar: Grammar) -> None:
        """Matches an output of random tokens."""
        match = compiler.match(grammar)
        choose, began = random.Random(0), time.process_time()
        before = began
        for _ in range(TRIAL_TOKENS):
            mask = match.mask()
            now = time.process_time()
            if now - before > MASK_SECONDS or now - began > TRIAL_SECONDS:
                raise ValueError(TOO_LONG)
            before = now
            is_allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
            is_allowed[[*compiler.eos_token_ids]] = 0
            (going_on,) = is_allowed.nonzero()
            if not len(going_on) or not match.accept(int(choose.choice(going_on))):
                return


def _shown(error: Exception) -> str:
    """The compiler's reason, as far as it is about the grammar."""
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    return str(error)[:MAX_ERROR_CHARACTERS]


def main(arguments: list[str]) -> None:
    die_with_parent()
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    folder = None if arguments[0] == "parse-only" else Path(arguments[0])
    compiler = Compiler(folder, tuple(map(int, arguments[1:])))
    _say({"ready": True})
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line)
        try:
            answer: dict[str, Any] = compiler.answer(request)
        except (ValueError, MemoryError) as error:
            answer = {"error": _shown(error)}
        _say(answer)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
