"""`ctl plan`: whether a model fits GPUs, before anything is started, and what to change.

From outside: the command (for `ctl.main`); for `ctl up` and `ctl doctor`, which ask first,
`asking`, `cards`, `layouts` and `report`. engine/planning, a process of its own, has the answers.
"""
