"""Picture of where the time of a step goes, from what `--profile` of a bench wrote:

    python -m bench.step_picture picture.png bench/results/details/decode_rank_*.json

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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_KERNELS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Microseconds, the most first; `floors` are None where there is none."""

    names: list[str]
    microseconds: list[float]
    floors: list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    case: str
    microseconds: float
    purposes: Bars
    kernels: Bars


def read_step(path: Path) -> Step:
    """ValueError for a file that is no breakdown."""
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        purposes, kernels = content["purposes"], content["kernels"]
        return Step(
            case=str(content["case"]),
            microseconds=float(content["microseconds"]),
            purposes=_bars(purposes, [str(row["purpose"]) for row in purposes]),
            kernels=_bars(kernels, [_name(row) for row in kernels]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no breakdown of a step: {error!r}") from error


def _bars(rows: Sequence[dict[str, Any]], names: list[str]) -> Bars:
    return Bars(
        names=names,
        microseconds=[float(row["microseconds"]) for row in rows],
        floors=[row.get("floor") for row in rows],
    )


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
        _draw_bars(left, step.purposes, len(step.purposes.names))
        _draw_bars(right, step.kernels, NUM_KERNELS)
        together = f"kernels of {step.microseconds / 1000:.1f} ms, partly beside each other"
        left.set_title(f"{step.case}:\n{together}", fontsize=10)
        right.set_title("the kernels that take longest", fontsize=10)
        left.legend(frameon=False, fontsize=9, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version of the library, which would make every drawing another file.
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def _draw_bars(axis: "Axes", bars: Bars, num_bars: int) -> None:
    names = [textwrap.fill(name, 36) for name in bars.names[:num_bars]]
    used, floors = bars.microseconds[:num_bars], bars.floors[:num_bars]
    places = range(len(names))
    axis.barh(places, used, color="#1f60c4", label="measured")
    least = [0.0 if floor is None else floor for floor in floors]
    axis.barh(places, least, height=0.3, color="#e0752d", label="floor")
    for place, time, floor in zip(places, used, floors, strict=True):
        text = f" {time:,.0f}" + ("" if floor is None else f" of {_rounded(floor)}")
        axis.text(time, place, text, va="center", fontsize=8)
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.35 * max(used, default=1.0))
    axis.locator_params(axis="x", nbins=6)
    axis.set_xlabel("microseconds of a step: measured, of the floor")
    axis.grid(visible=True, axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def _rounded(floor: float) -> str:
    return f"{floor:,.0f}" if floor >= 10 else f"{floor:.2g}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw where the time of a step goes.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("breakdowns", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    draw([read_step(path) for path in options.breakdowns], options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
