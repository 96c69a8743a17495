"""docs/configuration.md, made from the settings classes: every flag of every process.

python scripts/configuration_doc.py           # writes the page
python scripts/configuration_doc.py --check   # fails when the page is not what it would write
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from annotated_types import Ge, Gt, Le, Lt, MaxLen  # noqa: E402 - needs the path above
from pydantic.fields import FieldInfo  # noqa: E402
from pydantic_core import PydanticUndefined  # noqa: E402

from core.settings import ProcessSettings  # noqa: E402
from engine.process.settings import WorkerSettings  # noqa: E402
from gateway.base.settings import GatewaySettings  # noqa: E402
from router.settings import RouterSettings  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"

HEADER = """# Configuration

Made by `make docs` from the code; do not edit.

Every process takes its settings from flags first, then from environment variables: `--max-waiting
512` and `EPSERVE_MAX_WAITING=512` say the same. A wrong flag or value ends the process with status
2 and a line that names it. `ctl config` shows what each process of a running cluster was told.
`ctl up` passes any of them on, `ctl up --set router.max-waiting=512`, and starts nothing when one
is wrong.
"""

PROCESSES = (
    ("Gateway", "python -m gateway", GatewaySettings),
    ("Router", "python -m router", RouterSettings),
    ("Workers", "python -m prefill_worker, python -m decode_worker", WorkerSettings),
)


def page() -> str:
    """The whole of docs/configuration.md."""
    common = set(ProcessSettings.model_fields)
    parts = [HEADER, "## Every process\n", *_table(ProcessSettings, common)]
    for title, command, settings in PROCESSES:
        commands = ", ".join(f"`{each}`" for each in command.split(", "))
        own = {
            name
            for name, field in settings.model_fields.items()
            if name not in common or _default(field) != _default(ProcessSettings.model_fields[name])
        }
        parts += [f"\n## {title}\n", f"{commands}\n", *_table(settings, own)]
    return "\n".join(parts) + "\n"


def _table(settings: type[ProcessSettings], names: set[str]) -> Iterator[str]:
    yield "| flag | value | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in settings.model_fields.items():
        if name in names:
            cells = (
                f"`--{name.replace('_', '-')}`", _value(field), _default(field),
                field.description or "",
            )  # fmt: skip
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default in ("", (), None):
        return ""
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _value(field: FieldInfo) -> str:
    """Kind and bounds of a value in words."""
    bounds = []
    for constraint in field.metadata:
        match constraint:
            case Ge(ge=bound):
                bounds.append(f">= {bound}")
            case Gt(gt=bound):
                bounds.append(f"> {bound}")
            case Le(le=bound):
                bounds.append(f"<= {bound}")
            case Lt(lt=bound):
                bounds.append(f"< {bound}")
            case MaxLen(max_length=bound):
                bounds.append(f"at most {bound} characters")
    return ", ".join([_kind(field.annotation), *bounds])


def _kind(annotation: Any) -> str:  # noqa: ANN401 - annotations are anything
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_kind(each) for each in arguments if each is not NoneType)
    if origin is tuple:
        return f"{_kind(arguments[0])}, ..."
    names = {bool: "switch", str: "text", int: "integer", float: "number", Path: "path"}
    return names[annotation]


def main(arguments: list[str], path: Path, made: str) -> int:
    """Writes the page, or checks (`--check`) that it is there as it would be written."""
    if arguments == ["--check"]:
        if not path.exists() or path.read_text() != made:
            print(f"{path.relative_to(ROOT)} is stale: make docs")
            return 1
        return 0
    path.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PAGE, page()))
