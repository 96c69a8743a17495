"""`ctl chaos`: faults for a cluster of `ctl up`, drawn from a seed or read from a scenario.

From outside: the command (for `ctl.main`), and for benchmarks `faults` and `injector`.
"""
