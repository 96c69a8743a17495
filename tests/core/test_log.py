"""Log lines as an operator sees them: on stderr of a real process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.log import REQUEST_ID, configure, request_context, set_level

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import logging, sys
from core.log import configure, current_level, get_logger, request_context, set_level
early = get_logger("early")
configure("router", "r0", "info", sys.argv[1])
log = get_logger("router.x")
log.info("plain", num=1)
log.debug("not shown")
early.info("made before configure")
with request_context("req-1"):
    log.warning("inside")
    logging.getLogger("library").warning("from %s", "stdlib")
    try:
        prompt = "private words"
        int(prompt[:0])
    except ValueError:
        log.exception("failed")
log.info("outside")
assert set_level("DEBUG") == "info"
log.debug("shown now")
logging.getLogger("library").debug("this too")
assert set_level("error") == "debug"
assert current_level() == "error"
log.warning("hidden")
early.error("last")
"""


def run(fmt: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, fmt],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_json_lines_carry_process_and_request() -> None:
    done = run("json")
    assert done.stdout == ""
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stderr.splitlines()]
    events = [line["event"] for line in lines]
    assert events == [
        "plain", "made before configure", "inside", "from stdlib", "failed", "outside",
        "shown now", "this too", "last",
    ]  # fmt: skip
    assert all((line["role"], line["process"]) == ("router", "r0") for line in lines)
    assert [line.get("request_id") for line in lines] == [
        *[None] * 2, *["req-1"] * 3, *[None] * 4,
    ]  # fmt: skip
    assert lines[0]["num"] == 1
    assert lines[0]["logger"] == "router.x"
    assert lines[3]["level"] == "warning"
    assert "ValueError" in lines[4]["exception"]


def test_console_shows_no_local_variables() -> None:
    text = run("console").stderr
    assert "ValueError" in text
    assert "private words" not in text.replace('prompt = "private words"', "")


def test_a_text_in_a_traceback_is_not_obeyed() -> None:
    program = (
        "import sys\n"
        "from core.log import configure, get_logger\n"
        "configure('gateway', 'g', 'info', sys.argv[1])\n"
        "try:\n"
        "    raise ValueError('\\x1b[2J')\n"
        "except ValueError:\n"
        "    get_logger('x').exception('failed\\nforged', name='a\\nb')\n"
    )
    lines = run("console", program).stderr.rstrip("\n").split("\n")
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith(("forged", "b")) for line in lines)
    assert lines[-1] == r"ValueError: \x1b[2J"


@pytest.mark.parametrize("fmt", ["console", "json"])
def test_terminals_are_told_nothing_to_obey(fmt: str) -> None:
    program = (
        "import sys\n"
        "from core.log import configure, get_logger\n"
        "configure('gateway', 'g', 'info', sys.argv[1])\n"
        "get_logger('x').info('answered', path='/\\x1b[2J\\x9b31m\\x07', status=404)\n"
    )
    line = run(fmt, program).stderr
    assert line.rstrip("\n").isprintable()
    assert "[2J" in line
    assert "404" in line


def test_the_request_id_is_restored() -> None:
    with request_context("a"):
        with request_context("b"):
            assert REQUEST_ID.get() == "b"
        assert REQUEST_ID.get() == "a"
    assert REQUEST_ID.get() == ""


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        configure("router", "r0", "loud", "json")
    with pytest.raises(ValueError, match="use one of debug, info"):
        set_level("loud")
