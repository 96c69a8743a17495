"""Writes the table of checkpoint formats in docs/quantization.md from the code, or, with --check,
fails if it is stale."""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from model.checkpoint_formats import FORMATS, CheckpointFormat  # noqa: E402 - needs the path above

PAGE = ROOT / "docs" / "quantization.md"
BEGIN, END = (f"<!-- checkpoint_formats_doc.py: {end} -->\n" for end in ("begin", "end"))


def page(text: str) -> str:
    """The page with its table as it should be."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + "\n".join(_table()) + "\n" + END + after


def _table() -> Iterator[str]:
    yield "| `quant_method` | routed experts | the rest | tensors of a matrix | config.json |"
    yield "|---|---|---|---|---|"
    for one in FORMATS:
        tensors = ", ".join(f"`{name}`" for name in one.tensors)
        name = f"`{one.method}`" if one.method else "none"
        yield f"| {name} | {one.experts} | {one.rest} | {tensors} | {_fields(one)} |"


def _fields(one: CheckpointFormat) -> str:
    return "; ".join(
        f"`{name.rpartition('.')[2]}` " + " or ".join(map(_shown, values))
        for name, values in one.fields.items()
    )


def _shown(value: object) -> str:
    return "absent" if value is None else str(value) if value != "" else "empty"


def main(arguments: list[str]) -> int:
    text = PAGE.read_text(encoding="utf-8")
    made = page(text)
    if arguments == ["--check"]:
        if text != made:
            print(f"{PAGE.relative_to(ROOT)} is stale: make docs")
        return int(text != made)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
