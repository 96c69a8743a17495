"""How calls are written by the model that is served, for grammars that force one."""

from typing import Any, NamedTuple

from gateway.output.tool_call_parser import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR


class ToolForm(NamedTuple):
    """What stands around the arguments of a call; NAME in `head` is the tool's."""

    head: str
    tail: str
    between: str

    @classmethod
    def of_template(cls, source: str) -> "ToolForm":
        """V3.1's form where the template writes that; else that of V3 and R1."""
        return V31_FORM if SEPARATOR in source and "```json" not in source else V3_FORM

    def example(self) -> str:
        """A call, as a model is told to write it."""
        head = self.head.replace("NAME", "TOOL_NAME")
        return f'{CALLS_BEGIN}{head}{{"argument": "value"}}{self.tail}{CALLS_END}'

    def grammar_request(
        self,
        tools: list[tuple[str, str]],
        *,
        at_most_one: bool,
        instead: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """What `grammar_process` is asked for. `tools` are names and JSON schemas; `instead` of
        calls there may be what that request asks for."""
        return {
            "kind": "tool_calls",
            "tools": tools,
            "begin": CALLS_BEGIN,
            "end": CALLS_END,
            "at_most_one": at_most_one,
            "instead": instead,
            **self._asdict(),
        }


V3_FORM = ToolForm(
    head=f"{CALL_BEGIN}function{SEPARATOR}NAME\n```json\n", tail=f"\n```{CALL_END}", between="\n"
)
V31_FORM = ToolForm(head=f"{CALL_BEGIN}NAME{SEPARATOR}", tail=CALL_END, between="")
