"""Pictures of the Grafana dashboards, drawn without Grafana from what a Prometheus knows.

python scripts/dashboard_pictures.py http://127.0.0.1:9090 docs/images --seconds 120

Each panel's queries are asked of that Prometheus over the last seconds, drawn on an HTML page
(DASHBOARD.html, beside the pictures with --keep-pages) and taken by a headless Chromium.
"""

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402 - needs the path above
from PIL import Image  # noqa: E402

from scripts.pictures.plot import (  # noqa: E402
    Frame,
    Line,
    bars_html,
    figure_html,
    heat_svg,
    lines_svg,
)

DASHBOARDS = ROOT / "deploy" / "helm" / "epserve" / "dashboards"
WIDTH, ROW_HEIGHT, GAP = 1440, 30, 6
NUM_STEPS = 120
NUM_COLOURS = 256
VARIABLES = {"$__rate_interval": "10s", "$namespace": ".*", "$release": ".*", "$instance": "{one}"}
STYLE = """
body{margin:0;background:#f4f5f7;font:12px sans-serif;color:#24292e;position:relative}
h1{font-size:18px;margin:0;padding:10px 12px}
h1 small{font-weight:normal;color:#53585f;font-size:12px}
.panel,.row{position:absolute;box-sizing:border-box}.row{font-weight:bold;padding:8px 6px 0}
.panel{background:#fff;border:1px solid #dde1e6;border-radius:3px;padding:5px 6px;overflow:hidden}
.panel>b{display:block;margin-bottom:2px}.legend{font-size:10px;line-height:14px;max-height:42px}
.legend span{margin-right:9px;white-space:nowrap;display:inline-block}
.legend i{display:inline-block;width:9px;height:3px;margin-right:4px;vertical-align:middle}
.figures{display:flex;justify-content:space-around;padding-top:14px}.figure{text-align:center}
.figure b{font-size:21px;color:#1f60c4;display:block}.bars{padding:8px 4px}
.bar{display:flex;align-items:center;margin:7px 0}.bar span{width:76px}
.bar i{background:#3274d9;height:14px;margin-right:6px}
"""


class Drawer:
    """Draws from one Prometheus, over the `seconds` until `end` (unix seconds)."""

    def __init__(self, url: str, seconds: float, end: float) -> None:
        self._client = httpx.Client(base_url=url, timeout=30)
        self._end = end
        self._begin = end - seconds
        workers = self._ask("query", query="epserve_worker_requests_total{role='decode'}", time=end)
        self._worker = workers[0]["metric"]["instance"] if workers else ".*"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def page(self, board: dict[str, Any]) -> tuple[str, int]:
        """The page, and its height in pixels."""
        head = 40
        parts, bottom = [], 0
        for panel in board["panels"]:
            place = panel["gridPos"]
            unit = (WIDTH - GAP) / 24
            box = (
                f"left:{GAP + place['x'] * unit:.0f}px;top:{head + place['y'] * ROW_HEIGHT}px;"
                f"width:{place['w'] * unit - GAP:.0f}px;height:{place['h'] * ROW_HEIGHT - GAP}px"
            )
            bottom = max(bottom, head + (place["y"] + place["h"]) * ROW_HEIGHT)
            title = html.escape(panel["title"])
            if panel["type"] == "row":
                parts.append(f'<div class="row" style="{box}">{title}</div>')
                continue
            size = (round(place["w"] * unit - GAP - 14), place["h"] * ROW_HEIGHT - GAP - 66)
            content = self._draw(panel, Frame(*size, self._begin, self._end))
            parts.append(f'<div class="panel" style="{box}"><b>{title}</b>{content}</div>')
        note = f"<small>{html.escape(board['description'])} Not drawn by Grafana.</small>"
        title = f"<h1>{html.escape(board['title'])} {note}</h1>"
        charset = '<meta charset="utf-8">'
        return f"{charset}<style>{STYLE}</style><body>{title}{''.join(parts)}", bottom + GAP

    def _draw(self, panel: dict[str, Any], frame: Frame) -> str:
        lines = [line for target in panel["targets"] for line in self._lines(target)]
        defaults = panel["fieldConfig"]["defaults"]
        unit = defaults.get("unit", "short")
        match panel["type"]:
            case "heatmap":
                tall = Frame(frame.width, frame.height + 38, frame.begin, frame.end)
                return heat_svg(sorted(lines, key=lambda line: float(line.name)), tall, unit)
            case "stat":
                return figure_html(lines, unit)
            case "bargauge":
                return bars_html(lines, unit)
        stacking = defaults.get("custom", {}).get("stacking", {}).get("mode", "none")
        return lines_svg(
            lines, frame, unit, is_stacked=stacking == "normal", most=defaults.get("max")
        )

    def _lines(self, target: dict[str, Any]) -> list[Line]:
        expression = target["expr"]
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value.format(one=self._worker))
        step = max(1.0, (self._end - self._begin) / NUM_STEPS)
        found = self._ask(
            "query_range", query=expression, start=self._begin, end=self._end, step=step
        )
        return [
            Line(
                _legend(target["legendFormat"], one["metric"]),
                [(float(at), float(value)) for at, value in one["values"]],
            )
            for one in found
        ]

    def _ask(self, what: str, **parameters: str | float) -> list[dict[str, Any]]:
        reply = self._client.get(f"/api/v1/{what}", params=parameters)
        reply.raise_for_status()
        result: list[dict[str, Any]] = reply.json()["data"]["result"]
        return result


def _legend(form: str, labels: dict[str, str]) -> str:
    if form == "__auto":
        return " ".join(value for name, value in labels.items() if name != "__name__")
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), form)


def take(page: Path, picture: Path, height: int) -> None:
    """A screenshot of the whole page. RuntimeError when there is no Chromium or it fails."""
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser is None:
        raise RuntimeError("there is no Chromium here (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={WIDTH},{height}",
            f"--screenshot={picture}", page.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    if not picture.exists():
        raise RuntimeError(f"{browser} has taken no picture: {done.stderr[-500:]}")
    # Few colours are enough for charts, and a fraction of the bytes.
    with Image.open(picture) as full:
        full.convert("RGB").quantize(NUM_COLOURS).save(picture, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prometheus", help="its URL")
    parser.add_argument("folder", type=Path, help="for DASHBOARD.png")
    parser.add_argument("--seconds", type=float, default=1800, help="how far back to look")
    parser.add_argument("--end", type=float, default=time.time(), help="unix seconds; now")
    parser.add_argument("--keep-pages", action="store_true", help="leave the HTML pages there")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with Drawer(options.prometheus, options.seconds, options.end) as drawer:
        for path in sorted(DASHBOARDS.glob("*.json")):
            name = f"dashboard-{path.stem.removeprefix('epserve-')}"
            text, height = drawer.page(json.loads(path.read_text()))
            page = (options.folder / f"{name}.html").absolute()
            page.write_text(text)
            take(page, (options.folder / f"{name}.png").absolute(), height)
            if not options.keep_pages:
                page.unlink()
            print(options.folder / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
