"""The process that compiles grammars before they are sent to a worker: `python -m
gateway.grammar.grammar_process MODEL_FOLDER EOS_ID...`; with `parse-only` instead of a model, it
finds errors and does not compile.

It is xgrammar itself, as on the workers, so that what passes here compiles there. It runs beside
the gateway, because a grammar may take for ever, or more memory than there is, to compile or to
match: an output is tried, and a grammar whose masks take too long is refused. And it runs without
torch: xgrammar's own package imports it for the masks, which are not needed here, so that only
the modules that make grammars are loaded.

One JSON object a line, from standard input and to standard output:

                                                                    -> {"ready": true}
    {"kind": "json_schema" | "regex" | "ebnf" | "structural_tag", "text": ...}
                                                                    -> {"ebnf": ...}, "" where
                                                                       the text itself will do
    {"kind": "tool_calls", "tools": [[HEAD, SCHEMA], ...], "number": ...,
     "begins": [[TRIGGER, REST], ...], "tail": ..., "between": ..., "end": ...,
     "at_most_one": ..., "is_free": ..., "not_in_text": [...],
     "instead": null or one of the above}
                                                                    -> {"ebnf": ...}
                                                    what cannot be  -> {"error": ...}
"""

import importlib.util
import os
import random
import re
import resource
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from core.process import die_with_parent
from gateway.text.ebnf import ebnf_literal
from gateway.text.tokenizer import Tokenizer

MAX_MEMORY_BYTES = 4 * 2**30
MAX_ERROR_CHARACTERS = 500
# CPU time of one token of the output that is tried, and of all of it.
MASK_SECONDS, TRIAL_SECONDS, TRIAL_TOKENS = 0.1, 2.0, 128
# Of what the library says, what is meant for who wrote the grammar; the rest is about its own code.
TELLING = re.compile(
    r"(Regex parsing|EBNF (lexer|parser)) error at|(Un)?[sS]upported|[a-zA-Z]+ must |Schema |"
    r"Invalid range|m(in|ax)[A-Z]|enum |Value must|The regex|\$ref|Cannot find|Invalid structural"
)
# Streams in progress go before grammars, and before this process's own start.
NICENESS = 10
# A weak model that must call, and may again, would do so until its context is full.
MAX_CALLS = 16
# Whether only one of several schemas fits is not looked at; unions are told apart by a constant.
TOLERATED = "oneOf with overlapping"
# xgrammar lets strings of bounded length hold control characters, which JSON does not have.
BOUNDED_CHARACTER, JSON_CHARACTER = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"
VOCABULARY_OF_BYTES = 0  # xgrammar's number for tokens as they are


class Compiler:
    """xgrammar for the vocabulary of one model; without a `folder` it parses only."""

    def __init__(self, folder: Path | None, eos_token_ids: list[int]) -> None:
        _prepare_package()
        self._core: Any = importlib.import_module("xgrammar.base")._core
        self._grammar: Any = importlib.import_module("xgrammar.grammar").Grammar
        self._eos_token_ids = eos_token_ids
        self._compiler: Any = None
        if folder is None:
            return
        tokenizer = Tokenizer.load(folder)
        self._vocab_size = len(tokenizer.vocabulary())
        # Special ones, too: a grammar may name them, as marks around calls.
        texts = [tokenizer.spelled_bytes(token_id) for token_id in range(self._vocab_size)]
        tokens = self._core.TokenizerInfo(
            texts, VOCABULARY_OF_BYTES, self._vocab_size, eos_token_ids, False
        )
        self._compiler = self._core.GrammarCompiler(tokens, 1, False, -1)

    def answer(self, request: dict[str, Any]) -> dict[str, str]:
        """Compiles one request; tells the grammar only where the request's own text will not do.
        Raises RuntimeError for what is no grammar, ValueError for one that takes too long."""
        kind = request["kind"]
        is_calls = kind == "tool_calls"
        must_write = kind in ("tool_calls", "structural_tag")
        grammar = self._tool_calls(request) if is_calls else self._plain(kind, request["text"])
        text = str(grammar)
        mended = text.replace(BOUNDED_CHARACTER, JSON_CHARACTER)
        is_new = must_write or (kind == "json_schema" and mended != text)
        if is_new:
            grammar = self._grammar.from_ebnf(mended)
        if self._compiler is not None:
            self._try(self._compiler.compile_grammar_ebnf(grammar._handle))
        return {"ebnf": mended if is_new else ""}

    def _try(self, compiled: Any) -> None:  # noqa: ANN401 - of xgrammar
        """Matches an output of random tokens."""
        matcher = self._core.GrammarMatcher(compiled, self._eos_token_ids, False, -1, None)
        bits = np.zeros((1, -(-self._vocab_size // 32)), dtype=np.int32)
        choose, began = random.Random(0), time.process_time()
        before = began
        for _ in range(TRIAL_TOKENS):
            matcher.fill_next_token_bitmask(bits, 0, False)
            now = time.process_time()
            if now - before > MASK_SECONDS or now - began > TRIAL_SECONDS:
                raise ValueError("matching it takes too long: ambiguous or nested repeats do")
            before = now
            is_allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._vocab_size]
            if not is_allowed.any():
                raise ValueError("no output can match it")
            is_allowed[self._eos_token_ids] = 0
            (going_on,) = is_allowed.nonzero()
            if not len(going_on) or not matcher.accept_token(int(choose.choice(going_on)), False):
                return

    def _plain(self, kind: str, text: str) -> Any:  # noqa: ANN401 - a Grammar of xgrammar
        if kind == "json_schema":
            if not text:
                return self._grammar.builtin_json_grammar()
            return self._grammar.from_json_schema(text, any_whitespace=False, separators=(",", ":"))
        if kind == "structural_tag":
            tag = msgspec.json.encode(self._compact(_tag_of_today(msgspec.json.decode(text))))
            handle = self._core.Grammar.from_structural_tag(tag.decode())
            return self._grammar._create_from_handle(handle)
        if kind == "regex":
            return self._grammar.from_regex(text)
        return self._grammar.from_ebnf(text)

    def _compact(self, value: Any) -> Any:  # noqa: ANN401 - any JSON
        """A structural tag whose schemas are grammars without free whitespace."""
        match value:
            case {"type": "json_schema", "json_schema": schema, **others} if not others:
                grammar = self._plain("json_schema", msgspec.json.encode(schema).decode())
                return {"type": "grammar", "grammar": str(grammar)}
            case dict():
                return {name: self._compact(one) for name, one in value.items()}
            case list():
                return [self._compact(one) for one in value]
        return value

    def _tool_calls(self, request: dict[str, Any]) -> Any:  # noqa: ANN401 - a Grammar of xgrammar
        """One call, or up to MAX_CALLS, of any of the tools, marks and all; or none of them,
        and what there may be instead; or (`is_free`) any text, in which a trigger begins calls, and
        nothing of `not_in_text` is.
        `number` in a head stands for any number."""
        heads: dict[str, list[str]] = {}  # tools of one schema share its rules
        for head, schema in request["tools"]:
            heads.setdefault(schema, []).append(head)
        calls = []
        for schema, texts in heads.items():
            arguments = self._plain("json_schema", schema)
            spelled = " | ".join(_with_number(text, request["number"]) for text in texts)
            tail = self._grammar.from_ebnf(f"root ::= {ebnf_literal(request['tail'])}")
            head = self._grammar.from_ebnf(f"root ::= {spelled}")
            calls.append(self._grammar.concat(head, arguments, tail))
        one = str(calls[0] if len(calls) == 1 else self._grammar.union(*calls))
        between, end = ebnf_literal(request["between"]), ebnf_literal(request["end"])
        several = "" if request["at_most_one"] else f" ({between} one_call){{0,{MAX_CALLS - 1}}}"
        lines = [_renamed(one, "root", "one_call"), f"all_calls ::= one_call{several} {end}"]
        rules = []
        for position, (trigger, rest) in enumerate(request["begins"]):
            rules.append(f"({ebnf_literal(trigger)}, behind_{position})")
            lines.append(f"behind_{position} ::= {ebnf_literal(rest)} all_calls")
        lines.append(
            f"root ::= TagDispatch({', '.join(rules)}, loop_after_dispatch=false, "
            f"excludes=({', '.join(map(ebnf_literal, request['not_in_text']))}))"
            if request["is_free"]
            else "root ::= behind_0"
        )
        grammar = self._grammar.from_ebnf("\n".join(lines) + "\n")
        instead = request["instead"]
        if instead is None:
            return grammar
        return self._grammar.union(self._plain(instead["kind"], instead["text"]), grammar)


def _tag_of_today(tag: Any) -> Any:  # noqa: ANN401 - any JSON
    """The older form (`structures` and `triggers`), as other engines took it first, in that of
    today."""
    match tag:
        case {"structures": [*structures], "triggers": triggers}:
            tags = [
                {
                    "begin": one["begin"],
                    "content": {"type": "json_schema", "json_schema": one["schema"]},
                    "end": one["end"],
                }
                for one in structures
            ]
            content = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
            return {"type": "structural_tag", "format": content}
    return tag


class _Warnings:
    """What the library says on standard error: it leaves out what it does not support with no
    more than a warning, and the output would not match."""

    def __init__(self) -> None:
        self._file = os.memfd_create("warnings")
        os.dup2(self._file, 2)

    def take(self) -> str:
        """The first warning since the last time, "" if there was none."""
        size = os.lseek(self._file, 0, os.SEEK_CUR)
        text = os.pread(self._file, min(size, 65536), 0).decode("utf-8", "replace")
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        for line in text.splitlines():
            _, found, warning = line.partition("Warning: ")
            if found and not warning.startswith(TOLERATED):
                return warning.strip()[:MAX_ERROR_CHARACTERS]
        return ""


def _with_number(text: str, number: str) -> str:
    """`text` as EBNF, with any digits in the place of `number`."""
    return " [0-9]{1,4} ".join(map(ebnf_literal, text.split(number)))


def _renamed(ebnf: str, old: str, new: str) -> str:
    """The rule `old` under another name; literals and character classes stay as they are."""
    token = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|[A-Za-z_][A-Za-z0-9_]*')
    return token.sub(lambda found: new if found[0] == old else found[0], ebnf)


def _prepare_package() -> None:
    """Makes the modules of xgrammar importable one by one, without what imports torch."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it fails
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("xgrammar is not installed")
    package = ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["xgrammar"] = package
    importlib.import_module("xgrammar.load_binding")


def _shown(error: Exception, kind: str) -> str:
    """The compiler's reason, as far as it is about the grammar."""
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    text = re.sub(r"^\[[0-9:]+\] \S+\.(cc|h):[0-9]+: ", "", str(error).strip())
    # A schema's place in the grammar that the library makes of it says nothing.
    about = text.partition(": ")[2] if kind == "json_schema" and text.startswith("EBNF") else text
    if isinstance(error, ValueError) or TELLING.match(text):
        return about[:MAX_ERROR_CHARACTERS]
    return "it is not valid, or not supported"


def main(arguments: list[str]) -> None:
    die_with_parent()
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    folder = None if arguments[0] == "parse-only" else Path(arguments[0])
    compiler = Compiler(folder, [int(text) for text in arguments[1:]])
    warnings = _Warnings()
    _say({"ready": True})
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line)
        try:
            answer: dict[str, Any] = compiler.answer(request)
            if warning := warnings.take():
                answer = {"error": warning}
        except (RuntimeError, ValueError, TypeError, KeyError, MemoryError) as error:
            warnings.take()
            answer = {"error": _shown(error, request["kind"])}
        _say(answer)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
