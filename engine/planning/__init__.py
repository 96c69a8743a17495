"""Whether an EP group fits its GPUs, on a machine that has none: what `ctl plan` asks.

`python -m engine.planning` is the process; it decides with what ranks decide with at their start.
"""
