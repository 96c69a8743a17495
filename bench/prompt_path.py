"""CPU time that a prompt costs on its way to the first batch: `python -m bench.prompt_path`.

Each process of the way does what it does for one request, in one thread, without sockets and
without the model: the gateway has the tokenizer's ids and packs and hashes them, the router
matches pages, the fronts of decode and prefill check and pass on, their ranks take in. The prompt
is new to all of them. After that, what its pages cost while it is computed in chunks, and what a
turn of a prefill rank spends on prompts that wait for pages.

`--record` appends the medians to bench/results/prompt_path.jsonl.
"""

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec

from bench.records import bench_parser, path_of, report
from core.hashing import prefix_hashes
from core.prefix_index import PrefixIndex
from decode_worker.call import Call
from decode_worker.events import Admit, RankFacts
from decode_worker.generate_request import submit_of as decode_submit
from decode_worker.prefill_message import prefill_request
from decode_worker.state import RankState
from engine.kv.pages import PagePool
from engine.link.messages import (
    Abort,
    FrontBatch,
    FrontMessage,
    PrefillStopped,
    RankBatch,
    RankMessage,
    RankStats,
    Ready,
    Reserved,
    Submit,
    SubmitPrefill,
)
from gateway.cluster.job import make_prompt
from loadgen.records import BenchRun
from prefill_worker.ledger import Ledger
from prefill_worker.prefill_request import submit_of as prefill_submit
from prefill_worker.rank_choice import RankChoice
from proto.generate_pb2 import GenerateRequest, PrefillRequest, SamplingParams
from proto.router_pb2 import AssignRequest, WorkerRef
from router.service import demand_of

BENCH = "prompt_path"
PAGE_TOKENS, CHUNK_TOKENS, VOCAB_SIZE = 64, 2048, 129_280
NUM_PAGES, NUM_RANKS, NUM_WAITING = 4096, 8, 64
MAX_MODEL_LEN = 40_000
REPEATS = 40
PAGES = "pages while it is computed"

READY = Ready(
    rank=0, device="cuda", pid=1, kv_fingerprint="f", page_tokens=PAGE_TOKENS,
    max_model_len=MAX_MODEL_LEN, pages_total=NUM_PAGES, max_running=8, eos_token_ids=(1,),
    vocab_size=VOCAB_SIZE,
)  # fmt: skip
FACTS = RankFacts(
    num_layers=61, page_tokens=PAGE_TOKENS, max_model_len=MAX_MODEL_LEN, max_running=8,
    eos_token_ids=(1,), kv_arrival_seconds=5.0, agent=bytes(200), kv_fingerprint="f",
    attempt_prefix="e-0",
)  # fmt: skip


class Path:
    """All processes of the way; `seconds` of CPU by process, of the prompts since the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._router, self._choice = PrefixIndex(100_000), RankChoice(NUM_RANKS, PAGE_TOKENS)
        self._decode = RankState(FACTS, PagePool(NUM_PAGES))
        self._ledger = Ledger(PagePool(NUM_PAGES), PAGE_TOKENS)
        self._encoder = msgspec.msgpack.Encoder()
        self._of_front = msgspec.msgpack.Decoder(FrontBatch)
        self._of_rank = msgspec.msgpack.Decoder(RankBatch)

    def send(self, token_ids: list[int]) -> None:
        assign, generate = self._timed("gateway", self._gateway, token_ids)
        self._timed("router", self._route, assign)
        call, submit = self._timed("decode front", self._decode_front, generate)
        reserved = self._timed("decode rank", self._decode_rank, submit)
        prefill = self._timed("decode front, to prefill", self._to_prefill, call, reserved)
        attempt = self._timed("prefill front", self._prefill_front, prefill)
        waiting = self._timed("prefill rank", self._prefill_rank, attempt)
        self._timed(PAGES, self._compute, waiting)
        for message in self._decode.step(Abort(request_id=call.key), 0.0):
            if attempt_id := getattr(message, "attempt_id", ""):
                self._decode.step(PrefillStopped(attempt_id=attempt_id), 0.0)

    def _timed(self, process: str, work: Callable[..., Any], *told: Any) -> Any:  # noqa: ANN401
        began = time.process_time()
        result = work(*told)
        self.seconds.setdefault(process, []).append(time.process_time() - began)
        return result

    def _gateway(self, token_ids: list[int]) -> tuple[bytes, bytes]:
        prompt = make_prompt(
            token_ids, max_tokens=128, default_max_tokens=None, max_model_len=MAX_MODEL_LEN,
            prompt_param="prompt", max_tokens_param="max_tokens",
        )  # fmt: skip
        hashes = prefix_hashes(prompt.token_ids, PAGE_TOKENS)
        assign = AssignRequest(
            request_id="r", model="m", num_prompt_tokens=prompt.num_tokens, prefix_hashes=hashes
        )
        generate = GenerateRequest(
            request_id="r",
            model="m",
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(temperature=0.7, top_p=0.95, max_tokens=prompt.max_tokens),
            prefill=WorkerRef(address="127.0.0.1:1", epoch="p", name="p"),
            prefix_hashes=hashes,
        )
        return assign.SerializeToString(), generate.SerializeToString()

    def _route(self, request: bytes) -> None:
        hashes = demand_of(AssignRequest.FromString(request)).prefix_hashes
        for worker in range(NUM_RANKS):
            self._router.num_matched(worker, hashes)
        self._router.record(0, hashes)

    def _decode_front(self, content: bytes) -> tuple[Call, bytes]:
        request = GenerateRequest.FromString(content)
        submit = decode_submit(request, "r#0", READY)
        call = Call(key="r#0", request=request, rank=0, deadline=None, accepted_at=0.0)
        return call, self._to_rank(submit)

    def _decode_rank(self, content: bytes) -> bytes:
        for message in self._of_front.decode(content).messages:
            assert isinstance(message, Submit)
            self._decode.step(message, 0.0)
        (reserved,) = self._decode.step(Admit("r#0"), 0.0)
        batch = RankBatch(rank=0, messages=(reserved,), stats=RankStats())
        return self._encoder.encode(batch)

    def _to_prefill(self, call: Call, content: bytes) -> bytes:
        reserved: RankMessage = self._of_rank.decode(content).messages[0]
        assert isinstance(reserved, Reserved)
        return prefill_request(call, reserved, "m").SerializeToString()

    def _prefill_front(self, content: bytes) -> bytes:
        request = PrefillRequest.FromString(content)
        submit = prefill_submit(request, READY)
        self._choice.choose(submit.num_tokens, request.prefix_hashes)
        return self._to_rank(submit)

    def _to_rank(self, message: FrontMessage) -> bytes:
        return self._encoder.encode(FrontBatch(messages=(message,)))

    def _prefill_rank(self, content: bytes) -> SubmitPrefill:
        (submit,) = self._of_front.decode(content).messages
        assert isinstance(submit, SubmitPrefill)
        self._ledger.num_known_tokens(submit.attempt_id, submit.token_ids)
        self._ledger.hold(submit.attempt_id, submit.token_ids)
        return submit

    def _compute(self, submit: SubmitPrefill) -> None:
        """The pages of all chunks, but not their tensors."""
        attempt_id, ledger = submit.attempt_id, self._ledger
        ledger.reserve(attempt_id)
        for end in (*range(CHUNK_TOKENS, submit.num_tokens, CHUNK_TOKENS), submit.num_tokens):
            ledger.learn(attempt_id, end)
        ledger.close(attempt_id)


def seconds_of_turn(num_tokens: int) -> float:
    """Of asking what is known of each of `NUM_WAITING` prompts that wait and are cached whole,
    the first time left out."""
    ledger = Ledger(PagePool(NUM_WAITING * num_tokens // PAGE_TOKENS), PAGE_TOKENS)
    prompts = {
        f"{number}": make_prompt(
            ids_of(num_tokens, number), max_tokens=1, default_max_tokens=None,
            max_model_len=MAX_MODEL_LEN, prompt_param="", max_tokens_param="",
        ).token_ids
        for number in range(NUM_WAITING)
    }  # fmt: skip
    for name, token_ids in prompts.items():
        ledger.hold(name, token_ids)
        ledger.reserve(name)
        ledger.learn(name, num_tokens)
        ledger.close(name)
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        for name, token_ids in prompts.items():
            ledger.num_known_tokens(name, token_ids)
        times.append(time.process_time() - began)
    return median(times[1:])


def ids_of(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)


def measure(num_tokens: int, repeats: int) -> dict[str, float]:
    """Median seconds by process, and of all hops up to the first chunk together."""
    path = Path()
    for seed in range(repeats):
        path.send(ids_of(num_tokens, seed))
    found = {process: median(times) for process, times in path.seconds.items()}
    hops = sum(seconds for process, seconds in found.items() if process != PAGES)
    return {**found, "all hops": hops}


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    run = BenchRun.begin(BENCH, on_cpu=True)
    records = []
    for num_tokens in arguments.tokens:
        for process, seconds in measure(num_tokens, arguments.repeats).items():
            records.append(
                run.record(f"prompt of {num_tokens} tokens, {process}", "cpu", "ms", 1e3 * seconds)
            )
    case = f"turn with {NUM_WAITING} waiting cached prompts of 8192 tokens"
    records.append(run.record(case, "cpu", "ms", 1e3 * seconds_of_turn(8192)))
    report(records, path_of(BENCH, arguments))


if __name__ == "__main__":
    main()
