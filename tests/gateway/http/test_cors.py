"""Pages of other origins may call where they are named."""

from pathlib import Path

from tests.gateway.conftest import MODEL, running_gateway, tokens_of
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS_ID

BODY = {"model": MODEL, "prompt": "plain", "temperature": 0}


async def test_cors(model_folder: Path) -> None:
    page = {"origin": "https://page.example", "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    async with FakeCluster(tokens_of, EOS_ID) as cluster:
        async with running_gateway(cluster, model_folder) as gateway:
            reply = await gateway.client.options("/v1/completions", headers=page)
            assert reply.status_code == 405
            assert "access-control-allow-origin" not in reply.headers
        async with running_gateway(
            cluster, model_folder, cors_origins=("https://page.example",), api_keys="k"
        ) as gateway:
            reply = await gateway.client.options("/v1/completions", headers=page)
            assert reply.status_code == 200  # asked without a key
            assert reply.headers["access-control-allow-origin"] == "https://page.example"
            refused = await gateway.client.post("/v1/completions", json=BODY, headers=page)
            assert refused.status_code == 401
            assert "access-control-allow-origin" in refused.headers
            headers = page | {"authorization": "Bearer k"}
            reply = await gateway.client.post("/v1/completions", json=BODY, headers=headers)
            assert reply.status_code == 200
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
            other = page | {"origin": "https://other.example"}
            reply = await gateway.client.options("/v1/completions", headers=other)
            assert "access-control-allow-origin" not in reply.headers
