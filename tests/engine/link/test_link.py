"""Front and rank ends of a link, in one process over real ipc sockets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from core.token_ids import pack_ids
from engine.link import link
from engine.link.link import FrontLink, LinkError, RankLink
from engine.link.messages import (
    Abort,
    Ended,
    Produced,
    RankBatch,
    RankStats,
    Shutdown,
    Submit,
    TokenOut,
)


class Pair:
    """Both ends, and what the front has heard."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoint = f"ipc://{folder}/rank0"
        self.batches: asyncio.Queue[RankBatch] = asyncio.Queue()
        self.errors: asyncio.Queue[LinkError] = asyncio.Queue()
        self.front = FrontLink(
            self.context, endpoint, self.batches.put_nowait, self.errors.put_nowait
        )
        self.rank = RankLink(endpoint, rank=3)

    async def connect(self) -> None:
        self.rank.send([], RankStats())
        await asyncio.wait_for(self.batches.get(), 20)

    def close(self) -> None:
        self.front.close()
        self.rank.close()
        self.context.destroy(linger=0)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    both = Pair(tmp_path)
    await both.connect()
    yield both
    both.close()


async def drained(pair: Pair) -> list[object]:
    """What the rank has got, once there is something."""
    poller = zmq.Poller()
    poller.register(pair.rank.socket, zmq.POLLIN)
    for _ in range(4000):
        if poller.poll(0):
            return list(pair.rank.drain())
        await asyncio.sleep(0.005)
    raise TimeoutError("nothing arrived at the rank")


async def test_messages_of_one_turn_leave_as_one_batch_in_order(pair: Pair) -> None:
    submit = Submit(
        request_id="a",
        num_prompt_tokens=3,
        last_token_id=2,
        output_token_ids=pack_ids([1, 2]),
        sampling=b"\x18\x05",
    )
    pair.front.send(submit)
    pair.front.send(Abort(request_id="a"))
    pair.front.send(Shutdown())
    assert await drained(pair) == [submit, Abort(request_id="a"), Shutdown()]
    assert pair.rank.drain() == []


async def test_what_is_sent_before_the_rank_is_there_waits_for_it(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.front.send(Shutdown())
    assert pair.rank.drain() == []
    await pair.connect()
    assert await drained(pair) == [Shutdown()]
    pair.close()


async def test_every_batch_reaches_the_front_also_under_crossing_traffic(pair: Pair) -> None:
    async def from_front() -> None:
        for _ in range(300):
            pair.front.send(Shutdown())
            await asyncio.sleep(0)

    sender = asyncio.create_task(from_front())
    tokens = []
    heard = 0
    for number in range(300):
        produced = Produced(request_id="a", tokens=(TokenOut(token_id=number),))
        pair.rank.send([produced], RankStats(num_steps=number))
        batch = await asyncio.wait_for(pair.batches.get(), 20)
        assert batch.rank == 3
        assert batch.stats.num_steps == number
        (message,) = batch.messages
        assert isinstance(message, Produced)
        tokens.append(message.tokens[0].token_id)
        heard += len(pair.rank.drain())
    await sender
    while heard < 300:
        heard += len(await drained(pair))
    assert tokens == list(range(300))


async def test_garbage_from_the_rank_closes_the_link_once(pair: Pair) -> None:
    pair.rank.socket.send(b"\x81\xa4type")
    pair.rank.send([Ended(request_id="a")], RankStats())
    error = await asyncio.wait_for(pair.errors.get(), 20)
    assert "malformed" in str(error)
    assert pair.front._closed  # so that nothing comes any more
    assert pair.batches.empty()
    assert pair.errors.empty()
    pair.front.send(Shutdown())  # after the end: dropped, not an error


async def test_a_message_of_the_wrong_side_is_refused(pair: Pair) -> None:
    pair.front._socket.send(b"\x81\xa8messages\x91\x82\xa4type\xa5Ended\xaarequest_id\xa1a")
    with pytest.raises(LinkError, match="malformed"):
        await drained(pair)


async def test_a_rank_that_does_not_read_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HIGH_WATER_BATCHES", 4)
    pair = Pair(tmp_path)
    await pair.connect()
    for _ in range(5000):
        pair.front.send(Shutdown())
        await asyncio.sleep(0)
        if not pair.errors.empty():
            break
    assert "unread" in str(pair.errors.get_nowait())
    pair.close()


async def test_a_front_that_does_not_read_stops_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HIGH_WATER_BATCHES", 4)
    monkeypatch.setattr(link, "SEND_TIMEOUT_SECONDS", 0.05)
    pair = Pair(tmp_path)

    def flood() -> None:
        for _ in range(5000):
            pair.rank.send([], RankStats())

    with pytest.raises(LinkError, match="does not read"):
        flood()  # the loop does not turn meanwhile, so that the front cannot read
    pair.close()
