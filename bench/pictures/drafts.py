"""Picture of what drafts gain, from records of `bench.decode_rank --speculative`:

    python -m bench.pictures.drafts docs/images/drafts.png

Output tokens a second of one rank against its batch, for each number of drafts, as times of what it
gives without drafts in the same run. Acceptance is synthetic there. Draws the newest records.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.pictures.save import save_picture
from bench.records import RESULTS, read
from bench.table import newest
from loadgen.records import Record

BENCH = "decode_rank"
_CASE = re.compile(
    r"(\w+), 61 layers, context 2048(?:, (\d) drafts, [\d.]+ tokens a step)?, batch (\d+)"
)
Gains = dict[str, dict[int, dict[int, float]]]  # by format, drafts and batch


def gains(records: Iterable[Record]) -> Gains:
    """Raises ValueError where nothing was measured with drafts and without."""
    rates: dict[tuple[str, int, int], float] = {}
    for record in newest(records):
        match = _CASE.fullmatch(record.case) if record.bench == BENCH else None
        if match is None:
            continue
        name, drafts, batch = match[1], int(match[2] or 0), int(match[3])
        if drafts and record.metric == "tokens a second":
            rates[name, drafts, batch] = record.value
        elif not drafts and record.metric == "step":
            rates[name, 0, batch] = 1000 * batch / record.value
    found: Gains = defaultdict(lambda: defaultdict(dict))
    for (name, drafts, batch), rate in sorted(rates.items()):
        if drafts and (name, 0, batch) in rates:
            found[name][drafts][batch] = rate / rates[name, 0, batch]
    if not found:
        raise ValueError(f"no record of {BENCH} has a case with drafts and its twin without")
    return found


def draw(found: Gains, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, len(found), figsize=(5.5 * len(found), 4.0), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, (name, by_drafts) in zip(axes.flat, found.items(), strict=True):
        for drafts, of_batch in by_drafts.items():
            axis.plot(
                [*map(str, of_batch)], [*of_batch.values()], marker="o", label=f"K = {drafts}"
            )
        axis.axhline(1, color="gray", linewidth=1)
        axis.set_title(name)
        axis.set_xlabel("requests of a rank")
        axis.legend(frameon=False)
    axes[0, 0].set_ylim(bottom=0)  # of all, once all is drawn
    axes[0, 0].set_ylabel("output tokens a second, times of K = 0")
    save_picture(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw what drafts gain.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    draw(gains(read(options.results / f"{BENCH}.jsonl")), options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
