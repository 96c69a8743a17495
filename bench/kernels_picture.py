"""Picture of the W4A8 grouped product, from records:

    python -m bench.kernels_picture docs/images/w4a8-grouped-gemm.png

Time against tokens an expert: ours with a scale for each 128 columns of activations and with one a
row, DeepGEMM's in FP8, and the floor from bytes and FLOPs, for both projections of an expert. Draws
the newest record of each case.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.kernels_floor import W4a8Shape
from bench.records import RESULTS, read
from bench.table import newest
from loadgen.records import Record

BENCH = "w4a8_grouped_gemm"
# Of an H200, by a kernel; records of a run that measured it come first.
BYTES_PER_SECOND = 4.19e12
_CASE = re.compile(r"masked e(\d+) m(\d+) n(\d+) k(\d+)( row scales)?")
_NAMES = {(4096, 7168): "gate and up", (7168, 2048): "down"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one projection: tokens an expert, and microseconds of each."""

    num_experts: int
    n: int
    k: int
    tokens: list[int]
    ours: list[float | None]
    by_row: list[float | None]
    peer: list[float | None]
    floor: list[float]


def curves(records: Iterable[Record]) -> list[Curve]:
    """Raises ValueError without a masked case."""
    of_bench = [each for each in newest(records) if each.bench == BENCH]
    rates = [1e9 * each.value for each in of_bench if each.metric == "rate"]
    rate = rates[-1] if rates else BYTES_PER_SECOND
    points: dict[tuple[int, int, int], dict[int, _Point]] = {}
    for record in of_bench:
        match = _CASE.fullmatch(record.case)
        if match is None or record.metric != "time":
            continue
        num_experts, tokens, n, k = (int(group) for group in match.groups()[:4])
        point = points.setdefault((num_experts, n, k), {}).setdefault(tokens, _Point())
        if match[5]:
            point.by_row = record.value
        else:
            point.ours = record.value
        if record.peer is not None and record.peer.startswith("DeepGEMM"):
            point.peer = record.peer_value
    if not points:
        raise ValueError(f"no record of {BENCH} has a case like 'masked e32 m16 n4096 k7168'")
    return [
        _curve(W4a8Shape(num_experts=e, n=n, k=k), rate, of_shape)
        for (e, n, k), of_shape in points.items()
    ]


@dataclass(slots=True, kw_only=True)
class _Point:
    ours: float | None = None
    by_row: float | None = None
    peer: float | None = None


def _curve(shape: W4a8Shape, rate: float, of_shape: dict[int, _Point]) -> Curve:
    tokens = sorted(of_shape)
    return Curve(
        num_experts=shape.num_experts,
        n=shape.n,
        k=shape.k,
        tokens=tokens,
        ours=[of_shape[each].ours for each in tokens],
        by_row=[of_shape[each].by_row for each in tokens],
        peer=[of_shape[each].peer for each in tokens],
        floor=[shape.floor_microseconds(each, rate) for each in tokens],
    )


def draw(found: Sequence[Curve], path: Path, caption: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(5.2 * len(found), 4.0), squeeze=False)
    for axis, curve in zip(axes[0], found, strict=True):
        for times, marks, color, label in (
            (curve.ours, "o-", "#1f60c4", "epserve, W4A8"),
            (curve.by_row, "^-", "#2e9d6b", "epserve, W4A8, row scales"),
            (curve.peer, "s-", "#e0752d", "DeepGEMM, FP8"),
        ):
            known = [(t, y) for t, y in zip(curve.tokens, times, strict=True) if y is not None]
            if known:
                axis.plot(*zip(*known, strict=True), marks, color=color, label=label)
        axis.plot(curve.tokens, curve.floor, "--", color="#53585f", label="floor of W4A8")
        axis.set_xscale("log", base=2)
        axis.set_xticks(curve.tokens, [str(each) for each in curve.tokens])
        axis.set_ylim(0)
        name = _NAMES.get((curve.n, curve.k), "projection")
        axis.set_title(f"{name}: {curve.num_experts} experts, N={curve.n} K={curve.k}", fontsize=10)
        axis.set_xlabel("tokens an expert")
        axis.set_ylabel("microseconds")
        axis.grid(visible=True, alpha=0.3)
        axis.legend(frameon=False, fontsize=9)
    caption += "; floor: bytes at the rate of a large copy, or FLOPs"
    figure.text(0.5, 0.005, caption, ha="center", fontsize=8, color="#53585f")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version of the library, which would make every drawing another file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the W4A8 grouped product.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--records", type=Path, default=RESULTS / f"{BENCH}.jsonl")
    options = parser.parse_args(arguments)
    records = list(read(options.records))
    last = max(records, key=lambda each: each.date)
    draw(curves(records), options.picture, f"{last.gpu}, commit {last.commit}, {last.date[:10]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
