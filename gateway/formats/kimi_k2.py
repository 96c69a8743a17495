"""Tool calls and thoughts of Kimi-K2. A call's id is the model's own, and later turns name it."""

import re

from gateway.formats.reasoning_format import ReasoningFormat
from gateway.formats.tool_format import ToolFormat

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"

KIMI_K2 = ToolFormat(
    name="kimi_k2",
    models="Kimi-K2-Instruct, Kimi-K2-Thinking",
    begins=(SECTION_BEGIN,),
    call_begin=CALL_BEGIN,
    head=f"functions.NAME:IDX{ARGUMENTS_BEGIN}",
    head_read=re.compile(
        r"\s*+(?P<id>(?:functions\.)?(?P<name>[^\s<:]++)(?::\d++)?+)"
        rf"\s*+{re.escape(ARGUMENTS_BEGIN)}\s*+(?=\S)"
    ),
    tail="",
    call_end=CALL_END,
    between="",
    end=SECTION_END,
    marks=(SECTION_BEGIN, CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END, SECTION_END),
    signs=(SECTION_BEGIN,),
)
KIMI_K2_THOUGHTS = ReasoningFormat(
    "kimi_k2", "Kimi-K2-Thinking", "<think>", "</think>", also_ends_at=SECTION_BEGIN
)
