"""Commands that look at and change a running cluster, through its router's admin service.

From outside: the commands (for `ctl.main`), and the labels that `port_forward` selects pods by.
"""
