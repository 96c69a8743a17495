"""Bad input gets the right 4xx with a reason, and the cluster carries on untouched."""

from typing import Any

import pytest

from tests.cluster.harness import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def cluster(served: Cluster) -> Cluster:
    return served


BAD = [
    ("too long", {"prompt": [5] * 5000}, 400, "context_length_exceeded"),
    ("prompt and output too long", {"prompt": [5] * 4000, "max_tokens": 4000}, 400, None),
    ("empty prompt", {"prompt": ""}, 400, None),
    ("no tokens", {"prompt": []}, 400, None),
    ("no prompt", {"prompt": None}, 400, None),
    ("token out of range", {"prompt": [10_000_000]}, 400, None),
    ("negative token", {"prompt": [-1]}, 400, None),
    ("unknown model", {"model": "no-such-model"}, 404, "model_not_found"),
    ("max_tokens text", {"max_tokens": "many"}, 400, None),
    ("max_tokens negative", {"max_tokens": -1}, 400, None),
    ("temperature", {"temperature": 9}, 400, None),
    ("temperature text", {"temperature": "hot"}, 400, None),
    ("top_p", {"top_p": 2}, 400, None),
    ("stop number", {"stop": 5}, 400, None),
    ("n zero", {"n": 0}, 400, None),
    ("stream_options alone", {"stream_options": {"include_usage": True}}, 400, None),
]


@pytest.mark.parametrize(
    ("change", "status", "code"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
@pytest.mark.parametrize("stream", [False, True])
def test_refused(
    cluster: Cluster, change: dict[str, Any], status: int, code: str | None, stream: bool
) -> None:
    body = {"model": cluster.model, "prompt": [5, 6, 7], "max_tokens": 4} | change
    if "stream_options" not in change:
        body["stream"] = stream
    reply = cluster.client.post("/v1/completions", json=body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if code:
        assert error["code"] == code


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'{"model": NaN}', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413),
    ],
    ids=["cut off", "not utf-8", "a list", "null", "nan", "deep", "10 MB"],
)
def test_bad_bodies(cluster: Cluster, content: bytes, status: int) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        headers = {"content-type": "application/json"}
        reply = cluster.client.post(path, content=content, headers=headers)
        assert reply.status_code == status, reply.text
        assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        [{"role": "user"}],
        [{"role": "nobody", "content": "hi"}],
        [{"role": "user", "content": 5}],
        [{"content": "hi"}],
    ],
)
def test_bad_messages(cluster: Cluster, messages: Any) -> None:
    body = {"model": cluster.model, "messages": messages}
    reply = cluster.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]


def test_unknown_paths_and_methods(cluster: Cluster) -> None:
    assert cluster.client.get("/v1/nothing").status_code == 404
    assert cluster.client.get("/v1/completions").status_code == 405
    for reply in (cluster.client.get("/v1/nothing"), cluster.client.get("/v1/completions")):
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_untouched_afterwards(cluster: Cluster) -> None:
    epochs = {p.name: p.epoch for p in cluster.status().processes}
    cluster.assert_nothing_held()
    assert cluster.complete([5, 6, 7], 4)["usage"]["completion_tokens"] >= 1
    assert {p.name: p.epoch for p in cluster.status().processes} == epochs
    assert "restart" not in cluster.output().lower()
