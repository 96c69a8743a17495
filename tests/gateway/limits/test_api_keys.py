"""API keys: who gets in, what they may, and that a key shows up nowhere."""

import asyncio
import logging
import os
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from core.clock import ManualClock
from gateway.base.metrics import GatewayMetrics
from gateway.limits.api_keys import ApiKeys
from gateway.limits.bucket_memory import BucketMemory
from gateway.limits.key_guard import KeyGuard
from gateway.limits.rate_limit import Limits, RateLimiter
from tests.gateway.conftest import MODEL, running_gateway, tokens_of
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS_ID

BODY = {"model": MODEL, "prompt": "plain", "temperature": 0}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_parsing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    digest = sha256(b"hashed-secret").hexdigest()
    file.write_text(
        "# who may ask\n\nsecret-one name=alice requests_per_minute=5 tokens_per_minute=0 "
        "max_priority=9\n"
        f"sha256:{digest} name=bob\nsecret-three\n"
    )
    keys = ApiKeys(file=file, keys=["from-env"], limits=Limits(10, 1000), max_priority=2)
    assert not keys.is_open
    alice, bob = keys.find("Bearer secret-one"), keys.find("bearer hashed-secret")
    assert alice is not None
    assert bob is not None
    assert (alice.name, alice.limits, alice.max_priority) == ("alice", Limits(5, 0), 9)
    assert (bob.name, bob.limits, bob.max_priority) == ("bob", Limits(10, 1000), 2)
    three, env = keys.find("Bearer secret-three"), keys.find("Bearer  from-env ")
    assert three is not None
    assert env is not None
    assert three.name != env.name
    assert "secret" not in three.name
    for wrong in ("", "Bearer", "Bearer ", "Basic secret-one", "secret-one", f"Bearer {digest}",
                  f"Bearer sha256:{digest}", "Bearer secret-on", "Bearer secret-one x",
                  "Bearer \udcff"):  # fmt: skip
        assert keys.find(wrong) is None


@pytest.mark.parametrize(
    "line", ["secret name=", "secret name=a/b", "secret rpm=5", "sha256:12", "secret surprise",
             "secret tokens_per_minute=-1", "secret tokens_per_minute=x"],
)  # fmt: skip
def test_lines_that_make_no_sense(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"fine\n{line}\n")
    with pytest.raises(ValueError, match="line 2") as raised:
        ApiKeys(file=file, keys=[], limits=Limits())
    assert "secret" not in str(raised.value)


def test_reload(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    keys = ApiKeys(file=file, keys=[], limits=Limits())
    file.write_text("new\nother\n")
    keys.reload()
    assert keys.find("Bearer old") is None
    assert keys.find("Bearer new")
    with caplog.at_level(logging.ERROR):
        file.write_text("newer nonsense\n")
        keys.reload()
        keys.reload()
        assert keys.find("Bearer new")  # as before
        file.unlink()
        keys.reload()
        assert keys.find("Bearer new")
    temporary = tmp_path / "keys.new"
    temporary.write_text("again\n")
    os.replace(temporary, file)
    keys.reload()
    assert keys.find("Bearer again")
    assert keys.find("Bearer new") is None


async def test_priorities(model_folder: Path, tmp_path: Path) -> None:
    """No key may overtake the others without leave."""
    file = tmp_path / "keys"
    file.write_text("eager name=eager max_priority=5\n")
    cases = [("eager", 5, 200), ("eager", 6, 400), ("usual", 0, 200), ("usual", -3, 200),
             ("usual", None, 200), ("usual", 1, 400)]  # fmt: skip
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, api_keys_file=file, api_keys="usual") as gateway,
    ):
        for key, priority, status in cases:
            reply = await gateway.client.post(
                "/v1/completions", json=BODY | {"priority": priority}, headers=bearer(key)
            )
            assert reply.status_code == status, (key, priority)
            if status == 400:
                error = reply.json()["error"]
                assert error["param"] == "priority"
                assert "max_priority=N" in error["message"]


async def test_requests(
    model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    file = tmp_path / "keys"
    file.write_text("very-secret name=alice\n")
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, api_keys_file=file, api_keys="other") as gateway,
    ):
        post = gateway.client.post
        for headers in ({}, bearer("wrong-secret"), {"authorization": "very-secret"}):
            # Not even a body that makes no sense is looked at.
            reply = await post("/v1/completions", content=b"{", headers=headers)
            assert reply.status_code == 401
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == "invalid_api_key"
            assert reply.headers["x-request-id"]
            assert reply.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/openapi.json", "/nowhere"):
            assert (await gateway.client.get(path)).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await gateway.client.get(path)).status_code == 200
        for key in ("very-secret", "other"):
            reply = await post("/v1/completions", json=BODY, headers=bearer(key))
            assert reply.status_code == 200
            assert "x-ratelimit-limit-requests" not in reply.headers
        file.write_text("newest\n")
        async with asyncio.timeout(20):
            while (
                await post("/v1/completions", json=BODY, headers=bearer("newest"))
            ).status_code != 200:
                await asyncio.sleep(0.1)
        reply = await post("/v1/completions", json=BODY, headers=bearer("very-secret"))
        assert reply.status_code == 401
        assert not cluster.first.num_running
    out, err = capfd.readouterr()
    everything = out + err + caplog.text
    assert "alice" in everything
    assert "very-secret" not in everything
    assert "wrong-secret" not in everything


@pytest.mark.parametrize("guards_all", [False, True])
async def test_all_paths_may_be_guarded(guards_all: bool) -> None:
    keys = ApiKeys(file=None, keys=["secret"], limits=Limits())
    guard = KeyGuard(
        PlainTextResponse("ok"), keys, RateLimiter(BucketMemory(), ManualClock()),
        GatewayMetrics(), guards_all=guards_all,
    )  # fmt: skip
    transport = httpx.ASGITransport(guard)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await client.get(path)).status_code == (401 if guards_all else 200)
            assert (await client.get(path, headers=bearer("secret"))).status_code == 200


async def test_limits_of_keys(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "few name=few requests_per_minute=2\nsmall name=small tokens_per_minute=60\nfree\n"
    )
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, api_keys_file=file) as gateway,
    ):

        async def ask(key: str, **fields: object) -> tuple[int, str, dict[str, str]]:
            reply = await gateway.client.post(
                "/v1/completions", json=BODY | {"max_tokens": 40} | fields, headers=bearer(key)
            )
            code = reply.json()["error"]["code"] if reply.status_code != 200 else ""
            return reply.status_code, code, dict(reply.headers)

        assert (await ask("few"))[2]["x-ratelimit-remaining-requests"] == "1"
        assert (await ask("few"))[0] == 200
        status, code, headers = await ask("few")
        assert (status, code) == (429, "rate_limit_exceeded")
        assert 1 <= int(headers["retry-after"]) <= 30
        assert headers["x-ratelimit-remaining-requests"] == "0"
        # The prompt takes a few, the output the rest and more.
        status, _, headers = await ask("small")
        assert status == 200
        assert headers["x-ratelimit-limit-tokens"] == "60"
        status, _, headers = await ask("small", stream=True, prompt="p" * 58)
        assert status == 429
        assert headers["content-type"] == "application/json"
        for _ in range(5):
            assert (await ask("free"))[0] == 200
        # Whichever limit it was: the runbook looks there to tell them from a full cluster.
        metrics = (await gateway.client.get("/metrics")).text
        assert 'epserve_requests_total{outcome="rate_limit_exceeded"} 2.0' in metrics


async def test_who_is_not_admitted_keeps_its_tokens(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("free\nsmall name=small tokens_per_minute=60\n")
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(
            cluster, model_folder, api_keys_file=file, max_inflight=1, max_queue_seconds=0.1
        ) as gateway,
    ):

        async def ask(key: str, **fields: object) -> httpx.Response:
            return await gateway.client.post(
                "/v1/completions", json=BODY | fields, headers=bearer(key)
            )

        cluster.first.plan.hang_after = 1
        running = asyncio.create_task(ask("free"))
        await asyncio.wait_for(cluster.first.started.wait(), 20)
        for _ in range(3):  # the bucket has room for one of them
            reply = await ask("small", prompt="p" * 50)
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
            assert reply.headers["x-ratelimit-remaining-tokens"] == "60"
        running.cancel()
        await asyncio.wait_for(cluster.first.cancelled.wait(), 20)
        cluster.first.plan.hang_after = None
        assert (await ask("small", prompt="p" * 50)).status_code == 200
        assert (await ask("small", prompt="p" * 50)).status_code == 429
