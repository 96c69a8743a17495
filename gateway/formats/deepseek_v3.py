"""Tool calls of DeepSeek-V3, V3-0324, R1 and R1-0528: JSON in a fence.

Those of V3.1's form are read as well: templates of one are used with checkpoints of the other.
"""

import re

from gateway.formats.deepseek_v31 import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from gateway.formats.deepseek_v31 import DEEPSEEK_V31 as V31

_FENCED = (
    rf"function{SEPARATOR}(?P<name>[^\n<]++)"
    rf"(?:\n\s*+(?:```\w*+\s*+)?+(?=[^\s`<])|\s*+(?:```\w*+\s*+){{0,2}}+(?={CALL_END}))"
)
_PLAIN = rf"(?!function{SEPARATOR})(?P<plain>[^\n<]++){SEPARATOR}\s*+(?=\S)"

DEEPSEEK_V3 = V31._replace(
    name="deepseek_v3",
    models="DeepSeek-V3, V3-0324, R1, R1-0528",
    begins=(CALLS_BEGIN,),
    call_begin=CALL_BEGIN,
    head=f"function{SEPARATOR}NAME\n```json\n",
    head_read=re.compile(rf"\s*+(?:{_FENCED}|{_PLAIN})"),
    tail="\n```",
    between="\n",
    end=CALLS_END,
    signs=(SEPARATOR, "```json"),
)
