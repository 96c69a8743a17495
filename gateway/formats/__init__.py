"""How models write tool calls and thoughts: one file a format, `registry.py` has them all."""
