"""Scoring a server: what is asked of it, and what is made of its answers."""

import json
import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from demo_model.training.corpus import evaluation_set
from demo_model.training.evaluate import evaluate, first_model, score, server_answerer

REPLIES = {
    json.dumps(conversation.messages()): conversation.turns[-1].reply
    for conversation in evaluation_set(30)
}


class Handler(BaseHTTPRequestHandler):
    """Knows the right replies to the evaluation set, and gets every tenth question wrong."""

    def do_GET(self) -> None:
        self._send({"data": [{"id": "demo"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] != "demo" or body["temperature"] != 0:
            self.send_error(400)
            return
        key = json.dumps(body["messages"])
        wrong = list(REPLIES).index(key) % 10 == 0
        reply = "The answer is 123456." if wrong else REPLIES[key]
        self._send({"choices": [{"message": {"role": "assistant", "content": reply}}]})

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test's output stays readable."""

    def _send(self, values: dict[str, object]) -> None:
        payload = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


class Server(ThreadingHTTPServer):
    # All that the scoring asks at once: connections beyond the default of 5 may be reset.
    request_queue_size = 64


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_is_scored(url: str) -> None:
    answer = server_answerer(url, first_model(url))
    record = evaluate(answer, num_questions=30, num_chatter=0, num_long=0, long_tokens=0)
    questions = record["questions"]
    assert isinstance(questions, dict)
    assert (questions["right"], questions["asked"]) == (27, 30)
    assert len(questions["misses"]) == 3
    assert set(record) == {"questions", "seconds"}


def test_an_error_of_the_server_is_not_a_wrong_answer(url: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400"):
        score(evaluation_set(1), server_answerer(url, "another"))
