"""Numbers as a dashboard shows them; units by Grafana's names."""

import math

SI = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def shown(value: float, unit: str) -> str:
    """At most four significant digits."""
    if not math.isfinite(value):
        return "–"
    match unit:
        case "s":
            return _seconds(value)
        case "percentunit":
            return f"{100 * value:.3g} %"
        case "bytes" | "Bps":
            suffix = "B/s" if unit == "Bps" else "B"
            return _scaled(value) + suffix
        case "reqps":
            return _scaled(value).strip() + " /s"
        case _:
            return _scaled(value).strip()


def _seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    if abs(value) < 1e-3:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"


def _scaled(value: float) -> str:
    for factor, prefix in SI:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.2g} "
