"""Constraints on what a model may write: JSON schemas, regular expressions, tool calls.

They are compiled in a process of their own, `grammar_process`.
"""
