"""`ctl doctor`: checks of a machine. From outside: the command, for `ctl.main`."""
