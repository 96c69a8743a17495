"""What operators see of a real cluster, and what they change: `ctl` against logs and metrics."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from ctl.main import app
from tests.cluster.harness import Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RUNNER = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
PROMPT = [20 + number % 200 for number in range(150)]  # two pages and a bit


@pytest.fixture(scope="module")
def cluster(observed: Cluster) -> Cluster:
    return observed


def ctl(cluster: Cluster, line: str) -> Any:
    """What a command says in JSON."""
    arguments = [*line.split(), "--router", f"127.0.0.1:{cluster.port + 1}", "--output", "json"]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class Totals:
    """Sums over the processes of a role, as their /metrics show them; labels added up unless
    named."""

    def __init__(self, cluster: Cluster) -> None:
        self.values: dict[tuple[str, str, str], float] = {}
        for process in ctl(cluster, "config"):
            port = process["settings"]["metrics_port"]
            address = f"127.0.0.1:{port}" if port > 0 else process["address"]
            text = httpx.get(f"http://{address}/metrics").text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    for label in {"", sample.labels.get("source", "")}:
                        key = (process["role"], sample.name, label)
                        self.values[key] = self.values.get(key, 0.0) + sample.value

    def since(self, before: "Totals", role: str, name: str, source: str = "") -> float:
        key = (role, name, source)
        return self.values[key] - before.values.get(key, 0.0)


def generation_log(cluster: Cluster, request_id: str) -> dict[str, Any]:
    """The gateway's line about the end of a request."""

    def line() -> dict[str, Any] | None:
        for text in (cluster.log_dir / "gateway.log").read_text().splitlines():
            if '"generation ended"' in text and request_id in text:
                return dict(json.loads(text))
        return None

    found: dict[str, Any] = wait_until(line, 60, "the gateway's log line")
    return found


def sums(legs: list[dict[str, Any]], key: str) -> float:
    return sum(leg[key] for leg in legs)


def test_an_explanation_agrees_with_the_reply_the_log_and_the_metrics(cluster: Cluster) -> None:
    cluster.complete(PROMPT, 4)  # prefill knows the prompt from here on
    cluster.assert_nothing_held()
    before = Totals(cluster)
    body = {"model": cluster.model, "prompt": PROMPT, "max_tokens": 24, "n": 2, "seed": 1}
    reply = cluster.client.post(
        "/v1/completions",
        json=body | {"ignore_eos": True, "temperature": 0.7},
        headers={"x-request-id": "explain-me"},
    ).json()
    cluster.assert_nothing_held()
    after, log = Totals(cluster), generation_log(cluster, "explain-me")
    told = ctl(cluster, f"explain {reply['id']}")
    assert told | {"request_id": ""} == ctl(cluster, "explain explain-me") | {"request_id": ""}

    decode = [leg for leg in told["legs"] if leg["role"] == "decode"]
    prefill = [leg for leg in told["legs"] if leg["role"] == "prefill"]
    ids = sorted(f"{reply['id']}-{index}" for index in range(2))
    for part in (decode, prefill, told["assignments"]):
        assert sorted(each["leg_id"] for each in part) == ids
    assert told["unreachable"] == []

    # The reply and the log.
    usage, details = reply["usage"], reply["usage"]["prompt_tokens_details"]
    assert log["id"] == reply["id"]
    assert {leg["num_prompt_tokens"] for leg in told["legs"]} == {len(PROMPT)}
    assert usage["prompt_tokens"] == log["prompt_tokens"] == len(PROMPT)
    assert usage["completion_tokens"] == log["completion_tokens"] == 48
    assert sums(decode, "num_output_tokens") == 48
    first = next(leg for leg in decode if leg["leg_id"] == ids[0])
    assert details["cached_tokens"] == log["cached_tokens"] == first["num_cached_tokens"] == 128
    for choice in reply["choices"]:
        leg = next(each for each in decode if each["leg_id"] == f"{reply['id']}-{choice['index']}")
        assert leg["finish"] == choice["finish_reason"]
    assert log["num_moves"] == 0
    assert all(leg["total_seconds"] <= log["seconds"] for leg in decode)

    # The metrics: the router's wait, each role's own figures.
    waited = after.since(before, "gateway", "epserve_queue_time_seconds_sum")
    assert sums(told["assignments"], "queue_seconds") == pytest.approx(waited, abs=1e-6)
    assert after.since(before, "gateway", "epserve_gateway_generation_tokens_total") == 48
    for role, legs in (("decode", decode), ("prefill", prefill)):
        for name, key in (
            ("epserve_worker_queue_time_seconds_sum", "queue_seconds"),
            ("epserve_worker_time_to_first_token_seconds_sum", "first_token_seconds"),
            ("epserve_worker_e2e_request_latency_seconds_sum", "total_seconds"),
        ):
            # Taken within the same call, but for prefill not in the same moment.
            wrong_by = 0.5 if role == "decode" else 1.0
            assert sums(legs, key) == pytest.approx(after.since(before, role, name), abs=wrong_by)
        moved = after.since(before, role, "epserve_kv_transfer_bytes_total")
        assert sums(legs, "kv_bytes") == moved > 0
    for source, key in (("cached", "num_cached_tokens"), ("computed", "num_computed_tokens")):
        counted = after.since(before, "prefill", "epserve_prefill_tokens_total", source)
        assert sums(prefill, key) == sums(decode, key) == counted > 0
    took = after.since(before, "prefill", "epserve_kv_transfer_seconds_sum")
    # The metric ends when the last page has landed, the answer's figure with the answer.
    assert sums(prefill, "transfer_seconds") == pytest.approx(took, abs=1.0)
    assert took > 0

    # Drafts, each of which saves a step if it is right; the first token of each is prefill's.
    accepted, rejected = (sums(decode, f"num_{how}_drafts") for how in ("accepted", "rejected"))
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": rejected,
    }
    assert after.since(before, "decode", "epserve_draft_tokens_total") == accepted + rejected > 0
    assert sums(decode, "num_steps") == 48 - 2 - accepted


def test_a_request_that_moved_is_explained_leg_by_leg(cluster: Cluster) -> None:
    """The stream goes on elsewhere when its worker is drained without a grace."""
    begun, reply_id, num_events = threading.Event(), [], 0
    body = {"model": cluster.model, "prompt": PROMPT, "max_tokens": 600, "stream": True}

    async def read() -> None:
        nonlocal num_events
        async with (
            httpx.AsyncClient(base_url=cluster.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as reply,
        ):
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    reply_id.append(chunk["id"])
                    num_events += 1
                    begun.set()

    reader = threading.Thread(target=lambda: asyncio.run(read()))
    reader.start()
    assert begun.wait(120)
    (open_leg,) = [
        leg for leg in ctl(cluster, f"explain {reply_id[0]}")["legs"] if leg["role"] == "decode"
    ]
    assert open_leg["finish"] == ""
    drained = ctl(cluster, f"drain {open_leg['worker']} --wait --grace 0 --timeout 60")
    assert drained["state"] == "drained"
    states = {each["name"]: each["state"] for each in ctl(cluster, "workers")}
    assert states[open_leg["worker"]] == "drained"
    reader.join(90)
    assert not reader.is_alive()
    assert ctl(cluster, f"undrain {open_leg['worker']}")["state"] == "ready"
    told = ctl(cluster, f"explain {reply_id[0]}-0")
    first, second = (leg for leg in told["legs"] if leg["role"] == "decode")
    assert (first["leg_id"], second["leg_id"]) == (f"{reply_id[0]}-0", f"{reply_id[0]}-0.1")
    assert (first["finish"], second["finish"]) == ("UNAVAILABLE", "length")
    assert first["worker"] == open_leg["worker"] != second["worker"]
    assert second["num_earlier_tokens"] == first["num_output_tokens"] > 0
    assert first["num_output_tokens"] + second["num_output_tokens"] == 600
    assert len(told["assignments"]) == 2
    rejected = {c["worker"]: c["rejected_by"] for c in told["assignments"][1]["candidates"]}
    assert rejected[first["worker"]] in ("ready", "not_excluded")


def test_the_log_level_of_the_whole_cluster(cluster: Cluster) -> None:
    told = ctl(cluster, "logs-level debug")
    assert sorted(each["role"] for each in told) == [
        "decode", "decode", "gateway", "prefill", "router",
    ]  # fmt: skip
    assert {each["before"] for each in told} == {"info"}
    # The gateway hears of it with the answer to its next announcement.
    wait_until(
        lambda: ctl(cluster, "logs-level debug gateway")[0]["before"] == "debug", 120, "debug"
    )
    assert {each["before"] for each in ctl(cluster, "logs-level info")} == {"debug"}
