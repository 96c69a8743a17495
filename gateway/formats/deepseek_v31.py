"""Tool calls of DeepSeek-V3.1 and V3.1-Terminus: the name, then JSON."""

import re

from gateway.formats.tool_format import ToolFormat

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    models="DeepSeek-V3.1, V3.1-Terminus",
    begins=(CALLS_BEGIN,),
    call_begin=CALL_BEGIN,
    head=f"NAME{SEPARATOR}",
    head_read=re.compile(rf"\s*+(?P<name>[^\n<]++)(?:{SEPARATOR}\s*+(?=\S)|(?={CALL_END}))"),
    tail="",
    call_end=CALL_END,
    between="",
    end=CALLS_END,
    marks=(CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END),
    signs=(SEPARATOR,),
)
