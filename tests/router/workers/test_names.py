"""A worker whose own words cannot be shown is given no requests."""

import pytest

from proto.worker_pb2 import ROLE_DECODE
from router.workers.worker import status_problem
from tests.router.statuses import make_status


@pytest.mark.parametrize(
    ("field", "text"),
    [("name", "d\x1b[2J"), ("name", "d\n"), ("name", "d" * 129), ("version", "1\u202e")],
)
def test_it_is_refused(field: str, text: str) -> None:
    status = make_status("decode", "epoch")
    assert status_problem(status, ROLE_DECODE) == ""
    setattr(status.identity, field, text)
    problem = status_problem(status, ROLE_DECODE)
    assert problem.startswith(f"its {field}")
    assert problem.isprintable()
