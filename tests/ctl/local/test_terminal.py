"""What `ctl up` tells: folders as they are, commands that work."""

import os
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ctl.base.output import make_console
from ctl.local.cluster_options import ClusterOptions
from ctl.local.layout import Machine, cluster
from ctl.local.process_spec import ProcessSpec
from ctl.local.terminal import Terminal


def test_folders_with_brackets(tmp_path: Path) -> None:
    log = tmp_path / "logs[today]" / "router.log"
    log.parent.mkdir()
    log.write_text("[/] no such setting\n")
    options = ClusterOptions(model=Path("/models/v3[fp8]"), served_model_name="v3[/fp8]")
    shown = StringIO()
    terminal = Terminal(Console(file=shown, width=200), [], options, log.parent)
    terminal.begin()
    terminal.all_ready(1.0)
    terminal.gave_up("router", 2)
    text = shown.getvalue()
    assert "model: /models/v3[fp8] as v3[/fp8]" in text
    assert f"Logs:   {log.parent}/NAME.log" in text
    assert f"end of {log}:\n  | [/] no such setting\n" in text


def test_how_to_ask_a_gateway_with_a_certificate() -> None:
    options = ClusterOptions(model=Path("/models/v3"), served_model_name="v3")
    gateway = ProcessSpec(
        name="gateway", role="gateway", address="127.0.0.1:8000",
        metrics_address="127.0.0.1:8000", flags={"tls-cert": "tls.crt"},
    )  # fmt: skip
    shown = StringIO()
    Terminal(Console(file=shown, width=200), [gateway], options, Path("/logs")).all_ready(1.0)
    assert "https://127.0.0.1:8000/metrics" in shown.getvalue()
    assert "curl --insecure https://127.0.0.1:8000/v1/chat/completions" in shown.getvalue()


@pytest.mark.parametrize("flag", ["api-keys", "api-keys-file", "max-inflight"])
def test_how_to_ask_a_gateway_with_keys(flag: str) -> None:
    options = ClusterOptions(model=Path("/models/v3"), served_model_name="v3")
    gateway = ProcessSpec(
        name="gateway", role="gateway", address="127.0.0.1:8000",
        metrics_address="127.0.0.1:8000", flags={flag: "100"},
    )  # fmt: skip
    shown = StringIO()
    Terminal(Console(file=shown, width=200), [gateway], options, Path("/logs")).all_ready(1.0)
    has_key = "-H 'authorization: Bearer KEY' -d" in shown.getvalue()
    assert has_key == (flag != "max-inflight")


def test_how_long_a_stop_may_take() -> None:
    options = ClusterOptions(model=Path("/models/v3"), served_model_name="v3")
    specs = cluster(options, Machine(num_cores=2), iter(range(9000, 9010)))
    shown = StringIO()
    terminal = Terminal(Console(file=shown, width=200), specs, options, Path("/logs"))
    terminal.stopping(["gateway", "router"])
    terminal.stopping(["router", "decode-0"])
    assert shown.getvalue().splitlines() == [
        "stopping gateway, router; running requests may take 30 s more (Ctrl-C again: at once)",
        "stopping router, decode-0 (Ctrl-C again: at once)",
    ]


@pytest.mark.parametrize("gone", ["disk", "pipe"])
def test_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch, gone: str, tmp_path: Path) -> None:
    """That is no reason to end a cluster."""
    if gone == "disk":
        output = Path("/dev/full").open("w")  # noqa: SIM115
    else:
        reader, writer = os.pipe()
        os.close(reader)
        output = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", output)
    options = ClusterOptions(model=Path("/models/v3"), served_model_name="v3")
    terminal = Terminal(make_console(lasting=True, markup=True), [], options, tmp_path)
    terminal.begin()
    terminal.all_ready(1.0)
    terminal.died("decode-0", -9, 0.5)
    terminal.gave_up("decode-0", 127)
    terminal.stopping(["router"])
    with suppress(OSError):
        output.close()


@pytest.mark.parametrize("on_path", [True, False])
def test_how_to_call_ctl(tmp_path: Path, on_path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ctl = tmp_path / "[bin]" / "ctl"
    ctl.parent.mkdir()
    ctl.write_text("#!/bin/sh\n")
    ctl.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(ctl.with_name("python")))
    monkeypatch.setenv("PATH", str(ctl.parent if on_path else tmp_path))
    shown = StringIO()
    options = ClusterOptions(model=Path("/models/v3"), served_model_name="v3")
    Terminal(Console(file=shown, width=200), [], options, tmp_path).all_ready(1.0)
    command = "ctl" if on_path else f"'{ctl}'"
    assert f"Status: {command} status --router 127.0.0.1:" in shown.getvalue()
