"""`ctl up`: a cluster on this machine, from its layout to the processes that are kept running.

From outside: the command (for `ctl.main`), and `readiness` for `ctl probe`.
"""
