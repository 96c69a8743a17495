"""What workers are asked to keep to, and the process that compiles it first."""

import asyncio
import json
import os
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import pytest

import demo_model
from core.clock import ManualClock
from core.errors import InvalidRequest, RateLimited, Unavailable
from gateway.formats.deepseek_v3 import DEEPSEEK_V3
from gateway.formats.deepseek_v31 import CALLS_BEGIN, CALLS_END
from gateway.grammar import fair_turns, grammar_compiler
from gateway.grammar.fair_turns import FairTurns
from gateway.grammar.grammar_compiler import GrammarCompiler
from gateway.grammar.grammar_request import calls_request
from gateway.grammar.lark import HEADER
from gateway.grammar.lark_terms import SCHEMA_OPTIONS
from tests.eventually import eventually
from tests.gateway.conftest import MODEL, Gateway, v3_call
from tests.gateway.model_folder import EOS_ID, make_model_folder
from tests.larks import accepts, regex

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {
    "$defs": {"Step": {"type": "object", "properties": {"n": {"type": "integer"}},
                       "required": ["n"], "additionalProperties": False}},
    "type": "object",
    "properties": {"steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}},
                   "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Note"}},
    "required": ["steps"],
}  # fmt: skip
COMPACT = json.dumps({"x-guidance": SCHEMA_OPTIONS})[1:]
CLOSED = json.dumps(SCHEMA)[:-1] + ', "additionalProperties": false, ' + COMPACT
CASES: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, f'%json {{"type": "object", {COMPACT}'),
    ({"response_format": {"type": "json_schema",
                          "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
     f"%json {CLOSED}"),
    ({"guided_json": SCHEMA}, f"%json {CLOSED}"),
    ({"guided_json": '{"type": "integer"}'}, f'%json {{"type": "integer", {COMPACT}'),
    ({"guided_regex": "^[0-9]{3}$"}, "/[0-9]{3}/"),
    ({"guided_grammar": 'root ::= "a" | "b"'}, 'START_0\nSTART_0: ("a") | ("b")'),
    ({"guided_choice": ["yes", 'n"ö']}, 'START\nSTART: "yes" | "n\\"\\u00f6"'),
]  # fmt: skip


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(("fields", "start"), CASES)
async def test_what_workers_are_asked(
    gateway: Gateway, endpoint: str, fields: dict[str, Any], start: str
) -> None:
    reply = await getattr(gateway, endpoint)("plain", **fields)
    assert reply.status_code == 200, reply.text
    (request,) = gateway.cluster.first.requests
    grammar = request.sampling.grammar
    start, *rules = start.splitlines()
    assert grammar.lark == "\n".join([HEADER, *rules, f"start: {start}", ""])
    assert not grammar.HasField("after_token_id")


@pytest.mark.parametrize("kind", ["string", ["string", "null"]])
async def test_bounded_strings_are_json(gateway: Gateway, model_folder: Path, kind: Any) -> None:
    schema = {"type": "object", "required": ["a"],
              "properties": {"a": {"type": kind, "minLength": 2, "maxLength": 4}}}  # fmt: skip
    await gateway.chat("plain", guided_json=schema)
    lark = gateway.cluster.first.requests[0].sampling.grammar.lark
    for text, expected in (("ab", True), ("日本🙂é", True), ("a", False), ("abcde", False),
                           ("a\tb", False), ("a\x01", False), ('a"', False)):  # fmt: skip
        assert accepts(model_folder, lark, f'{{"a":"{text}"}}') == expected


async def test_text_is_no_constraint(gateway: Gateway) -> None:
    await gateway.chat("plain", response_format={"type": "text"})
    assert not gateway.cluster.first.requests[0].sampling.HasField("grammar")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model")


REGEX = {"kind": "regex", "text": "[0-9]+"}
REGEX_LARK = regex("[0-9]+")


def process_of(compiler: GrammarCompiler) -> Process:
    """The one that compiles while nobody is slow."""
    process = compiler._idle[-1].process
    assert process is not None
    return process


async def test_a_warm_compiler_waits_for_its_first_request(folder: Path) -> None:
    compiler = GrammarCompiler(folder, (EOS_ID,))
    try:
        await compiler.warm()
        pid = process_of(compiler).pid
        await compiler.compile(REGEX, param="guided_regex")
        assert process_of(compiler).pid == pid
    finally:
        await compiler.close()


async def test_a_compiler_that_cannot_be_started_is_unavailable(folder: Path) -> None:
    compiler = GrammarCompiler(folder, (EOS_ID,))
    for helper in (*compiler._helpers, compiler._parser):
        helper.command = ["/no/such/program"]
    await compiler.warm()  # nobody asked for it yet
    with pytest.raises(Unavailable):
        await compiler.compile(REGEX, param="guided_regex")
    await compiler.close()


async def test_forced_calls_are_bounded(folder: Path) -> None:
    compiler = GrammarCompiler(folder, (EOS_ID,))
    try:
        tools = [("now", '{"type":"object","properties":{}}')]
        request = calls_request(DEEPSEEK_V3, tools, at_most_one=False)
        lark = await compiler.compile(request, param="tools")
    finally:
        await compiler.close()
    for num_calls, expected in ((0, False), (1, True), (2, True), (16, True), (17, False)):
        calls = "\n".join([v3_call("now", "{}")] * num_calls)
        assert accepts(folder, lark, CALLS_BEGIN + calls + CALLS_END) == expected


async def test_a_stuck_compiler_is_killed_and_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "FAILURE_SECONDS", 0.0)
    compiler = GrammarCompiler(folder, (EOS_ID,))
    patient = compiler._compile_seconds
    try:
        await compiler.compile(REGEX, param="guided_regex")
        pid = process_of(compiler).pid
        os.kill(pid, 19)  # SIGSTOP: it answers no more
        compiler._compile_seconds = 0.5
        with pytest.raises(InvalidRequest, match=r"more than 0\.5 seconds"):
            await compiler.compile(REGEX | {"text": "a"}, param="guided_regex")
        compiler._compile_seconds = patient
        await compiler.compile(REGEX | {"text": "b"}, param="guided_regex")
        assert process_of(compiler).pid != pid
        await compiler.compile(REGEX | {"text": "a"}, param="guided_regex")
    finally:
        await compiler.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_compiler_that_dies_is_replaced(folder: Path) -> None:
    compiler = GrammarCompiler(folder, (EOS_ID,))
    try:
        await compiler.compile(REGEX, param="guided_regex")
        process_of(compiler).kill()
        await process_of(compiler).wait()
        await compiler.compile(REGEX | {"text": "a"}, param="guided_regex")
    finally:
        await compiler.close()


async def test_a_client_that_leaves_takes_no_answer_along(folder: Path) -> None:
    compiler = GrammarCompiler(folder, (EOS_ID,))
    try:
        leaving = asyncio.create_task(
            compiler.compile({"kind": "regex", "text": "a("}, param="guided_regex")
        )
        await asyncio.sleep(0)
        leaving.cancel()
        await compiler.compile(REGEX, param="guided_regex")
        with pytest.raises(InvalidRequest, match="unclosed group"):
            await compiler.compile({"kind": "regex", "text": "b("}, param="guided_regex")
    finally:
        await compiler.close()


async def test_verdicts_are_remembered(folder: Path) -> None:
    compiler = GrammarCompiler(folder, (EOS_ID,))
    await compiler.compile(REGEX, param="guided_regex")
    await compiler.close()
    assert compiler._idle[-1].process is None
    assert await compiler.compile(REGEX, param="guided_regex") == REGEX_LARK
    assert compiler._idle[-1].process is None


async def test_large_verdicts_are_not_all_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a grammar of calls becomes is many times as long as its request."""
    compiler = GrammarCompiler(folder, (EOS_ID,))
    requests = [calls_request(DEEPSEEK_V3, [(name, "{}")], at_most_one=True) for name in "abc"]
    try:
        first = await compiler.compile(requests[0], param="tools")
        monkeypatch.setattr(grammar_compiler, "MAX_VERDICT_CHARACTERS", 5 * len(first) // 2)
        for request in requests:
            await compiler.compile(request, param="tools")
        assert len(compiler._verdicts) == 2
    finally:
        await compiler.close()


async def test_a_verdict_is_remembered_that_nobody_waited_for(folder: Path) -> None:
    """Who gave up finds it when they try again."""
    compiler = GrammarCompiler(folder, (EOS_ID,))
    try:
        asked = asyncio.create_task(compiler.compile(REGEX, param="guided_regex"))
        await asyncio.sleep(0)
        (task,) = compiler._tasks.values()
        asked.cancel()
        await task
    finally:
        await compiler.close()
    assert await compiler.compile(REGEX, param="guided_regex") == REGEX_LARK
    assert compiler._idle[-1].process is None


async def test_who_wants_the_same_waits_for_one_answer(folder: Path) -> None:
    """A grammar that is new to this gateway comes with all the requests of a batch at once."""
    compiler = GrammarCompiler(folder, (EOS_ID,))
    num_requests = 2 * fair_turns.MAX_WAITING
    try:
        asked = [compiler.compile(REGEX, param="guided_regex") for _ in range(num_requests)]
        assert await asyncio.gather(*asked) == [REGEX_LARK] * num_requests
    finally:
        await compiler.close()


def is_compiler(command: bytes) -> bool:
    return b"gateway.grammar.grammar_process" in command and b"parse-only" not in command


def compiler_pids() -> list[int]:
    """Of the one gateway that runs in this process."""
    lists = (path.read_text().split() for path in Path("/proc/self/task").glob("*/children"))
    return [
        int(child)
        for children in lists
        for child in children
        if is_compiler(Path(f"/proc/{child}/cmdline").read_bytes())
    ]


async def test_a_request_waits_for_its_grammar_until_its_deadline(gateway: Gateway) -> None:
    assert (await gateway.chat("plain", guided_regex="[a-c]+")).status_code == 200
    pids = compiler_pids()
    assert pids
    for pid in pids:
        os.kill(pid, 19)  # SIGSTOP: as one that is busy with others' grammars
    try:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "plain"}],
                "guided_regex": "[a-d]+"}  # fmt: skip
        reply = await gateway.client.post(
            "/v1/chat/completions", json=body, headers={"x-request-timeout": "0.3"}
        )
    finally:
        for pid in pids:
            os.kill(pid, 18)  # SIGCONT
    assert reply.status_code == 504, reply.text
    assert (await gateway.chat("plain", guided_regex="[a-d]+")).status_code == 200


async def test_large_grammars_are_refused(folder: Path) -> None:
    compiler = GrammarCompiler(folder, (EOS_ID,))
    with pytest.raises(InvalidRequest, match="larger"):
        await compiler.compile(REGEX | {"text": "a" * 2**19}, param="guided_regex")
    assert compiler._idle[-1].process is None


async def test_the_helper_needs_no_torch(folder: Path) -> None:
    compiler = GrammarCompiler(folder, (EOS_ID,))
    try:
        await compiler.compile(REGEX, param="guided_regex")
        maps = Path(f"/proc/{process_of(compiler).pid}/maps").read_text()
        assert "llguidance" in maps
        assert "libtorch" not in maps
    finally:
        await compiler.close()


CHECKPOINT = Path(demo_model.__file__).parent / "checkpoint"
SLOW = "(.{1,300}){1,300}"


async def test_who_is_slow_keeps_nobody_else_waiting(folder: Path) -> None:
    compiler = GrammarCompiler(folder, (EOS_ID,), compile_seconds=60)
    try:
        await compiler.compile(REGEX, param="guided_regex", client="honest")
        os.kill(process_of(compiler).pid, 19)  # SIGSTOP: as one that compiles for long
        slow = [
            asyncio.create_task(
                compiler.compile(REGEX | {"text": f"a{n}"}, param="guided_regex", client="slow")
            )
            for n in range(5)
        ]
        await eventually(lambda: len(compiler._idle) == 1)
        for client in ("honest", "other"):
            request = {"kind": "json_schema", "text": f'{{"title":"{client}"}}'}
            await compiler.compile(request, param="guided_json", client=client)
        with pytest.raises(InvalidRequest, match="unclosed group"):
            await compiler.compile(REGEX | {"text": "(a"}, param="guided_regex", client="slow")
        await compiler.compile(REGEX, param="guided_regex", client="slow")  # known already
        assert not any(task.done() for task in slow)
    finally:
        await compiler.close()


async def test_who_was_slow_in_vain_is_told_to_come_later() -> None:
    clock = ManualClock()
    turns = FairTurns(2, clock)
    async with turns.of("busy"):
        clock.advance(fair_turns.MAX_SECONDS + 1)
    turns.blame("slow", fair_turns.MAX_SECONDS + 1)
    with pytest.raises(RateLimited) as caught:
        turns.check("slow")
    assert caught.value.retry_after_seconds == pytest.approx(1 / fair_turns.REFILL)
    turns.check("busy")
    clock.advance(caught.value.retry_after_seconds)
    turns.check("slow")


async def test_who_used_least_goes_first_and_who_left_not_at_all() -> None:
    clock, order = ManualClock(), []
    turns = FairTurns(1, clock)

    async def take(client: str, seconds: float) -> None:
        async with turns.of(client):
            order.append(client)
            clock.advance(seconds)
            await asyncio.sleep(0)

    async with turns.of("first"):
        tasks = [asyncio.create_task(take(client, 2.0)) for client in "aaabbc"]
        gone = asyncio.create_task(take("gone", 1.0))
        await asyncio.sleep(0)
        gone.cancel()
    await asyncio.gather(*tasks)
    assert "".join(order) == "abcaba"
    assert turns._num_free == 1


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", SLOW),
        ("regex", "(?:[a-z ]{1,90}){1,90}!"),
        ("ebnf", "root ::= s\ns ::= s s | s s s | [a-z ]*"),
    ],
)
async def test_what_is_slow_to_match_is_refused(kind: str, text: str) -> None:
    compiler = GrammarCompiler(CHECKPOINT, (1,))
    try:
        with pytest.raises(InvalidRequest, match="too long"):
            await compiler.compile({"kind": kind, "text": text}, param="p")
    finally:
        await compiler.close()


async def test_marks_that_a_grammar_names(folder: Path) -> None:
    """Are tokens where they show; special ones are none of a user's business."""
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text())
    last = max(*(one["id"] for one in fields["added_tokens"]), *fields["model"]["vocab"].values())
    fields["added_tokens"].append(
        {"id": last + 1, "content": "<|special|>", "special": True, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
    )  # fmt: skip
    path.write_text(json.dumps(fields))
    compiler = GrammarCompiler(folder, (EOS_ID,))
    try:
        for mark, is_token in (("<think>", True), ("<|special|>", False)):
            request = {"kind": "ebnf", "text": f'root ::= "{mark}" [a-z]+ "{mark}"'}
            lark = await compiler.compile(request, param="guided_grammar")
            assert accepts(folder, lark, f"{mark}ab{mark}") == is_token
        with pytest.raises(InvalidRequest, match="no output"):
            await compiler.compile({"kind": "ebnf", "text": "root ::= root"}, param="p")
    finally:
        await compiler.close()
