"""Texts that processes choose themselves, as every admin command shows them."""

from typing import Any

import pytest
from typer.testing import CliRunner

from core.errors import Unavailable
from ctl.main import app
from proto import router_pb2, worker_pb2
from tests.ctl.admin.admin_server import ScriptedAdmin, admin_server

RUNNER = CliRunner(env={"COLUMNS": "400", "TERM": "dumb", "NO_COLOR": "1"})
EVIL = "decode-0\x1b[2J\n\x9bforged \u202eline"
SHOWN = r"decode-0\x1b[2J\n\x9bforged \u202eline"

IDENTITY = worker_pb2.ProcessIdentity(
    role=worker_pb2.ROLE_DECODE, name=EVIL, address=EVIL, epoch=EVIL, version=EVIL
)
WORKER = worker_pb2.WorkerStatus(
    identity=IDENTITY, model=EVIL, ranks=[worker_pb2.RankStatus(device=EVIL)]
)
REJECTED = router_pb2.RejectedWorker(identity=IDENTITY, reason=EVIL)
STATUS = router_pb2.GetStatusResponse(
    processes=[IDENTITY], workers=[WORKER], rejected=[REJECTED], paired_epochs=[EVIL]
)
CONFIG = router_pb2.GetProcessConfigResponse(
    processes=[
        router_pb2.ProcessConfig(
            identity=IDENTITY, config_json='{"log_level": "\\u001b[2J\\n", "\\u001bx": 1}'
        )
    ]
)
WORKER_REF = router_pb2.WorkerRef(name=EVIL, address=EVIL, epoch=EVIL)
EXPLAINED = router_pb2.AdminExplainResponse(
    assignments=[
        router_pb2.AssignmentRecord(
            leg_id=EVIL,
            outcome="ok",
            candidates=[
                router_pb2.Candidate(worker=WORKER_REF, parts=[router_pb2.ScorePart(scorer=EVIL)]),
                router_pb2.Candidate(worker=WORKER_REF, rejected_by=EVIL),
            ],
        )
    ],
    legs=[worker_pb2.RequestLeg(leg_id=EVIL, worker=IDENTITY)],
    unreachable=[EVIL],
)


@pytest.mark.parametrize(
    ("command", "replies", "is_shown"),
    [
        (["status"], {"GetStatus": STATUS}, True),
        (["workers"], {"GetStatus": STATUS}, True),
        (["config"], {"GetConfig": CONFIG}, True),
        (["explain", "chatcmpl-1"], {"ExplainRequest": EXPLAINED}, True),
        (["status"], {"GetStatus": Unavailable(EVIL)}, True),
        (["probe", "pair", "decode-9"], {"GetStatus": Unavailable(EVIL)}, True),
    ],
)
def test_nothing_of_them_is_obeyed(
    command: list[str], replies: dict[str, Any], *, is_shown: bool
) -> None:
    admin = ScriptedAdmin(**replies)
    with admin_server(admin) as router:
        done = RUNNER.invoke(app, [*command, "--router", router])
    text = done.output
    assert admin.calls, text
    assert all(line.isprintable() for line in text.split("\n")), repr(text)
    assert not any(line.startswith(("forged", r"\x9bforged")) for line in text.split("\n"))
    assert not is_shown or SHOWN in text
