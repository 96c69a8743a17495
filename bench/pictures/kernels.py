"""Picture of the W4A8 grouped product, from records:

    python -m bench.pictures.kernels docs/images/w4a8-grouped-gemm.png

Time against tokens an expert: ours with a scale for each 128 columns of activations and with one a
row, DeepGEMM's in FP8, and the floor from bytes and FLOPs, for both projections of an expert. Draws
the newest record of each case.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.kernel_cases.w4a8_floor import W4a8Shape
from bench.pictures.save import save_picture
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
    """Points of one projection: microseconds by tokens an expert."""

    shape: W4a8Shape
    ours: dict[int, float] = field(default_factory=dict)
    by_row: dict[int, float] = field(default_factory=dict)
    peer: dict[int, float] = field(default_factory=dict)
    floor: dict[int, float] = field(default_factory=dict)


def curves(records: Iterable[Record]) -> list[Curve]:
    """Raises ValueError without a masked case."""
    of_bench = [each for each in newest(records) if each.bench == BENCH]
    rates = [1e9 * each.value for each in of_bench if each.metric == "rate"]
    rate = rates[-1] if rates else BYTES_PER_SECOND
    found: dict[W4a8Shape, Curve] = {}
    for record in of_bench:
        match = _CASE.fullmatch(record.case)
        if match is None or record.metric != "time":
            continue
        num_experts, tokens, n, k = (int(group) for group in match.groups()[:4])
        shape = W4a8Shape(num_experts=num_experts, n=n, k=k)
        curve = found.setdefault(shape, Curve(shape=shape))
        (curve.by_row if match[5] else curve.ours)[tokens] = record.value
        curve.floor[tokens] = shape.floor_microseconds(tokens, rate)
        if (record.peer or "").startswith("DeepGEMM") and record.peer_value is not None:
            curve.peer[tokens] = record.peer_value
    if not found:
        raise ValueError(f"no record of {BENCH} has a case like 'masked e32 m16 n4096 k7168'")
    return list(found.values())


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
            (curve.floor, "--", "#53585f", "floor of W4A8"),
        ):
            if times:
                points = zip(*sorted(times.items()), strict=True)
                axis.plot(*points, marks, color=color, label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(curve.floor), [str(each) for each in sorted(curve.floor)])
        axis.set_ylim(0)
        shape = curve.shape
        name = _NAMES.get((shape.n, shape.k), "projection")
        axis.set_title(f"{name}: {shape.num_experts} experts, N={shape.n} K={shape.k}", fontsize=10)
        axis.set_xlabel("tokens an expert")
        axis.set_ylabel("microseconds")
        axis.grid(visible=True, alpha=0.3)
        axis.legend(frameon=False, fontsize=9)
    caption += "; floor: bytes at the rate of a large copy, or FLOPs"
    figure.text(0.5, 0.005, caption, ha="center", fontsize=8, color="#53585f")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    save_picture(figure, path, dpi=110)


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
