"""`ctl plan`: whether a model fits GPUs, before anything is started, and what to change.

From outside: the command (for `ctl.main`); `questions`, `asking` and `report` for those that ask
first, `ctl up` and `ctl doctor`. engine/planning, a process of its own, has the answers.
"""
