"""How pictures become files."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_picture(figure: "Figure", path: Path, dpi: int = 100) -> None:
    """As PNG, in folders that are made; `figure` of pyplot is closed. OSError if it cannot be."""
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version of the library, which would make every drawing another file.
    figure.savefig(path, dpi=dpi, metadata={"Software": None})
    plt.close(figure)
