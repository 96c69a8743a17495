"""The bench of right answers: its cases, what counts as lost, and a BF16 copy of a checkpoint."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import accuracy
from bench.accuracy import WIDER, Asked, Case, cases, is_enough, records
from bench.records import read
from bench.serving.plain_checkpoint import write_plain
from bench.serving.wide_checkpoint import write_wide
from demo_model.training.evaluate import Score
from demo_model.training.settings import CHECKPOINT_PATH
from ep.dispatch.deep_ep_limits import LOW_LATENCY_HIDDEN
from loadgen.records import BenchRun
from model.batch import AttentionForm
from model.config import ModelConfig
from model.deepseek import DeepseekV3
from model.weights.checkpoint import Checkpoint
from tests.model.driver import PagedRunner

RUN = BenchRun(date="", commit="", gpu="", bench="accuracy")


def asked(weights: str, num_right: int) -> Asked:
    case = Case(name=weights, weights=weights, options=())
    return Asked(case=case, score=Score(num_right, 1000, []))


def test_every_switch_of_every_format_is_a_case() -> None:
    found = list(cases(["fp8", "w4afp8"], "cuda", 1, deep_ep=True))
    assert len({case.name for case in found}) == len(found) == 8
    assert "decode.overlap-schedule=false" in found[-1].options
    assert "decode.cuda-graph=false" in found[-1].options
    assert [case.name for case in cases(["bf16"], "cpu", 0, deep_ep=False)] == ["bf16, cpu"]


def test_several_gpus_bring_ranks_and_dispatchers() -> None:
    one, two = (list(cases(["bf16"], "cuda", count, deep_ep=True)) for count in (1, 2))
    assert [case.name for case in two[len(one) :]] == [
        "bf16, cuda, 2 ranks, collective, graphs, overlap",
        "bf16, cuda, 2 ranks, deep_ep, graphs, overlap",
        "bf16, cuda, 2 ranks, deep_ep, no graphs, overlap",
    ]
    assert {case.num_ranks for case in two[len(one) :]} == {2}
    assert [case.model for case in two[-2:]] == ["bf16, wide", "bf16"]
    assert "prefill.ep-dispatcher=deep_ep" in two[-1].options
    assert len(list(cases(["bf16"], "cuda", 2, deep_ep=False))) == len(two) - 2


def test_a_case_may_lose_a_point_and_int4_two() -> None:
    reference = asked("fp8", 995)
    assert is_enough(asked("bf16", 985), reference)
    assert not is_enough(asked("bf16", 984), reference)
    assert is_enough(asked("w4afp8", 975), reference)
    failed = Asked(case=Case(name="fp8", weights="fp8", options=()), error="it did not start")
    assert not is_enough(failed, reference)
    only = records(RUN, [asked("bf16", 984), failed], reference)
    assert [(one.case, one.value, one.peer_value) for one in only] == [("bf16", 98.4, 99.5)]


def test_what_is_answered_before_the_reference_is_recorded_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_all(wanted: list[Case], folders: object, arguments: object) -> Iterator[Asked]:
        yield from (Asked(case=case, score=Score(3, 4, [])) for case in reversed(wanted))

    monkeypatch.setattr(accuracy, "ask_all", ask_all)
    monkeypatch.setattr(accuracy, "write_folders", lambda models, folder, device: {})
    flags = ["--device", "cpu", "--weights", "bf16", "--questions", "4", "--record"]
    assert accuracy.main([*flags, "--results", str(tmp_path)]) == 0
    written = read(tmp_path / "accuracy.jsonl")
    assert [(one.case, one.value, one.peer_value) for one in written] == [("bf16, cpu", 75, 75)]


def test_clusters_over_several_gpus_are_asked_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = list(cases(["bf16", "fp8"], "cuda", 2, deep_ep=True))
    running: list[Case] = []
    most = {1: 0, 2: 0}

    def ask(case: Case, folders: object, arguments: object) -> Asked:
        running.append(case)
        same = [one for one in running if one.num_ranks == case.num_ranks]
        most[case.num_ranks] = max(most[case.num_ranks], len(same))
        threading.Event().wait(0.02)
        running.remove(case)
        return Asked(case=case, score=Score(4, 4, []))

    monkeypatch.setattr(accuracy, "ask", ask)
    arguments = accuracy.parse(["--at-once", "4"])
    found = [asked.case for asked in accuracy.ask_all(offered, {}, arguments)]
    assert sorted(found, key=offered.index) == offered
    assert most[1] > 1
    assert most[2] == 1


def test_a_plain_copy_has_the_same_weights(tmp_path: Path) -> None:
    folder = write_plain(CHECKPOINT_PATH, tmp_path / "plain")
    assert (folder / "tokenizer.json").is_file()
    with Checkpoint(folder) as plain, Checkpoint(CHECKPOINT_PATH) as shipped:
        plain.check(ModelConfig.from_folder(folder))
        assert not any(plain.is_fp8(name) for name in plain.stored)
        for name in plain.stored:
            wide = name.endswith("e_score_correction_bias")
            dtype = torch.float32 if wide else torch.bfloat16
            assert plain.raw(name).equal(shipped.read(name, dtype)), name


def test_a_wide_copy_computes_the_same(tmp_path: Path) -> None:
    hidden_size = ModelConfig.from_folder(CHECKPOINT_PATH).hidden_size
    assert hidden_size * WIDER in LOW_LATENCY_HIDDEN
    wide = write_wide(CHECKPOINT_PATH, tmp_path / "wide", 4)
    assert ModelConfig.from_folder(wide).hidden_size == hidden_size * 4
    prompt = {0: [7 * place % 700 for place in range(40)]}
    logits = []
    for folder in (CHECKPOINT_PATH, wide):
        model = DeepseekV3.load(folder, device=torch.device("cpu"), dtype=torch.float32)
        runner = PagedRunner(model, num_pages=8)
        logits.append(runner.forward(prompt, AttentionForm.PLAIN, all_rows=True))
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="no power of two"):
        write_wide(CHECKPOINT_PATH, tmp_path / "other", 9)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_clusters_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "LONG_TOKENS", 300)
    few = ["--questions", "8", "--chatter", "2", "--long", "1", "--at-once", "1"]
    flags = [*few, "--device", "cpu", "--record", "--results", str(tmp_path)]
    assert accuracy.main([*flags, "--weights", "bf16"]) == 0
    assert [r.case for r in read(tmp_path / "accuracy.jsonl")] == ["bf16, cpu"]
