"""A real Prometheus that scrapes once a second."""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx
import yaml

from tests.cluster.harness import wait_until
from tests.free_ports import free_port
from tests.observability.tools import tool


class Series(NamedTuple):
    """`values` in order of time, NaN among them."""

    labels: dict[str, str]
    values: list[float]


class Prometheus:
    """Scrapes `targets` (name to host:port); leaves nothing behind but files in `folder`."""

    def __init__(self, folder: Path, targets: Mapping[str, str]) -> None:
        self._num_targets = len(targets)
        port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [
                {
                    "job_name": name,
                    "static_configs": [{"targets": [address], "labels": {"instance": name}}],
                }
                for name, address in targets.items()
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._log_path = folder / "prometheus.log"
        command = [
            tool("prometheus"),
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"GOMAXPROCS": "1"}
            )
        self.url = f"http://127.0.0.1:{port}"
        self._client = httpx.Client(base_url=self.url, timeout=60)
        self.began_at = time.time()

    def __enter__(self) -> Self:
        try:
            wait_until(self._all_up, 180, f"all targets up: {self._log_path}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            self._process.kill()

    def range(self, expression: str, step_seconds: float = 1.0) -> list[Series]:
        """Over all that was scraped. AssertionError with Prometheus's own words if it does not
        take the expression."""
        result = self._ask(
            "query_range",
            query=expression,
            start=self.began_at,
            end=time.time(),
            step=step_seconds,
        )
        return [
            Series(one["metric"], [float(value) for _, value in one["values"]]) for one in result
        ]

    def now(self, expression: str) -> list[Series]:
        result = self._ask("query", query=expression)
        return [Series(one["metric"], [float(one["value"][1])]) for one in result]

    def largest(self, expression: str) -> float:
        """The largest value that there ever was; -inf if none."""
        values = [value for series in self.range(expression) for value in series.values]
        return max((value for value in values if not math.isnan(value)), default=-math.inf)

    def metadata(self) -> dict[str, Any]:
        """What targets said of their metrics, by family."""
        reply = self._client.get("/api/v1/metadata")
        return reply.json()["data"]

    def _ask(self, what: str, **parameters: Any) -> list[dict[str, Any]]:
        reply = self._client.get(f"/api/v1/{what}", params=parameters)
        answer = json.loads(reply.content)
        assert answer["status"] == "success", f"{parameters}: {answer}"
        assert not answer.get("warnings"), answer["warnings"]
        return answer["data"]["result"]

    def _all_up(self) -> bool:
        assert self._process.poll() is None, self._log_path.read_text()
        try:
            if self._client.get("/-/ready").status_code != 200:
                return False
        except httpx.TransportError:
            return False
        return len(self.now("up == 1")) == self._num_targets
