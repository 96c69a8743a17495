"""Picture of what the processes of a cluster held over time, from the lines of `bench.soak`:

python -m bench.pictures.soak docs/images/soak.png bench/results/details/soak.jsonl
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.pictures.save import save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20


class Panel(NamedTuple):
    title: str
    quantity: str
    scale: float


PANELS = (
    Panel("resident memory, MB", "rss_bytes", MIB),
    Panel("open descriptors", "fds", 1),
    Panel("threads", "threads", 1),
    Panel("asyncio tasks of the gateway", "tasks", 1),
)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """ValueError for a file that is none of `bench.soak`."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not lines or not all({"seconds", "held"} <= line.keys() for line in lines):
        raise ValueError(f"{path} has no lines of bench.soak")
    return lines


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(13.0, 8.0), sharex=True, layout="constrained")
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        _draw_panel(axis, panel, lines)
    answered = sum(sum(line["answers"].values()) for line in lines)
    figure.suptitle(f"A cluster under {answered:,} requests, nearly all of them nasty")
    save_picture(figure, path)


def _draw_panel(axis: "Axes", panel: Panel, lines: Sequence[dict[str, Any]]) -> None:
    names = dict.fromkeys(name for line in lines for name in line["held"])
    for name in names:
        points = [
            (line["seconds"] / 60, line["held"][name][panel.quantity] / panel.scale)
            for line in lines
            if panel.quantity in line["held"].get(name, {})
        ]
        if points:
            axis.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel("minutes")
    axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.3)
    if axis.lines:
        axis.legend(frameon=False, fontsize=8, ncols=2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw what processes held over time.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("lines", type=Path, help="of bench.soak")
    options = parser.parse_args(arguments)
    draw(read_lines(options.lines), options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
