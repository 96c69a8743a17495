"""What `ctl up` tells the operator: a spinner and tables on a terminal, plain lines elsewhere."""

import shlex
import shutil
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from core.printable import printable
from ctl.base.python_process import describe_exit
from ctl.base.tables import make_table
from ctl.local.cluster_options import ClusterOptions
from ctl.local.log_files import log_path
from ctl.local.process_spec import ProcessSpec

_LOG_TAIL_LINES = 15


def _command() -> str:
    """What this shell finds `ctl` by: `make up` runs it without its folder on the PATH."""
    return "ctl" if shutil.which("ctl") else shlex.quote(str(Path(sys.executable).with_name("ctl")))


class Terminal:
    """The `Reporter` of `ctl up`."""

    def __init__(
        self,
        console: Console,
        specs: Sequence[ProcessSpec],
        options: ClusterOptions,
        log_folder: Path,
    ) -> None:
        self._console = console
        self._specs = {spec.name: spec for spec in specs}
        self._options = options
        self._log_folder = log_folder
        self._spinner = console.status("")
        self._pids: dict[str, int] = {}

    def begin(self) -> None:
        options = self._options
        self._say(
            f"epserve: starting gateway, {_count(options.routers, 'router')}, "
            f"{_count(options.prefill_workers, 'prefill worker')} of "
            f"{_count(options.prefill_ranks, 'rank')}, "
            f"{_count(options.decode_workers, 'decode worker')} of "
            f"{_count(options.num_decode_ranks, 'rank')} on {options.device}"
        )
        model, name = escape(str(options.model)), escape(options.served_model_name)
        self._say(f"model: {model} as [bold]{name}[/]")

    def started(self, name: str, pid: int) -> None:
        self._pids[name] = pid

    def waiting_for(self, names: Sequence[str]) -> None:
        if names and self._console.is_terminal:
            self._spinner.update(f"waiting for {', '.join(names)}")
            self._spinner.start()
        else:
            self._spinner.stop()

    def ready(self, name: str, seconds: float, again: bool) -> None:
        word = "ready again" if again else "ready"
        self._say(f"  [green]{name}[/] {word} after {seconds:.1f} s")

    def all_ready(self, seconds: float) -> None:
        self._spinner.stop()
        self._say(f"[bold green]ready[/] in {seconds:.1f} s")
        self._console.print(self._table())
        self._say("Try:")
        self._console.print(self._curl(), markup=False, soft_wrap=True)
        router = f"127.0.0.1:{self._options.router_port}"
        self._say(f"Status: {escape(_command())} status --router {router}")
        self._say(f"Logs:   {escape(str(self._log_folder))}/NAME.log")
        self._say("Ctrl-C stops everything.")

    def silent(self, name: str) -> None:
        self._say(f"[yellow]{name}[/] is there, but answers nothing; killing it")

    def died(self, name: str, status: int, backoff_seconds: float) -> None:
        self._say(
            f"[yellow]{name}[/] died: {describe_exit(status)}; "
            f"starting it again in {backoff_seconds:g} s"
        )

    def left(self, name: str) -> None:
        self._say(f"[yellow]{name}[/] left as it was asked to; starting it again")

    def gave_up(self, name: str, status: int) -> None:
        log = log_path(self._log_folder, name)
        reason = f"cannot be started: {describe_exit(status)}; end of {escape(str(log))}:"
        self._say(f"[bold red]{name}[/] {reason}")
        try:
            with log.open(encoding="utf-8", errors="replace") as lines:
                tail = deque(lines, maxlen=_LOG_TAIL_LINES)
        except OSError as error:
            tail = deque([str(error)])
        for line in tail:
            self._console.print("  | " + printable(line.rstrip()), markup=False, soft_wrap=True)

    def not_ready_in_time(self, names: Sequence[str], seconds: float) -> None:
        self._say(f"[bold red]not ready after {seconds:g} s[/]: {', '.join(names)}")

    def stopping(self, names: Sequence[str]) -> None:
        self._spinner.stop()
        requests = "".join(
            f"; running requests may take {spec.grace_seconds:g} s more"
            for spec in self._specs.values()
            if spec.name in names and spec.role == "gateway"
        )
        self._say(f"stopping {', '.join(names)}{requests} (Ctrl-C again: at once)")

    def stopped(self, seconds: float) -> None:
        self._spinner.stop()
        self._say(f"all stopped after {seconds:.1f} s")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _table(self) -> Table:
        table = make_table("process", "address", "metrics", "pid", "ranks", "device")
        for spec in self._specs.values():
            scheme = "https" if spec.speaks_tls else "http"
            table.add_row(
                spec.name,
                spec.address,
                f"{scheme}://{spec.metrics_address}/metrics",
                str(self._pids.get(spec.name, "")),
                str(spec.num_ranks or ""),
                spec.device,
            )
        return table

    def _curl(self) -> str:
        # The certificate is made for another name than this machine's.
        has_tls = any(spec.speaks_tls for spec in self._specs.values())
        url = f"{'--insecure https' if has_tls else 'http'}://127.0.0.1:{self._options.port}"
        asks_for_keys = any(spec.asks_for_keys for spec in self._specs.values())
        # The operator's to fill in: keys are not for terminals.
        key = "-H 'authorization: Bearer KEY' " if asks_for_keys else ""
        return (
            f"  curl {url}/v1/chat/completions "
            f"-H 'content-type: application/json' {key}"
            f'-d \'{{"model": "{self._options.served_model_name}", "max_tokens": 200, '
            '"messages": [{"role": "user", "content": "What is 37 + 48?"}]}\''
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
