"""`ctl config`: the settings that processes run with."""

import json
from typing import Any

import typer
from rich.console import Console

from core.printable import printable
from ctl.admin.connection import AdminConnection, admin_command
from ctl.admin.message_dict import message_dict
from ctl.admin.names import ProcessName
from ctl.base.output import Output, show
from ctl.base.tables import make_table
from proto.router_pb2 import GetProcessConfigRequest


@admin_command
async def config(
    admin: AdminConnection, process: ProcessName = "", output: Output = "table"
) -> None:
    """Shows version and settings of running processes, as flags and environment made them.

    Secrets are left out. Exit status 1 if some process did not tell.
    """
    reply = await admin.call(admin.stub.GetConfig, GetProcessConfigRequest(process=process))
    report = [message_dict(each) for each in reply.processes]
    for each in report:
        each["settings"] = json.loads(each.pop("config_json") or "{}")
    show(report, output, _print)
    if any(each["error"] for each in report):
        raise typer.Exit(1)


def _print(report: list[dict[str, Any]], console: Console) -> None:
    for number, each in enumerate(report):
        if number:
            console.print()
        version = f", version {each['version']}" if each["version"] else ""
        title = f"{each['name']} ({each['role']}, {each['address']}{version})"
        console.print(title, soft_wrap=True)
        if each["error"]:
            console.print(f"  does not tell: {each['error']}", soft_wrap=True)
            continue
        table = make_table("setting", "value", fold="value")
        for name, value in each["settings"].items():
            table.add_row(printable(name), _text(value))
        console.print(table)


def _text(value: object) -> str:
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, list):
        return printable(",".join(map(str, value)))
    return str(value).lower() if isinstance(value, bool) else printable(str(value))
