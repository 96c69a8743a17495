"""Tables and figures for people."""

from collections.abc import Sequence

from rich.table import Table


def make_table(*titles: str, right: Sequence[str] | bool = (), fold: str = "") -> Table:
    """Columns without borders, so that lines can be cut and grepped; those in `right` (True: all)
    are aligned to the right. Of what is wider than the terminal the end is cut off, but for the
    column `fold`, whose texts go on in the next line."""
    aligned = (titles if right else ()) if isinstance(right, bool) else right
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(
            title,
            no_wrap=title != fold,
            overflow="fold" if title == fold else "ellipsis",
            justify="right" if title in aligned else "left",
        )
    return table


def format_age(seconds: float) -> str:
    """Seconds in the two largest units: 42s, 3m 5s, 2h 0m, 1d 4h."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {seconds}s" if minutes else f"{seconds}s"


def format_duration(seconds: float) -> str:
    """0.42 ms, 12.3 ms, 1.234 s."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.3g} ms"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.3f} s"
