"""Thoughts of DeepSeek-R1 and of those that think when they are asked to."""

from gateway.formats.reasoning_format import ReasoningFormat

DEEPSEEK_R1 = ReasoningFormat("deepseek_r1", "DeepSeek-R1, R1-0528", "<think>", "</think>")
DEEPSEEK_V3 = DEEPSEEK_R1._replace(name="deepseek_v3", models="DeepSeek-V3.1 and later")
