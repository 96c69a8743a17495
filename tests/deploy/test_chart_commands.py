"""Every `helm install` and `helm upgrade` of our pages renders, with the values that it names."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.ctl.plan.page_commands import pages
from tests.deploy.chart import CHART, EXAMPLES, ROOT, load, overlaid, render

# What an operator made from an example.
_OWN = {"my-values.yaml": EXAMPLES / "values-two-nodes-16-gpu.yaml"}


def _commands() -> list[str]:
    lines = (
        line
        for page in pages()
        for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    )
    return [line for line in lines if line.startswith(("helm install", "helm upgrade"))]


def _values(words: list[str]) -> dict[str, Any]:
    """Of --values, with --set over them."""
    options = list(zip(words, words[1:], strict=False))
    (file,) = (value for name, value in options if name == "--values")
    values = load(_OWN.get(file) or ROOT / file)
    for name, value in options:
        if name == "--set":
            path, _, text = value.partition("=")
            values = overlaid(values, *path.split("."), value=text)
    return values


@pytest.mark.parametrize("command", _commands())
def test_a_command_of_our_pages_renders(command: str) -> None:
    words = shlex.split(command)
    assert ROOT / words[3] == CHART
    assert words[words.index("--namespace") + 1] == "serving"
    assert {each["kind"] for each in render(_values(words))} >= {"LeaderWorkerSet"} or (
        "cpu-demo" in command
    )


def test_pages_have_such_commands() -> None:
    named = {Path(word).name for line in _commands() for word in line.split()}
    assert {"values-two-nodes-16-gpu.yaml", "values-96-gpu.yaml", "my-values.yaml"} <= named
