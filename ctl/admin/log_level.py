"""`ctl logs-level`: how much processes log, changed while they run."""

from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from ctl.admin.connection import AdminConnection, admin_command
from ctl.admin.message_dict import message_dict
from ctl.admin.names import ProcessName
from ctl.base.output import Output, show
from ctl.base.tables import make_table
from proto.router_pb2 import SetProcessLogLevelRequest


@admin_command
async def logs_level(
    admin: AdminConnection,
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Argument(help="Least level that is logged", show_default=False),
    ],
    process: ProcessName = "",
    output: Output = "table",
) -> None:
    """Sets the level that processes log from, until they restart; gateways follow in a second.

    Exit status 1 if some process could not be told.
    """
    request = SetProcessLogLevelRequest(process=process, level=level)
    reply = await admin.call(admin.stub.SetLogLevel, request)
    report = [message_dict(each) for each in reply.processes]
    for row in report:
        row |= {"before": row.pop("previous"), "now": "" if row["error"] else level}
    show(report, output, _print)
    if any(row["error"] for row in report):
        raise typer.Exit(1)


def _print(report: list[dict[str, Any]], console: Console) -> None:
    table = make_table("process", "role", "address", "before", "now", fold="now")
    for row in report:
        now = row["now"] or f"not set: {row['error']}"
        table.add_row(row["name"], row["role"], row["address"], row["before"], now)
    console.print(table)
