"""The operator's command line: starts clusters, looks at them, changes and measures them.

Data goes to stdout, words about trouble to stderr; exit status 0 is success, 1 failure, 2 usage.
"""

import typer

from ctl import probe
from ctl.bench import bench
from ctl.expert_load import expert_load
from ctl.rebalance_experts import rebalance_experts
from ctl.status import status
from ctl.up import up

app = typer.Typer(
    name="ctl",
    help="Operates epserve: disaggregated serving of DeepSeek-V3-architecture models.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command()(up)
app.command()(status)
app.command()(bench)
app.command()(expert_load)
app.command()(rebalance_experts)
app.add_typer(probe.app, name="probe")
