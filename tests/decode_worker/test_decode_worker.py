"""A real decode worker: front, two rank processes, expert parallelism, NIXL. The test plays the
prefill worker, and says to which rank each request goes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.link.messages import (
    Finish,
    PrefillStopped,
    Produced,
    Quarantined,
    RankMessage,
    Reserved,
    Submit,
)
from engine.process.front import WorkerFront
from engine.process.settings import WorkerSettings
from engine.sampling.sampling_params import Sampling
from tests.decode_worker.one_rank import PAGE_TOKENS, FakePrefill, reference_tokens
from tests.eventually import eventually
from tests.packed_sampling import packed
from tests.tiny_checkpoint import make_tiny_checkpoint
from transfer.nixl_agent import NixlTransfer

NUM_PAGES = 24
PROMPTS = [[(11 * n + 5 * j) % 250 + 5 for j in range(10 + 6 * n)] for n in range(6)]
NUM_TOKENS = 20


class Worker:
    """The front of two ranks, and prefill behind it."""

    def __init__(self, front: WorkerFront, prefill: FakePrefill) -> None:
        self.front = front
        self.prefill = prefill
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.over: dict[str, asyncio.Event] = {}
        self.sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
        front.on_message = self._hear

    async def generate(self, name: str, rank: int, prompt: list[int]) -> list[int]:
        self.tokens[name], self.over[name] = [], asyncio.Event()
        self.prompts[name] = prompt
        submit = Submit(
            request_id=name,
            num_prompt_tokens=len(prompt),
            last_token_id=prompt[-1],
            sampling=packed(self.sampling),
        )
        self.front.send(rank, submit)
        await asyncio.wait_for(self.over[name].wait(), 20)
        return self.tokens[name]

    async def all_free(self) -> None:
        await eventually(lambda: all(stats.pages_free == NUM_PAGES for stats in self.front.stats))

    def _hear(self, rank: int, message: RankMessage) -> None:
        match message:
            case Reserved():
                name = message.request_id
                answer = self.prefill.answer(
                    message, self.prompts[name], self.tokens[name], self.sampling
                )
                self.front.send(rank, answer)
            case Produced():
                self.tokens[message.request_id] += [token.token_id for token in message.tokens]
                if message.finish is not Finish.NONE:
                    self.over[message.request_id].set()
            case Quarantined():
                self.front.send(rank, PrefillStopped(attempt_id=message.attempt_id))
            case _:
                raise AssertionError(message)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def worker(folder: Path) -> AsyncIterator[Worker]:
    settings = WorkerSettings.model_validate(
        {
            "model": folder,
            "ranks": 2,
            "threads": 1,
            "page_tokens": PAGE_TOKENS,
            "kv_pages": NUM_PAGES,
            "start_timeout_seconds": 240,
        }
    )
    front = WorkerFront(settings, "decode")
    transfer = NixlTransfer(f"test-{front.epoch}")
    polling = asyncio.create_task(poll(transfer))
    try:
        await front.start()
        yield Worker(front, FakePrefill(folder, transfer))
    finally:
        await front.stop(5)
        polling.cancel()
        transfer.close()


async def poll(transfer: NixlTransfer) -> None:
    """Bytes leave the sender only while it looks after them."""
    while True:
        transfer.poll()
        await asyncio.sleep(0.001)


async def test_two_ranks_one_of_them_idle_or_both_at_work(worker: Worker, folder: Path) -> None:
    expected = [reference_tokens(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]
    # Rank 1 has nothing to do but takes part in every step.
    assert await worker.generate("a", 0, PROMPTS[0]) == expected[0]
    await worker.all_free()
    steps = [stats.num_steps for stats in worker.front.stats]
    assert steps[0] == NUM_TOKENS - 1
    assert await worker.generate("b", 1, PROMPTS[1]) == expected[1]
    # Both, with work that begins and ends at odd times, and pages that run out.
    calls = [
        worker.generate(f"c{number}-{rank}", rank, prompt)
        for number, prompt in enumerate(PROMPTS)
        for rank in ((0, 1) if number % 2 else (1,))
    ]
    both = [n for n in range(len(PROMPTS)) for _ in range(2 if n % 2 else 1)]
    assert await asyncio.gather(*calls) == [expected[number] for number in both]
    await worker.all_free()
    assert all(stats.num_running == 0 for stats in worker.front.stats)
    assert not worker.front.died.done()


async def test_a_rank_killed_in_a_step_ends_the_worker(worker: Worker) -> None:
    call = asyncio.create_task(worker.generate("a", 0, PROMPTS[5]))
    await eventually(lambda: worker.tokens.get("a"))
    pids = worker.front.pids
    os.kill(pids[1], signal.SIGKILL)
    reason = await asyncio.wait_for(worker.front.died, 20)
    assert "rank 1" in reason
    assert "signal 9" in reason
    call.cancel()
    await eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))
