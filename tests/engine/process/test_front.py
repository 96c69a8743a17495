"""The front over real processes: fake ranks that behave as told."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from core.token_ids import pack_ids
from engine.link.messages import (
    Abort,
    Ended,
    Finish,
    Produced,
    RankMessage,
    Submit,
    TokenOut,
)
from engine.process.front import StartError, WorkerFront
from engine.process.settings import WorkerSettings
from tests.eventually import eventually

FAKE_RANK = Path(__file__).parents[1] / "fake_rank.py"
SUBMIT = Submit(
    request_id="a",
    num_prompt_tokens=1,
    last_token_id=5,
    output_token_ids=pack_ids([5]),
    sampling=b"",
)

Heard = list[tuple[int, RankMessage]]
MakeFront = Callable[..., Awaitable[tuple[WorkerFront, Heard]]]


def settings_of(tmp_path: Path, **values: object) -> WorkerSettings:
    (tmp_path / "config.json").write_text("{}")
    return WorkerSettings.model_validate({"model": tmp_path, **values})


@pytest.fixture
async def make_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeFront]:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    fronts: list[WorkerFront] = []

    async def make(behaviour: str, **values: object) -> tuple[WorkerFront, Heard]:
        command = (sys.executable, str(FAKE_RANK), behaviour)
        front = WorkerFront(settings_of(tmp_path, **values), "decode", command)
        fronts.append(front)
        heard: Heard = []
        front.on_message = lambda rank, message: heard.append((rank, message))
        return front, heard

    yield make
    for front in fronts:
        pids = [pid for pid in front.pids if pid]
        await front.stop(0)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_ranks_answer_and_leave_when_told(make_front: MakeFront) -> None:
    front, heard = await make_front("serve", ranks=2)
    await front.start()
    assert [ready.rank for ready in front.ready] == [0, 1]
    front.send(1, SUBMIT)
    front.send(0, Abort(request_id="b"))
    await eventually(lambda: len(heard) == 2)
    answers = dict(heard)
    assert answers[0] == Ended(request_id="b")
    assert answers[1] == Produced(
        request_id="a", tokens=(TokenOut(token_id=6),), finish=Finish.STOP
    )
    assert front.stats[1].num_steps >= 1
    pids = front.pids
    async with asyncio.timeout(20):
        await front.stop(5)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not front.died.done()


async def test_a_dead_rank_takes_the_others_with_it(make_front: MakeFront) -> None:
    front, _heard = await make_front("die", ranks=2)
    await front.start()
    pids = front.pids
    front.send(1, SUBMIT)
    reason = await asyncio.wait_for(front.died, 20)
    assert "rank 1" in reason
    assert "signal 9" in reason
    await eventually(lambda: not Path(f"/proc/{pids[0]}/exe").exists())


async def test_a_rank_that_stands_still_may_go_on(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.process.front.LOOK_SECONDS", 0.05)
    front, heard = await make_front("serve", ranks=2, stall_seconds=3)
    reasons: list[str] = []
    front.on_stall = reasons.append
    await front.start()
    assert front.is_well
    os.kill(front.pids[1], signal.SIGSTOP)
    front.send(1, SUBMIT)
    await eventually(lambda: not front.is_well)
    assert front.stalled == {1}
    assert front.quiet_seconds[1] > 3 > front.quiet_seconds[0]
    os.kill(front.pids[1], signal.SIGCONT)
    await eventually(lambda: front.is_well)
    assert reasons == ["ranks [1] have ended no step for 3 s"]
    # What it was told meanwhile is not lost: its requests can be aborted.
    await eventually(lambda: [rank for rank, _ in heard] == [1])
    assert not front.died.done()


async def test_a_rank_that_hangs_is_ended(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also alone, where no other rank waits for it; not while its front has not listened."""
    monkeypatch.setattr("engine.process.front.LOOK_SECONDS", 0.1)
    front, _heard = await make_front("serve", step_timeout_seconds=1, stall_seconds=2)
    await front.start()
    await asyncio.sleep(3.5)
    time.sleep(3.5)  # noqa: ASYNC251 - the front, held up
    await asyncio.sleep(0.5)
    assert not front.died.done()
    os.kill(front.pids[0], signal.SIGSTOP)
    reason = await asyncio.wait_for(front.died, 20)
    assert "it has ended no step for 3 s" in reason


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("crash", "rank 0 .* status 7"),
        ("fail", "rank 0 .* status 1: no such model"),
        ("disagree", "disagree on kv_fingerprint"),
        ("hang", "not ready after 1.5 s"),
    ],
)
async def test_a_start_that_fails_says_why(
    make_front: MakeFront, behaviour: str, reason: str
) -> None:
    ranks = 2 if behaviour == "disagree" else 1
    front, _heard = await make_front(
        behaviour, ranks=ranks, start_timeout_seconds=1.5 if behaviour == "hang" else 30
    )
    with capture_logs() as lines, pytest.raises(StartError, match=reason):
        await front.start()
    # Of ranks that never come as far as a log of their own, this line is all there is.
    begun = [line for line in lines if line["event"] == "start phase begins"]
    assert [(line["phase"], line["rank"]) for line in begun] == [
        ("python", rank) for rank in range(ranks)
    ]
    assert tuple(line["pid"] for line in begun) == front.pids


async def test_a_rank_that_ignores_the_end_is_killed(make_front: MakeFront) -> None:
    front, _heard = await make_front("stay")
    await front.start()
    async with asyncio.timeout(20):
        await front.stop(0.2)


async def test_a_rank_that_sends_garbage_is_given_up(make_front: MakeFront) -> None:
    front, heard = await make_front("garbage")
    await front.start()
    front.send(0, SUBMIT)
    reason = await asyncio.wait_for(front.died, 20)
    assert "malformed" in reason
    assert heard == []


async def test_a_message_that_cannot_be_handled_ends_the_worker(make_front: MakeFront) -> None:
    front, _heard = await make_front("serve")

    def stumble(rank: int, message: RankMessage) -> None:
        raise KeyError("books")

    front.on_message = stumble
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, error: errors.append(error))
    await front.start()
    front.send(0, SUBMIT)
    reason = await asyncio.wait_for(front.died, 20)
    assert "Produced cannot be handled: KeyError('books')" in reason
    assert len(errors) == 1


async def test_a_program_that_is_not_there_is_a_start_error(
    make_front: MakeFront, tmp_path: Path
) -> None:
    front = WorkerFront(settings_of(tmp_path), "decode", ("/no/such/program",))
    with pytest.raises(StartError, match="rank 0 cannot be started"):
        await front.start()
    await front.stop(0)
