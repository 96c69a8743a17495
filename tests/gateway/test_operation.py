"""Models, health, metrics, bounds and the stop: what operators see."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from core.log import current_level, set_level
from proto import worker_pb2
from tests.eventually import eventually
from tests.gateway.conftest import (
    ANSWERS,
    MODEL,
    TOKENIZER,
    Gateway,
    running_gateway,
    tokens_of,
)
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS_ID, MAX_POSITION, make_model_folder
from tests.gateway.stream import join

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_models(gateway: Gateway) -> None:
    listing = (await gateway.client.get("/v1/models")).json()
    assert listing["object"] == "list"
    (model,) = listing["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", MAX_POSITION)
    assert (await gateway.client.get(f"/v1/models/{MODEL}")).json() == model


async def test_version(gateway: Gateway) -> None:
    assert (await gateway.client.get("/version")).json()["version"]


async def test_health_follows_the_router(gateway: Gateway) -> None:
    router = gateway.cluster.router
    router.ready = False
    async with asyncio.timeout(20):
        while (reply := await gateway.client.get("/health")).status_code == 200:
            await asyncio.sleep(0.02)
    assert reply.status_code == 503
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert (await gateway.client.get("/ready")).status_code == 503
    router.ready = True
    async with asyncio.timeout(20):
        while (await gateway.client.get("/health")).status_code != 200:
            await asyncio.sleep(0.02)
    assert (await gateway.client.get("/ready")).status_code == 200


async def test_announces_itself(gateway: Gateway) -> None:
    identity = gateway.cluster.router.announcements[-1].identity
    assert identity.role == worker_pb2.ROLE_GATEWAY
    assert f"http://{identity.address}" == gateway.url
    assert identity.epoch
    assert identity.pid


async def test_operators_see_its_settings_and_set_its_log_level(gateway: Gateway) -> None:
    router = gateway.cluster.router
    told = router.announcements[-1]
    settings = json.loads(told.config_json)
    assert settings["max_inflight"] > 0
    assert "api_keys" not in settings
    assert told.version
    before = current_level()
    try:
        for level in ("error", "nonsense", ""):  # only the first one means anything
            router.log_level = level
            num_seen = len(router.announcements)
            await eventually(lambda wanted=num_seen + 2: len(router.announcements) >= wanted)
            assert current_level() == router.announcements[-1].log_level == "error"
    finally:
        set_level(before)


async def test_workers_may_take_less_than_the_model(gateway: Gateway) -> None:
    gateway.cluster.router.max_model_len = 64
    async with asyncio.timeout(20):
        while (await gateway.client.get("/v1/models")).json()["data"][0]["max_model_len"] != 64:
            await asyncio.sleep(0.05)
    reply = await gateway.complete([5] * 64, max_tokens=None)
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert (await gateway.complete([5] * 63, max_tokens=None)).status_code == 200
    gateway.cluster.router.max_model_len = MAX_POSITION
    async with asyncio.timeout(20):
        while (await gateway.client.get("/v1/models")).json()["data"][0]["max_model_len"] == 64:
            await asyncio.sleep(0.05)


async def samples(gateway: Gateway) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = (await gateway.client.get("/metrics")).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_every_metric_moves(gateway: Gateway) -> None:
    gateway.cluster.first.plan.step_tokens = 4
    gateway.cluster.first.plan.step_seconds = 0.005
    gateway.cluster.router.queue_seconds = 0.25
    before = await samples(gateway)
    reply = (await gateway.complete("plain", n=2)).json()
    await gateway.client.get("/nowhere/at/all")
    after = await samples(gateway)

    def moved(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    num_prompt, num_output = (
        reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"],
    )  # fmt: skip
    assert moved("epserve_requests_total", outcome="ok") == 1
    assert moved("epserve_gateway_prompt_tokens_total") == num_prompt
    assert moved("epserve_gateway_generation_tokens_total") == num_output
    assert moved("epserve_time_to_first_token_seconds_count") == 2
    # The first message of each choice has four tokens, or more that came with them: there is no
    # time between those.
    num_gaps = moved("epserve_inter_token_latency_seconds_count")
    assert 0 < num_gaps <= num_output - 2 * 4
    assert (num_output - num_gaps) % 4 == 0
    assert moved("epserve_e2e_request_latency_seconds_count") == 1
    assert moved("epserve_queue_time_seconds_count") == 2
    assert moved("epserve_queue_time_seconds_sum") == pytest.approx(0.5)
    assert moved("epserve_gateway_queue_time_seconds_count") == 1
    assert moved("epserve_gateway_prepare_seconds_count") == 1
    assert moved("epserve_request_prompt_tokens_sum") == num_prompt
    assert moved("epserve_request_generation_tokens_sum") == num_output
    responses = "epserve_gateway_http_responses_total"
    assert moved(responses, path="/v1/completions", code="200") == 1
    assert moved(responses, path="other", code="404") == 1
    assert after["epserve_gateway_kv_usage_ratio", ()] == 0.25


async def test_requests_that_never_run_are_counted_by_outcome(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await samples(gateway)
    assert (await gateway.complete("plain", max_tokens=-1)).status_code == 400
    assert (await gateway.complete("plain", model="other")).status_code == 404

    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("gateway.frontend.make_chat_prompt", fail)
    assert (await gateway.chat("plain")).status_code == 500
    after = await samples(gateway)
    outcomes = ("ok", "invalid_value", "model_not_found", "internal")
    keys = [("epserve_requests_total", (("outcome", outcome),)) for outcome in outcomes]
    assert [after[key] - before[key] for key in keys] == [0, 1, 1, 1]


async def test_a_gateway_says_which_of_both_is_missing(model_folder: Path) -> None:
    async with FakeCluster(tokens_of, EOS_ID) as cluster:
        with capture_logs() as lines:
            async with running_gateway(cluster, model_folder) as gateway:
                cluster.router.ready = False
                await until_unhealthy(gateway, "no pair of workers")
                cluster.router.problem = "no decode worker is ready"
                await until_unhealthy(gateway, "no decode worker is ready")
                assert cluster.router.announcements[-1].model == MODEL
                await cluster.router.server.stop(0)
                await until_unhealthy(gateway, "no router answers")
    said = [line for line in lines if line["event"].startswith("not ready")]
    (untold, workers, router) = said[-3:]
    assert untold["event"] == "not ready: no pair of workers takes requests"
    assert workers["event"] == "not ready: no decode worker is ready"
    assert untold["log_level"] == "warning"
    assert router["event"] == "not ready: no router answers"
    assert router["routers"] == [cluster.router.server.address]
    assert router["reason"]


async def until_unhealthy(gateway: Gateway, why: str) -> None:
    async with asyncio.timeout(20):
        while why not in (await gateway.client.get("/health")).text:
            await asyncio.sleep(0.05)


async def test_generation_config_sets_defaults(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    values = {"temperature": 0.6, "top_p": 0.95, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(values))
    async with FakeCluster(tokens_of, EOS_ID) as cluster:

        async def asked(gateway: Gateway, **body: Any) -> tuple[float, float]:
            await gateway.client.post(
                "/v1/completions", json={"model": MODEL, "prompt": "plain"} | body
            )
            sampling = cluster.first.requests[-1].sampling
            return round(sampling.temperature, 5), round(sampling.top_p, 5)

        async with running_gateway(cluster, folder) as gateway:
            assert await asked(gateway) == (0.6, 0.95)
            assert await asked(gateway, temperature=0.25, top_p=0.5) == (0.25, 0.5)
        async with running_gateway(cluster, folder, sampling_defaults="openai") as gateway:
            assert await asked(gateway) == (1.0, 1.0)
        (folder / "generation_config.json").write_text('{"do_sample": false}')
        async with running_gateway(cluster, folder) as gateway:
            assert await asked(gateway) == (0.0, 1.0)


async def test_no_chat_template(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, folder) as gateway,
    ):
        reply = await gateway.chat("hi")
        assert reply.status_code == 400
        assert "/v1/completions" in reply.json()["error"]["message"]
        assert (await gateway.complete("plain")).status_code == 200


async def test_full_gateway(model_folder: Path) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, max_inflight=2, max_queued=0) as gateway,
    ):
        cluster.first.plan.hang_after = 0
        tasks = [asyncio.create_task(gateway.complete("plain")) for _ in range(2)]
        await eventually(lambda: cluster.first.num_running >= 2)
        reply = await gateway.complete("plain")
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "1"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        cluster.router.reset()
        async with asyncio.timeout(20):
            while (await gateway.complete("plain")).status_code != 200:
                await asyncio.sleep(0.02)


async def test_stop_lets_streams_finish(model_folder: Path) -> None:
    stop = asyncio.Event()
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, stop=stop, grace_seconds=5) as gateway,
    ):
        cluster.first.plan.step_seconds = 0.01
        task = asyncio.create_task(gateway.complete("unicode", stream=True))
        await asyncio.wait_for(cluster.first.started.wait(), 20)
        stop.set()
        (choice,), _ = join(await task, chat=False)
        assert choice.text == ANSWERS["unicode"]


async def test_prompts_are_not_logged(
    gateway: Gateway, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither what works nor what is refused."""
    secret = "xyzzy-secret"
    await gateway.complete(f"plain {secret}")
    await gateway.chat(f"plain {secret}")
    await gateway.complete(f"plain {secret}", temperature=9)
    await gateway.chat(f"refuse me {secret}")
    out, err = capfd.readouterr()
    assert "generation ended" in out + err + caplog.text
    assert secret not in out + err + caplog.text
    assert str(TOKENIZER.encode(secret).ids)[1:-1] not in out + err + caplog.text


async def test_what_clients_name_makes_no_series(gateway: Gateway) -> None:
    async def ask(name: str) -> None:
        headers = {"authorization": f"Bearer {name}", "x-request-id": name, "x-session-id": name}
        client = gateway.client
        for fields in ({"model": name}, {"user": name}, {"stop": [name]}, {name: name}):
            body = {"model": MODEL, "prompt": "plain"} | fields
            await client.post("/v1/completions", json=body, headers=headers)
        await client.post(f"/v1/{name}", json={}, headers=headers)
        await client.get(f"/v1/models/{name}", headers=headers)
        await client.get(f"/v1/responses/resp_{name}", headers=headers)
        await client.post("/v1/responses", json={"input": "a", "previous_response_id": name})
        await client.post("/v1/messages", json={"metadata": {"user_id": name}})

    await ask("first")
    await samples(gateway)
    before = (await samples(gateway)).keys()
    for number in range(5):
        await ask(f"name{number}")
    assert set((await samples(gateway)).keys() - before) == set()
