"""Options that the commands about experts share."""

from typing import Annotated

import typer

Group = Annotated[
    str,
    typer.Option(
        help="Name of the expert group; default: the only one of several ranks",
        show_default=False,
    ),
]
Layers = Annotated[
    str,
    typer.Option(
        help="Layers of the model, such as 3,7-9; default: all with experts", show_default=False
    ),
]
MAX_LAYER = 10_000


def parse_layers(text: str) -> list[int]:
    """ "3,7-9" as numbers, each once, ascending; none for "". Raises ValueError."""
    layers: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and int(end) <= MAX_LAYER for end in ends):
            raise ValueError(f"--layers: {part!r} is no layer and no range of layers")
        if int(ends[0]) > int(ends[1]):
            raise ValueError(f"--layers: {part!r} ends before it begins")
        layers.update(range(int(ends[0]), int(ends[1]) + 1))
    return sorted(layers)
