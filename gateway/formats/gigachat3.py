"""Tool calls of GigaChat3 and GigaChat3.1: one call, a JSON object that has its name in it.

GigaChat3 writes it as a message of its own behind the answer's, 3.1 behind a mark.
"""

import re

from gateway.formats.tool_format import ToolFormat

ROLE_END, MESSAGE_END, FUNCTION_CALL = "<|role_sep|>", "<|message_sep|>", "<|function_call|>"

GIGACHAT31 = ToolFormat(
    name="gigachat3",
    models="GigaChat3.1",
    begins=(FUNCTION_CALL,),
    call_begin="",
    head='{"name": "NAME", "arguments": ',
    head_read=re.compile(
        r'\s*+\{\s*+"name"\s*+:\s*+"(?P<name>[^"\\<{}]++)"\s*+,\s*+"arguments"\s*+:\s*+(?=\S)'
    ),
    tail="",
    call_end="}",
    between="",
    end="",
    marks=(FUNCTION_CALL,),
    signs=(FUNCTION_CALL, ROLE_END),
)
_BEGIN = f"function call{ROLE_END}\n"
GIGACHAT3 = GIGACHAT31._replace(
    models="GigaChat3",
    begins=(f"{MESSAGE_END}\n\n{_BEGIN}", _BEGIN),
    marks=(MESSAGE_END, ROLE_END),
    signs=("function call", ROLE_END),
)
