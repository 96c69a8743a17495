"""What a bench of dispatchers measures, and what is recorded of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.records import BenchRun, Record

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
            name = None if peer is None else "DeepEP"
            unit = "GB/s" if metric.endswith("rate") else "us"
            return run.record(case, metric, unit, value, peer=name, peer_value=peer)

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
