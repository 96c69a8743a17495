"""Pictures of expert load: in the terminal, and as a PNG file.

A cell is one expert of one layer, coloured by its share of the layer's tokens; 1 is an even share.
"""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

Rows = Sequence[tuple[int, Sequence[float]]]  # layer of the model, share of each expert

# From idle to hot, and how often an even share each colour begins at.
_COLOURS = ("grey11", "grey30", "dark_blue", "dodger_blue3", "green4", "gold3", "orange3", "red3")
_BEGINS = (0.0, 0.05, 0.25, 0.5, 0.9, 1.5, 2.5, 4.0)
_GLYPHS = " .:-=+*#"  # the same where there are no colours
_PNG_LIMIT = 4.0


def shares(rows: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, list[float]]]:
    """Tokens by expert as multiples of an even share; zeros where a layer had none."""
    found = []
    for layer, tokens in rows:
        total = sum(tokens)
        found.append((layer, [len(tokens) * one / total if total else 0.0 for one in tokens]))
    return found


def text_map(rows: Rows, width: int, *, colours: bool) -> Text:
    """A line a layer; neighbouring experts share a cell (the hottest counts) where `width`
    characters are fewer than experts."""

    def cell(level: int) -> Text:
        return Text(" ", f"on {_COLOURS[level]}") if colours else Text(_GLYPHS[level])

    text = Text(no_wrap=True)
    for layer, values in rows:
        per_cell = max(1, -(-len(values) // max(1, width - 7)))
        text.append(f"{layer:>5}  ")
        for first in range(0, len(values), per_cell):
            hottest = max(values[first : first + per_cell])
            text.append(cell(bisect_right(_BEGINS, hottest) - 1))
        text.append("\n")
    text.append("       ")
    for level, begin in enumerate(_BEGINS):
        text.append(" ").append(cell(level)).append(f"  {begin:g}x ")
    return text


def write_png(rows: Rows, file: Path, title: str) -> None:
    """Raises ValueError where matplotlib is missing, OSError for a file that cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--heat-map needs matplotlib: pip install matplotlib") from error
    num_experts = max((len(values) for _, values in rows), default=1)
    figure = Figure(figsize=(3 + num_experts / 16, 2 + len(rows) / 8), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        [list(values) for _, values in rows],
        aspect="auto",
        cmap="inferno",
        vmin=0,
        vmax=_PNG_LIMIT,
        interpolation="nearest",
    )
    ticks = range(0, len(rows), -(-len(rows) // 20) or 1)
    axes.set_yticks(list(ticks), [str(rows[tick][0]) for tick in ticks])
    axes.set_xlabel("logical expert")
    axes.set_ylabel("layer")
    axes.set_title(title)
    figure.colorbar(image, ax=axes, label="tokens, in even shares", extend="max")
    figure.savefig(file, dpi=120, format="png")
