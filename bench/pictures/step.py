"""Picture of where the time of a step goes, from what `--profile` of a bench wrote:

    python -m bench.pictures.step picture.png bench/results/details/decode_rank_*.json

A bar for each purpose of kernels, and for each of the kernels that take longest. Some files also
have a floor of them: what they could not be faster than, drawn before it.
"""

import argparse
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.pictures.save import save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_KERNELS = 10


class Bar(NamedTuple):
    """Microseconds; `floor` None where there is none."""

    name: str
    microseconds: float
    floor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The bars with the most time first."""

    case: str
    microseconds: float
    purposes: list[Bar]
    kernels: list[Bar]


def read_step(path: Path) -> Step:
    """ValueError for a file that is no breakdown."""
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        return Step(
            case=str(content["case"]),
            microseconds=float(content["microseconds"]),
            purposes=[_bar(row["purpose"], row) for row in content["purposes"]],
            kernels=[_bar(_name(row), row) for row in content["kernels"]],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no breakdown of a step: {error!r}") from error


def _bar(name: str, row: dict[str, Any]) -> Bar:
    return Bar(name, float(row["microseconds"]), row.get("floor"))


def _name(kernel: dict[str, Any]) -> str:
    """Of what it computes, if that is known and not all of a kind."""
    names = [str(name) for name in kernel.get("operations", ())]
    if 0 < len(names) <= 3:
        return "; ".join(names)
    return re.sub(r"^void |\(anonymous namespace\)::|[<(].*", "", str(kernel["name"]))


def draw(steps: Sequence[Step], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    size = (13.0, 4.4 * len(steps))
    figure, axes = plt.subplots(
        len(steps), 2, figsize=size, squeeze=False, width_ratios=(4, 5), layout="constrained"
    )
    for (left, right), step in zip(axes, steps, strict=True):
        _draw_bars(left, step.purposes)
        _draw_bars(right, step.kernels[:NUM_KERNELS])
        together = f"kernels of {step.microseconds / 1000:.1f} ms, partly beside each other"
        left.set_title(f"{step.case}:\n{together}", fontsize=10)
        right.set_title("the kernels that take longest", fontsize=10)
        left.legend(frameon=False, fontsize=9, loc="lower right")
    save_picture(figure, path)


def _draw_bars(axis: "Axes", bars: Sequence[Bar]) -> None:
    places = range(len(bars))
    used = [bar.microseconds for bar in bars]
    axis.barh(places, used, color="#1f60c4", label="measured")
    axis.barh(
        places, [bar.floor or 0.0 for bar in bars], height=0.3, color="#e0752d", label="floor"
    )
    for place, bar in enumerate(bars):
        text = f" {bar.microseconds:,.0f}"
        if bar.floor is not None:
            text += f" of {bar.floor:,.0f}" if bar.floor >= 10 else f" of {bar.floor:.2g}"
        axis.text(bar.microseconds, place, text, va="center", fontsize=8)
    axis.set_yticks(places, [textwrap.fill(bar.name, 36) for bar in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.35 * max(used, default=1.0))
    axis.locator_params(axis="x", nbins=6)
    axis.set_xlabel("microseconds of a step: measured, of the floor")
    axis.grid(visible=True, axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw where the time of a step goes.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("breakdowns", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    draw([read_step(path) for path in options.breakdowns], options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
