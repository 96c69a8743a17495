"""A decode rank's real loop in a thread, between a front and a prefill worker that the test
plays: real model, pool, sampler, link and transfer protocol; memory instead of NIXL."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
import zmq
from transformers import DeepseekV3ForCausalLM

from core.clock import SystemClock
from core.token_ids import pack_ids
from decode_worker.loop import DecodeLoop
from engine.grammar.grammar_match import GrammarCompiler
from engine.grammar.paced_match import PacedMatch, match_threads
from engine.kv.kv_memory import KvPlan
from engine.kv.pages import PagePool, pages_of
from engine.link.kv_notice import KvNotice, encode_notices
from engine.link.link import RankLink
from engine.link.messages import (
    Abort,
    ExpertReport,
    ExpertsMoved,
    ExpertsMoving,
    Failed,
    Finish,
    FrontBatch,
    FrontMessage,
    Prefilled,
    PrefillStopped,
    Produced,
    Quarantined,
    RankBatch,
    RankMessage,
    RankStats,
    Reserved,
    Shutdown,
    Submit,
)
from engine.process.rank_start import RankStart
from engine.process.settings import WorkerSettings
from engine.sampling.history import history_of
from engine.sampling.sampler import SampleRow
from engine.sampling.sampling_params import Sampling
from engine.sampling.sequence_end import suppressed_token_ids
from engine.start.rank import RankContext
from engine.start.rank_model import speculating
from engine.step.runner import Runner, SequenceChunk
from ep.group.group import EpGroup
from model.batch import AttentionForm
from model.config import ModelConfig, MtpUse
from model.deepseek import DeepseekV3
from tests.packed_sampling import packed
from tests.transfer.memory import MemoryTransfer
from transfer.api import AgentDescriptor, Copy, Transfer

PAGE_TOKENS = 8
_NAMES = itertools.count()


def load_model(folder: Path, mtp: MtpUse = "none") -> DeepseekV3:
    config = replace(ModelConfig.from_folder(folder), mtp=mtp)
    return DeepseekV3.load(folder, device="cpu", dtype=torch.float32, config=config)


def make_cache(model: DeepseekV3, num_pages: int) -> torch.Tensor:
    return torch.zeros(model.num_kv_layers, num_pages, PAGE_TOKENS, model.config.kv_dim)


def reference_tokens(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers answers, greedily and past any end of sequence."""
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=num_tokens, do_sample=False
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


class FakePrefill:
    """Computes a prompt's KV with a model of its own and writes it into the target."""

    def __init__(
        self, folder: Path, transfer: Transfer, num_pages: int = 64, mtp: MtpUse = "none"
    ) -> None:
        config = ModelConfig.from_folder(folder)
        model = load_model(folder, mtp)
        self.kv_cache = make_cache(model, num_pages)
        self.transfer = transfer
        transfer.register(self.kv_cache)
        self._runner = Runner(model, self.kv_cache, AttentionForm.PLAIN)
        self._eos_token_ids = config.eos_token_ids
        self._threads = match_threads()
        self._compiler = GrammarCompiler(folder, config.vocab_size, config.eos_token_ids)

    def answer(
        self, reserved: Reserved, prompt: list[int], output: list[int], sampling: Sampling
    ) -> Prefilled:
        """Fills the target, one transfer a layer, and returns the first token."""
        token_ids = prompt + output
        num_tokens = len(token_ids)
        history = history_of(sampling, prompt, output)
        if history is not None and sampling.grammar is not None:
            match = self._compiler.match(sampling.grammar, sampling.stop_token_ids)
            paced = PacedMatch(match, output, self._threads, SystemClock())
            assert paced.job is not None
            paced.job.result()
            assert paced.is_ready
            history.attach(paced)
        pages = list(range(-(-num_tokens // PAGE_TOKENS)))
        chunk = SequenceChunk(
            token_ids=token_ids,
            start=0,
            pages=pages,
            sample=SampleRow(
                sampling=sampling,
                position=num_tokens,
                suppressed=suppressed_token_ids(
                    num_tokens=num_tokens,
                    num_prompt_tokens=len(prompt),
                    sampling=sampling,
                    eos_token_ids=self._eos_token_ids,
                ),
                history=history,
            ),
        )
        (token,) = self._runner.step([chunk], (num_tokens,))
        assert token is not None
        self.write(reserved, pages)
        return Prefilled(
            request_id=reserved.request_id,
            attempt_id=reserved.attempt_id,
            token=token,
            num_cached_tokens=0,
            num_computed_tokens=num_tokens,
            kv_bytes=len(pages) * self._page_bytes * self.kv_cache.shape[0],
            queue_seconds=0.0,
            compute_seconds=0.0,
            transfer_seconds=0.001,
        )

    def write(self, reserved: Reserved, pages: list[int]) -> None:
        peer = msgspec.msgpack.decode(reserved.target.agent, type=AgentDescriptor)
        targets = pages_of(reserved.target.runs)
        assert len(targets) == len(pages)
        num_layers, num_pages = self.kv_cache.shape[:2]
        peer_pages = peer.num_bytes // self._page_bytes // num_layers
        for layer in range(num_layers):
            copies = [
                Copy(
                    (layer * num_pages + source) * self._page_bytes,
                    (layer * peer_pages + target) * self._page_bytes,
                    self._page_bytes,
                )
                for source, target in zip(pages, targets, strict=True)
            ]
            notice = KvNotice(reserved.attempt_id, layer, 1, 0, len(pages))
            self.transfer.submit(peer, copies, encode_notices([notice]))

    @property
    def _page_bytes(self) -> int:
        return self.kv_cache[0, 0].numel() * self.kv_cache.element_size()


@dataclass
class Answer:
    """What a request has got."""

    prompt: list[int]
    earlier: list[int]  # output of another attempt
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = Finish.NONE
    num_attempts: int = 0
    over: bool = False


class OneRank:
    """Plays the front: submits, has prefills answered, collects tokens."""

    def __init__(
        self, link: "zmq.Socket[bytes]", prefill: FakePrefill, looks_up: bool = False
    ) -> None:
        self.prefill = prefill
        self.looks_up = looks_up
        self.answers: dict[str, Answer] = {}
        self.stats = RankStats()
        self.heard: list[RankMessage] = []
        self.quarantined: list[str] = []
        # Whether the prefill worker answers a Reserved by itself.
        self.answering = True
        self._link = link
        self._decoder = msgspec.msgpack.Decoder(RankBatch)

    def send(self, *messages: FrontMessage) -> None:
        self._link.send(msgspec.msgpack.encode(FrontBatch(messages=messages)))

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        priority: int = 0,
        **sampling: object,
    ) -> Answer:
        values = {"max_tokens": 16, "ignore_eos": True, **sampling}
        answer = Answer([*prompt], [*output], msgspec.convert(values, Sampling))
        self.answers[name] = answer
        sees_prompt = self.looks_up or answer.sampling.repetition_penalty != 1
        self.send(
            Submit(
                request_id=name,
                num_prompt_tokens=len(prompt),
                last_token_id=[*prompt, *output][-1],
                prompt_token_ids=pack_ids(prompt) if sees_prompt else b"",
                output_token_ids=pack_ids(output),
                sampling=packed(answer.sampling),
                priority=priority,
            )
        )
        return answer

    def prefilled(self, reserved: Reserved) -> Prefilled:
        """The prefill worker's answer to a Reserved."""
        answer = self.answers[reserved.request_id]
        output = answer.earlier + answer.tokens
        return self.prefill.answer(reserved, answer.prompt, output, answer.sampling)

    def hear(self, seconds: float) -> bool:
        """Takes in one batch of the rank, if one comes in time."""
        if not self._link.poll(int(seconds * 1000)):
            return False
        batch = self._decoder.decode(self._link.recv())
        self.stats = batch.stats
        for message in batch.messages:
            self.heard.append(message)
            self._take(message)
        return True

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "nothing more came"
            self.hear(0.05)

    def run(self, seconds: float = 20.0) -> None:
        """Until every request is over."""
        self.until(lambda: all(answer.over for answer in self.answers.values()), seconds)

    def release(self) -> None:
        """Every quarantined prefill is confirmed to have stopped."""
        self.send(*(PrefillStopped(attempt_id=name) for name in self.quarantined))
        self.quarantined.clear()

    def until_free(self, num_pages: int) -> None:
        """All pages are free again; the last statistics may take a second to come."""
        self.release()
        self.until(lambda: self.stats.pages_free == num_pages)

    def abort(self, name: str) -> None:
        self.send(Abort(request_id=name))

    def _take(self, message: RankMessage) -> None:
        match message:
            case Reserved():
                answer = self.answers[message.request_id]
                answer.num_attempts += 1
                if self.answering and not answer.over:
                    self.send(self.prefilled(message))
            case Produced():
                answer = self.answers[message.request_id]
                answer.tokens += [token.token_id for token in message.tokens]
                answer.logprobs += [token.logprob for token in message.tokens]
                answer.finish = message.finish
                answer.over = message.finish is not Finish.NONE
            case Quarantined():
                self.quarantined.append(message.attempt_id)
            case Failed():
                self.answers[message.request_id].over = True
            case ExpertReport() | ExpertsMoving() | ExpertsMoved():
                """In `heard`."""
            case _:
                self.answers[message.request_id].over = True


@contextmanager
def one_rank(
    folder: Path, run_dir: Path, *, num_pages: int = 64, max_running: int = 8, **values: object
) -> Iterator[OneRank]:
    """Stops the loop with Shutdown at the end, and checks that it has left in good order."""
    number = next(_NAMES)
    endpoint = f"ipc://{run_dir}/rank{number}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front = context.socket(zmq.PAIR)
    front.bind(endpoint)
    settings = WorkerSettings.model_validate(
        {"model": folder, "page_tokens": PAGE_TOKENS, "max_running": max_running, **values}
    )
    model = load_model(folder, "whole" if settings.drafts_by_mtp else "none")
    kv_cache = make_cache(model, num_pages)
    transfer = MemoryTransfer(f"decode-{number}")
    transfer.register(kv_cache)
    group = EpGroup.create(
        rank=0, size=1, rendezvous="", device=torch.device("cpu"), timeout_seconds=5
    )
    rank = RankContext(
        start=RankStart(
            role="decode",
            epoch=f"e{number}",
            local_rank=0,
            rank=0,
            size=1,
            rendezvous="",
            group_secret="",
            endpoint=endpoint,
            front_pid=0,
            settings={},
        ),
        settings=settings,
        config=model.config,
        kv_plan=KvPlan(num_pages=num_pages, page_bytes=1, max_model_len=num_pages * PAGE_TOKENS),
        kv_fingerprint="f",
        group=group,
        model=model,
        kv_cache=kv_cache,
        pool=PagePool(num_pages),
        transfer=transfer,
        runner=Runner(
            model,
            kv_cache,
            AttentionForm.ABSORBED,
            speculation=speculating(
                settings, model, kv_cache, AttentionForm.ABSORBED, max_pages=num_pages
            ),
            in_background=bool(settings.overlap_schedule),
        ),
        link=RankLink(endpoint, 0),
    )
    thread = threading.Thread(target=DecodeLoop(rank).run, daemon=True)
    thread.start()
    mtp: MtpUse = "kv" if settings.drafts_by_mtp else "none"
    prefill = FakePrefill(folder, MemoryTransfer(f"prefill-{number}"), num_pages, mtp)
    driver = OneRank(front, prefill, settings.drafts_by_lookup)
    try:
        yield driver
        assert thread.is_alive(), "the loop has died"
    finally:
        driver.send(Shutdown())
        thread.join(5)
        assert not thread.is_alive()
        rank.pool.check_integrity()
        rank.close()
        rank.link.close()
        prefill.transfer.close()
        context.destroy(linger=0)
