"""Lines of product Python by folder, against the budget: `python scripts/line_budget.py`.

The budget, scripts/line_budget.json, only falls; a commit that raises a number names the feature
that needs it. Generated stubs and tests do not count. Exits 1 where a folder is above its number or
has none.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from style import tracked_python

BUDGET = Path(__file__).with_name("line_budget.json")
# Not part of what a user installs; all others are the core.
BESIDE = ("bench", "demo_model", "scripts")


def count() -> Counter[str]:
    """Lines by top-level folder."""
    lines: Counter[str] = Counter()
    for path in tracked_python():
        if path.parts[0] != "tests":
            lines[path.parts[0]] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def main() -> int:
    budget: dict[str, int] = json.loads(BUDGET.read_text(encoding="utf-8"))
    lines = count()
    for folder in sorted(lines):
        print(f"{folder:16} {lines[folder]:6} of {budget.get(folder, 0):6}")
    core = sum(number for folder, number in lines.items() if folder not in BESIDE)
    print(f"{'core':16} {core:6}\n{'all':16} {lines.total():6}")
    above = [folder for folder in lines if lines[folder] > budget.get(folder, 0)]
    if above:
        print(f"above the budget of {BUDGET.name}: {', '.join(sorted(above))}")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
