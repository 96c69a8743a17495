"""docs/formats.md, made from the registry of formats of tool calls and thoughts.

python scripts/formats_doc.py           # writes the page
python scripts/formats_doc.py --check   # fails when the page is not what it would write
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gateway.formats.registry import REASONING_FORMATS, TOOL_FORMATS  # noqa: E402 - needs the path
from gateway.requests.thinking_fields import NO_THOUGHTS, THINKING_SWITCHES  # noqa: E402
from scripts import configuration_doc  # noqa: E402

PAGE = ROOT / "docs" / "formats.md"

HEADER = """# Formats of tool calls and thoughts

Made by `make docs` from the code; do not edit.

The gateway reads what a model writes and answers with OpenAI's `tool_calls` and with
`reasoning_content`. It knows the format by the checkpoint: by the marks in its chat template, or
else among its tokens. `--tool-call-parser` and `--reasoning-parser` name one.

A format is one file of `gateway/formats/`. It says how calls are written, for the grammar that
forces or bounds them, and how they are read, for the parser.
"""

TOOLS = """
## Tool calls

Marks inside the strings of arguments are text. So are marks that no call follows. Arguments that
are no object are handed out as the model wrote them. Calls get ids of their own, except Kimi-K2's,
which are the model's.
"""

THOUGHTS = """
## Thoughts

Both marks must be tokens of the model. The prompt or the model may open the thoughts.
"""

RULES = """
## What a request may combine

| request | what the output is |
|---|---|
| `tools` | text, calls, or text and calls |
| `tools`, some `strict` | the same; arguments of those keep to their schemas |
| `tool_choice`: `required`, a name | calls that keep to their schemas, whatever the format |
| `tools` and a format (`response_format`, `regex`, ...) | an answer in the format, or calls |
| a format | an answer in the format |

Thoughts, if there are any, come before all of these and are free: whether the prompt opens them or
the model does. A `thinking_budget` bounds their tokens; at its end they are closed.

`thinking`, and {switches} in `chat_template_kwargs`, and `reasoning_effort` say the same to a chat
template, by the names it knows. {none} of `reasoning_effort` mean no thoughts. What the template
cannot do is refused by name: thoughts of a model that has none, none of a model that always thinks,
or a level where a template has neither levels nor a switch.
"""


def page() -> str:
    """The whole of docs/formats.md."""
    switches = " or ".join(f"`{name}`" for name in THINKING_SWITCHES)
    none = " and ".join(f"`{name}`" for name in NO_THOUGHTS)
    rules = RULES.format(switches=switches, none=none)
    return "\n".join([HEADER, TOOLS, *_tools(), THOUGHTS, *_thoughts()]) + "\n" + rules


def _tools() -> Iterator[str]:
    yield "| `--tool-call-parser` | models | several calls | how a call is written |"
    yield "|---|---|---|---|"
    for form in TOOL_FORMATS:
        example = form.write(form.call("NAME", '{"a": 1}'))
        several = "yes" if form.has_several else "no"
        shown = example.replace("\n", "\\n").replace("|", "\\|")
        yield f"| `{form.name}` | {form.models} | {several} | ``{shown}`` |"


def _thoughts() -> Iterator[str]:
    yield "| `--reasoning-parser` | models | between | ended as well by |"
    yield "|---|---|---|---|"
    for form in REASONING_FORMATS:
        also = f"`{form.also_ends_at}`".replace("|", "\\|") if form.also_ends_at else ""
        yield f"| `{form.name}` | {form.models} | `{form.opens}`, `{form.closes}` | {also} |"


if __name__ == "__main__":
    sys.exit(configuration_doc.main(sys.argv[1:], PAGE, page()))
