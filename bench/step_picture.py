"""Picture of where the time of a step goes, from what `--profile` of a bench wrote:

    python -m bench.step_picture picture.png bench/results/details/decode_rank_*.json

A bar for each purpose of kernels, and what it could not be faster than where memory is the limit.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Microseconds by purpose, the largest first; `floor` is 0 where there is none."""

    case: str
    purposes: list[str]
    microseconds: list[float]
    floor: list[float]


def read_step(path: Path) -> Step:
    """ValueError for a file that is no breakdown."""
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        rows = content["purposes"]
        return Step(
            case=str(content["case"]),
            purposes=[str(row["purpose"]) for row in rows],
            microseconds=[float(row["microseconds"]) for row in rows],
            floor=[float(row["floor"]) for row in rows],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no breakdown of a step: {error!r}") from error


def draw(steps: Sequence[Step], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(steps), 1, figsize=(8.0, 3.2 * len(steps)), squeeze=False)
    for axis, step in zip(axes[:, 0], steps, strict=True):
        places = range(len(step.purposes))
        axis.barh(places, step.microseconds, color="#1f60c4", label="measured")
        limited = [place for place in places if step.floor[place]]
        floors = [step.floor[place] for place in limited]
        axis.barh(limited, floors, height=0.3, color="#e0752d", label="if memory were all")
        axis.set_yticks(places, step.purposes, fontsize=9)
        axis.invert_yaxis()
        together = f"kernels of {sum(step.microseconds) / 1000:.1f} ms, partly beside each other"
        axis.set_title(f"{step.case}: {together}", fontsize=10)
        axis.set_xlabel("microseconds")
        axis.grid(visible=True, axis="x", alpha=0.3)
        axis.legend(frameon=False, fontsize=9, loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version of the library, which would make every drawing another file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw where the time of a step goes.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("breakdowns", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    draw([read_step(path) for path in options.breakdowns], options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
