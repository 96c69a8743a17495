"""Dispatch and combine between GPUs, at the size of DeepSeek-V3: `make bench-ep`.

Prints and records, for each dispatcher and form and number of tokens a rank, the time of a
dispatch, of a combine and of a round trip, and the bytes a second that a rank sends in it, counted
once for each choice of a token. Steps of fixed sizes are taken from captured graphs, as they are
used; DeepEP's own calls without ours around them are the peer. Without GPUs the same runs over
sockets, with fewer experts, and tells nothing.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.kernel_cases.gpu_timing import microseconds
from bench.ranks.ep_ranks import on_all_ranks
from bench.records import bench_parser, path_of, report
from ep.dispatch.deep_ep_buffer import DeepEpBuffer
from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher import Payload
from ep.dispatch.dispatcher_choice import Choice, RankFacts, deep_ep_obstacle
from ep.dispatch.dispatchers import Dispatchers, make_dispatchers
from ep.dispatch.rank_facts import own_facts
from ep.group.group import EpGroup
from loadgen.records import BenchRun, Record

BENCH = "ep"
PAIRS = 20  # of a dispatch and a combine, in a row
WARM_UP = 5
SLEEP_CYCLES = 20_000_000  # for the host to get ahead of the device
PLAIN, FP8 = Payload.PLAIN, Payload.FP8
RAW = "masked, raw"  # DeepEP's calls without ours around them


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Microseconds; of one way each, and of both in a captured graph (0: not captured)."""

    case: str
    dispatch: float
    combine: float
    captured: float
    dispatch_bytes: float
    combine_bytes: float

    @property
    def both(self) -> float:
        return self.dispatch + self.combine


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    hidden: int
    experts: int
    choices: int
    tokens: tuple[int, ...]

    def needs(self, num_ranks: int) -> DispatchNeeds:
        most = max(self.tokens)
        return DispatchNeeds(
            hidden=self.hidden,
            itemsize=2,
            slots_per_rank=self.experts // num_ranks,
            num_choices=self.choices,
            step_tokens=most,
            masked_tokens=-(-most // 64) * 64,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Random tokens of this rank: hidden [T, H], topk_idx [T, K], weights [T, K]."""

    hidden: torch.Tensor
    topk_idx: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def random(cls, num_tokens: int, size: Size, rank: int, device: torch.device) -> "Routed":
        generator = torch.Generator().manual_seed(num_tokens * 100 + rank)
        scores = torch.rand(num_tokens, size.experts, generator=generator)
        return cls(
            hidden=torch.randn(num_tokens, size.hidden, generator=generator)
            .to(torch.bfloat16)
            .to(device),
            topk_idx=scores.topk(size.choices, dim=1).indices.to(device),
            weights=torch.rand(num_tokens, size.choices, generator=generator).to(device),
        )

    @property
    def num_choices(self) -> int:
        return int(self.topk_idx.numel())


Dispatch = Callable[[], tuple[torch.Tensor, object]]  # rows for the experts, and a handle
Combine = Callable[[torch.Tensor, object], object]


def measure(group: EpGroup, device: torch.device, size: Size) -> list[Times]:
    """On every rank at once, in the same order."""
    needs = size.needs(group.size)
    ranks = [RankFacts(*facts) for facts in group.exchange(own_facts(device))]
    obstacle = deep_ep_obstacle(needs, ranks)
    if obstacle and group.rank == 0:
        sys.stdout.write(f"no DeepEP: {obstacle}\n")
    times: list[Times] = []
    for name in ("collective",) if obstacle else ("collective", "deep_ep"):
        choice = Choice(name="deep_ep" if name == "deep_ep" else "collective", reason="a bench")
        made = make_dispatchers(group, choice, needs, device)
        for num_tokens in size.tokens:
            routed = Routed.random(num_tokens, size, group.rank, device)
            for case, payload, dispatch, combine in ways(made, group, needs, routed):
                group.exchange([0])
                fixed = "masked" in case
                times.append(timed(case, payload, routed, dispatch, combine, device, fixed=fixed))
        made.close()
    return times


def ways(
    made: Dispatchers, group: EpGroup, needs: DispatchNeeds, routed: Routed
) -> Iterator[tuple[str, Payload, Dispatch, Combine]]:
    """Every form and payload, and DeepEP's low-latency calls without ours around them."""
    name, hidden, idx, weights = made.choice.name, routed.hidden, routed.topk_idx, routed.weights
    tokens = (len(hidden),) * group.size
    where = f"{group.size} ranks, {len(hidden)} tokens each, {name}"
    masked, aligned = made.masked, made.aligned
    for payload in (FP8, PLAIN) if masked is not None else ():

        def dispatch_masked(payload: Payload = payload) -> tuple[torch.Tensor, object]:
            assert masked is not None
            sent = masked.dispatch_masked(hidden, idx, weights, payload)
            return sent.hidden, sent.handle

        assert masked is not None
        yield f"{where} masked", payload, dispatch_masked, masked.combine_masked
    for payload in (FP8, PLAIN) if aligned is not None else ():

        def dispatch_aligned(payload: Payload = payload) -> tuple[torch.Tensor, object]:
            assert aligned is not None
            (sent,) = aligned.dispatch_aligned(hidden, idx, weights, tokens, payload, 128)
            return sent.hidden, sent.handle

        def combine_aligned(rows: torch.Tensor, handle: object) -> torch.Tensor:
            assert aligned is not None
            return aligned.combine_aligned([(rows, handle)])

        yield f"{where} aligned", payload, dispatch_aligned, combine_aligned

    contiguous = made.dispatcher
    assert contiguous is not None

    def dispatch() -> tuple[torch.Tensor, object]:
        sent = contiguous.dispatch(hidden, idx, weights, tokens)
        return sent.hidden, sent.handle

    yield f"{where} contiguous", PLAIN, dispatch, contiguous.combine
    if made.buffer is not None:
        for payload in (FP8, PLAIN):
            yield f"{where} {RAW}", payload, *raw(made.buffer, needs, routed, payload)


def raw(
    buffer: DeepEpBuffer, needs: DispatchNeeds, routed: Routed, payload: Payload
) -> tuple[Dispatch, Combine]:
    num_experts = buffer.group.size * needs.slots_per_rank

    def dispatch() -> tuple[torch.Tensor, object]:
        received, _, handle, _, _ = buffer.raw.low_latency_dispatch(
            routed.hidden,
            routed.topk_idx,
            needs.masked_tokens,
            num_experts,
            use_fp8=payload is FP8,
        )
        return received[0] if payload is FP8 else received, handle

    def combine(rows: torch.Tensor, handle: object) -> object:
        return buffer.raw.low_latency_combine(rows, routed.topk_idx, routed.weights, handle)

    return dispatch, combine


def timed(
    case: str,
    payload: Payload,
    routed: Routed,
    dispatch: Dispatch,
    combine: Combine,
    device: torch.device,
    *,
    fixed: bool,
) -> Times:
    """`fixed`: nothing waits for the host, so that it can be captured."""
    first, handle = dispatch()
    rows = torch.zeros(first.shape, dtype=torch.bfloat16, device=device)  # the experts' results
    combine(rows, handle)
    on_gpu = device.type == "cuda"
    there, back = (
        on_device(dispatch, combine, rows)
        if on_gpu and fixed
        else on_host(dispatch, combine, rows, on_gpu=on_gpu)
    )

    def round_trip() -> None:
        _, handle = dispatch()
        combine(rows, handle)

    captured = microseconds(round_trip, PAIRS) if on_gpu and fixed else 0.0
    width = routed.hidden.shape[1]
    sent = width + width // 128 * 4 if payload is FP8 else 2 * width
    return Times(
        case=f"{case}, {'FP8' if payload is FP8 else 'BF16'}",
        dispatch=there,
        combine=back,
        captured=captured,
        dispatch_bytes=routed.num_choices * sent,
        combine_bytes=routed.num_choices * 2 * width,
    )


def on_device(dispatch: Dispatch, combine: Combine, rows: torch.Tensor) -> tuple[float, float]:
    """Median microseconds between events on the device, with the host far ahead."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    events = []
    for _ in range(WARM_UP + PAIRS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        _, handle = dispatch()
        marks[1].record()
        combine(rows, handle)
        marks[2].record()
        events.append(marks)
    torch.cuda.synchronize()
    return (
        1000 * statistics.median(a.elapsed_time(b) for a, b, _ in events[WARM_UP:]),
        1000 * statistics.median(b.elapsed_time(c) for _, b, c in events[WARM_UP:]),
    )


def on_host(
    dispatch: Dispatch, combine: Combine, rows: torch.Tensor, *, on_gpu: bool
) -> tuple[float, float]:
    """Median microseconds on the host's clock, of calls that wait for their counts there."""
    times: list[tuple[float, float]] = []
    for _ in range(WARM_UP + PAIRS):
        began = time.perf_counter()
        _, handle = dispatch()
        if on_gpu:
            torch.cuda.synchronize()
        sent = time.perf_counter()
        combine(rows, handle)
        if on_gpu:
            torch.cuda.synchronize()
        times.append((sent - began, time.perf_counter() - sent))
    there, back = zip(*times[WARM_UP:], strict=True)
    return 1e6 * statistics.median(there), 1e6 * statistics.median(back)


def records_of(run: BenchRun, by_rank: Sequence[Sequence[Times]]) -> list[Record]:
    """The slowest rank's times; beside those through ours, DeepEP's own."""
    slowest = {
        each[0].case: Times(
            case=each[0].case,
            dispatch=max(times.dispatch for times in each),
            combine=max(times.combine for times in each),
            captured=max(times.captured for times in each),
            dispatch_bytes=each[0].dispatch_bytes,
            combine_bytes=each[0].combine_bytes,
        )
        for each in zip(*by_rank, strict=True)
    }
    records = []
    for case, times in slowest.items():
        if RAW in case:
            continue
        raw_case = case.replace(" masked,", f" {RAW},")
        theirs = slowest.get(raw_case) if raw_case != case else None

        def record(metric: str, value: float, peer: float | None, case: str = case) -> Record:
            unit = "GB/s" if metric.endswith("rate") else "us"
            return run.record(case, metric, unit, value, peer="DeepEP", peer_value=peer)

        def of_peer(what: str, theirs: Times | None = theirs) -> float | None:
            return None if theirs is None else float(getattr(theirs, what))

        records += [
            record("dispatch", times.dispatch, of_peer("dispatch")),
            record("combine", times.combine, of_peer("combine")),
            record("round_trip", times.both, of_peer("both")),
            record("dispatch_rate", times.dispatch_bytes / times.dispatch / 1e3, None),
            record("combine_rate", times.combine_bytes / times.combine / 1e3, None),
        ]
        if times.captured:
            records.append(record("captured", times.captured, of_peer("captured")))
    return records


def main(argv: Sequence[str] | None = None) -> int:
    num_gpus = torch.cuda.device_count()
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=num_gpus or 2)
    parser.add_argument("--hidden", type=int, default=7168 if num_gpus else 256)
    parser.add_argument("--experts", type=int, default=256 if num_gpus else 16)
    parser.add_argument("--choices", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 128])
    arguments = parser.parse_args(argv)
    if arguments.experts % arguments.ranks:
        parser.error(f"{arguments.experts} experts do not go evenly to {arguments.ranks} ranks")
    size = Size(
        hidden=arguments.hidden,
        experts=arguments.experts,
        choices=arguments.choices,
        tokens=tuple(arguments.tokens),
    )
    by_rank = on_all_ranks(measure, arguments.ranks, size)
    report(records_of(BenchRun.begin(BENCH), by_rank), path_of(BENCH, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
