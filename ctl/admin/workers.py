"""`ctl workers`: one line a worker."""

import time
from typing import Any

from rich.console import Console

from ctl.admin.connection import AdminConnection, admin_command
from ctl.admin.status import age_seconds, describe_worker, get_status
from ctl.base.output import Output, show
from ctl.base.tables import format_age, make_table
from proto import worker_pb2


@admin_command
async def workers(admin: AdminConnection, output: Output = "table") -> None:
    """Lists the workers: state, load, KV use."""
    reply = await get_status(admin)
    reasons = {each.identity.epoch: each.reason for each in reply.rejected}
    now = time.time()
    show([_describe(worker, reasons, now) for worker in reply.workers], output, _print)


def _describe(
    worker: worker_pb2.WorkerStatus, reasons: dict[str, str], now: float
) -> dict[str, Any]:
    total = sum(rank.pages_total for rank in worker.ranks)
    free = sum(rank.pages_free for rank in worker.ranks)
    return describe_worker(worker) | {
        "num_running": sum(rank.num_running for rank in worker.ranks),
        "num_waiting": sum(rank.num_waiting for rank in worker.ranks),
        "kv_usage": round(1 - free / total, 4) if total else 0.0,
        "age_seconds": age_seconds(worker.identity, now),
        "rejected": reasons.get(worker.identity.epoch, ""),
    }


def _print(report: list[dict[str, Any]], console: Console) -> None:
    counts = ("ranks", "open", "running", "waiting", "KV", "accepted")
    table = make_table(
        "worker", "role", "version", "state", "address", *counts, "age", right=counts
    )
    for each in report:
        table.add_row(
            each["name"],
            each["role"],
            each["version"],
            "rejected" if each["rejected"] else each["state"],
            each["address"],
            str(len(each["ranks"])),
            *(str(each[key]) for key in ("num_open", "num_running", "num_waiting")),
            f"{each['kv_usage']:.0%}",
            str(each["num_accepted_total"]),
            format_age(each["age_seconds"]),
        )
    console.print(table)
    for each in report:
        if each["rejected"]:
            console.print(f"rejected: {each['name']}: {each['rejected']}")
