"""Tools told to a model whose own chat template does not know of them.

The public templates of DeepSeek-V3 and R1 render calls and their results, but not the tools that
there are. Those are then put at the end of the system message, in the words that V3.1 was trained
on and with the form of calls that the template renders.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.formats.tool_format import ToolFormat

EXAMPLE = '{"argument": "value"}'


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: ToolFormat
) -> list[Mapping[str, Any]]:
    """The messages, the first system one (a new one, if there is none) ending with `tools`."""
    told = _told(tools, form)
    for position, message in enumerate(messages):
        if message["role"] == "system":
            content = f"{message['content']}\n\n{told}"
            before, after = messages[:position], messages[position + 1 :]
            return [*before, {**message, "content": content}, *after]
    return [{"role": "system", "content": told}, *messages]


def _told(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    parts = ["## Tools\nYou have access to the following tools:"]
    for tool in tools:
        function = tool["function"]
        parameters = json.dumps(function.get("parameters", {}), ensure_ascii=False)
        parts.append(
            f"### {function['name']}\nDescription: {function.get('description', '')}\n\n"
            f"Parameters: {parameters}"
        )
    several = f"Several calls stand one behind the other before {form.end}. " if form.end else ""
    parts.append(
        f"To call a tool, answer in exactly this form:\n"
        f"{form.write(form.call('TOOL_NAME', EXAMPLE))}\n{several}The arguments are JSON "
        "that fits the tool's parameters. Call no tool that is not listed here."
    )
    return "\n\n".join(parts)
