"""`python -m ctl` is `ctl`."""

from ctl.main import app

app(prog_name="ctl")
