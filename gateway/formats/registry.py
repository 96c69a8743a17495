"""All formats, by the names that SGLang and vLLM have for them, and which one a checkpoint has."""

from collections.abc import Callable
from typing import Literal

from gateway.formats.deepseek_r1 import DEEPSEEK_R1
from gateway.formats.deepseek_r1 import DEEPSEEK_V3 as DEEPSEEK_V3_THOUGHTS
from gateway.formats.deepseek_v3 import DEEPSEEK_V3
from gateway.formats.deepseek_v31 import DEEPSEEK_V31
from gateway.formats.gigachat3 import GIGACHAT3, GIGACHAT31
from gateway.formats.kimi_k2 import KIMI_K2, KIMI_K2_THOUGHTS
from gateway.formats.reasoning_format import ReasoningFormat
from gateway.formats.tool_format import ToolFormat

ToolParser = Literal["auto", "deepseek_v3", "deepseek_v31", "kimi_k2", "gigachat3"]
ReasoningParser = Literal["auto", "off", "deepseek_r1", "deepseek_v3", "kimi_k2"]

# Those with more signs come first: the first whose signs a template has is its own.
TOOL_FORMATS = (DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, GIGACHAT31, GIGACHAT3)
REASONING_FORMATS = (DEEPSEEK_R1, DEEPSEEK_V3_THOUGHTS, KIMI_K2_THOUGHTS)


def tool_format(name: ToolParser, template: str, is_token: Callable[[str], bool]) -> ToolFormat:
    """The one of that `name`; for `auto`, and where a name stands for several, that which
    `template` writes, else that whose marks are all tokens, else the first."""
    named = [one for one in TOOL_FORMATS if name in ("auto", one.name)]
    by_template = (one for one in named if all(sign in template for sign in one.signs))
    by_tokens = (one for one in named if all(map(is_token, one.marks)))
    return next(by_template, None) or next(by_tokens, None) or named[0]


def reasoning_format(name: ReasoningParser, tools: ToolFormat) -> ReasoningFormat | None:
    """The one of that `name`; for `auto` that of the models that write such `tools`."""
    if name == "off":
        return None
    wanted = tools.name if name == "auto" else name
    return next((one for one in REASONING_FORMATS if one.name == wanted), DEEPSEEK_R1)
