"""What records of measurements say of a run."""

import re

import pytest

from loadgen.records import BenchRun, commit


def test_a_run_stamps_its_records_and_rounds() -> None:
    run = BenchRun.begin("b")
    record = run.record("c", "ttft_p50", "s", 0.0123456, peer="p", peer_value=12345.6)
    assert (record.value, record.peer_value) == (0.01235, 12350.0)
    assert record.date == run.date
    assert record.commit
    assert "x" in record.gpu


@pytest.mark.parametrize("on_cpu", [True, False])
def test_hardware_is_what_takes_part(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("loadgen.records._output", lambda *_: "A GPU\nA GPU")
    monkeypatch.setattr("loadgen.records._processor", lambda: "A Core")
    found = BenchRun.begin("b", on_cpu=on_cpu).gpu
    assert re.fullmatch(r"cpu: \d+ x A Core" if on_cpu else "2 x A GPU", found)


@pytest.mark.parametrize(("visible", "gpu"), [("1", r"1 x A GPU"), ("", r"cpu: .*")])
def test_gpus_that_are_hidden_take_no_part(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpu: str
) -> None:
    def output(*command: str) -> str:
        return "A GPU" if f"--id={visible}" in command else "A GPU\nA GPU"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("loadgen.records._output", output)
    assert re.fullmatch(gpu, BenchRun.begin("b").gpu)


def test_outside_of_a_checkout_the_commit_is_what_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loadgen.records._output", lambda *_: "")
    monkeypatch.delenv("EPSERVE_COMMIT", raising=False)
    assert commit() == "unknown"
    monkeypatch.setenv("EPSERVE_COMMIT", "1234abc")
    assert commit() == "1234abc"
