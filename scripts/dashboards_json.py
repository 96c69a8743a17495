"""The chart's Grafana dashboards, made from scripts/dashboards.

python scripts/dashboards_json.py           # writes deploy/helm/epserve/dashboards/*.json
python scripts/dashboards_json.py --check   # fails when a file is not what it would write
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: E402 - needs the path above
from grafana_foundation_sdk.cog.plugins import register_default_plugins  # noqa: E402
from grafana_foundation_sdk.models.dashboard import Dashboard  # noqa: E402

from scripts.dashboards.cluster import cluster  # noqa: E402
from scripts.dashboards.experts import experts  # noqa: E402
from scripts.dashboards.requests import requests  # noqa: E402
from scripts.dashboards.transfer import transfer  # noqa: E402
from scripts.dashboards.worker import worker  # noqa: E402

FOLDER = ROOT / "deploy" / "helm" / "epserve" / "dashboards"
DASHBOARDS = (cluster, requests, transfer, experts, worker)


def files() -> dict[str, str]:
    """File name to content."""
    register_default_plugins()
    made = {}
    for make in DASHBOARDS:
        board = make().build()
        for number, panel in enumerate(board.panels or (), start=1):
            panel.id_val = number
        # Keys in order: what a change changes is then all that a diff shows.
        text = json.dumps(_as_read_again(board), indent=1, sort_keys=True)
        made[f"{board.uid}.json"] = text + "\n"
    return made


def _as_read_again(board: Dashboard) -> Any:  # noqa: ANN401 - JSON
    """With the defaults that the model adds when it reads."""
    read = Dashboard.from_json(json.loads(JSONEncoder().encode(board)))
    return json.loads(JSONEncoder().encode(read))


def main(arguments: list[str]) -> int:
    made = files()
    there = {path.name: path for path in FOLDER.glob("*.json")}
    if arguments == ["--check"]:
        stale = [
            name for name in made if name not in there or there[name].read_text() != made[name]
        ]
        stale += sorted(there.keys() - made.keys())
        if stale:
            print(f"stale dashboards: {', '.join(stale)}: make docs")
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, path in there.items():
        if name not in made:
            path.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
