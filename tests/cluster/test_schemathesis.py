"""Requests generated from the served OpenAPI document: no server error, no undocumented status."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.cluster.harness import REPOSITORY, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
# Examples an operation, the requests that come of them, and what else is tried: coverage is some
# 4,000 requests, each with one field as it may just be or may not be any more.
SHORT, LONG = (40, 200, "examples,fuzzing"), (160, 5000, "examples,coverage,fuzzing")


def responses(cluster: Cluster) -> Counter[tuple[str, str]]:
    """All HTTP responses so far, by path and status."""
    text = httpx.get(f"{cluster.url}/metrics").text
    found = re.findall(r"^epserve_gateway_http_responses_total\{(.*)\} (\S+)$", text, re.MULTILINE)
    counts: Counter[tuple[str, str]] = Counter()
    for labels, count in found:
        values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        counts[values["path"], values["code"]] += int(float(count))
    return counts


def run_schemathesis(
    cluster: Cluster, folder: Path, num_examples: int, phases: str
) -> subprocess.CompletedProcess[str]:
    """The command line tool in a process of its own."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{cluster.url}/openapi.json"]
    command += ["--url", cluster.url, "--checks", ",".join(CHECKS)]
    command += ["--phases", phases, "--workers", "1"]
    command += ["--max-examples", str(num_examples), "--seed", "1", "--generation-deterministic"]
    command += ["--suppress-health-check", "all"]
    command += ["--request-timeout", "60", "--continue-on-failure", "--no-color"]
    hooks = {
        "SCHEMATHESIS_HOOKS": "tests.cluster.schemathesis_hooks",
        "EPSERVE_MODEL": cluster.model,
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | hooks | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("num_examples", "num_requests", "phases"), [SHORT, pytest.param(*LONG, marks=pytest.mark.slow)]
)
def test_no_server_error_and_no_undocumented_status(
    served: Cluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    num_examples: int,
    num_requests: int,
    phases: str,
) -> None:
    before = responses(served)
    result = run_schemathesis(served, tmp_path, num_examples, phases)
    counts = responses(served)
    counts.subtract(before)
    rows = "".join(f"\n  {path} {code}: {n}" for (path, code), n in sorted((+counts).items()))
    with capsys.disabled():
        sys.stdout.write(f"\nschemathesis: {counts.total()} requests{rows}\n")
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-2000:]
    assert "Unresolvable references" not in result.stdout, result.stdout[-3000:]
    assert counts.total() >= num_requests, result.stdout[-3000:]
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert counts[path, "200"] >= num_examples // 8, "hardly any request was a good one"
    assert not [code for _, code in +counts if code >= "500"], counts
    served.assert_nothing_held()
    assert served.complete([5, 6, 7], 4)["usage"]["completion_tokens"] >= 1
    assert "restart" not in served.output().lower()
