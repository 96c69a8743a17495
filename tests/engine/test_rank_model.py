"""What a rank computes with, made in one go from settings: without a GPU, and without a
checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import memory_plan, rank_model
from engine.fingerprint import kv_fingerprint
from engine.messages import Sampling
from engine.model_loading import weights_revision
from engine.piece import Piece
from engine.rank_memory import RankMemory
from engine.rank_model import RankModel
from engine.runner import Runner
from engine.sampler import SampleRow
from engine.settings import WorkerSettings
from engine.start_clock import StartClock
from engine.warm_up import lengths_up_to, representatives, warm_up
from ep.group import EpGroup
from model.batch import AttentionForm
from model.config import ModelConfig
from tests.model.test_dummy_checkpoint import FP8, config_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return config_folder(tmp_path / "model", FP8)


@pytest.fixture
def group() -> Iterator[EpGroup]:
    group = EpGroup.create(
        rank=0, size=1, rendezvous="", device=torch.device("cpu"), timeout_seconds=20
    )
    yield group
    group.close()


def build(settings: WorkerSettings, group: EpGroup, clock: StartClock) -> RankModel:
    return RankModel.build(
        settings,
        ModelConfig.from_folder(settings.model),
        group,
        form=AttentionForm.ABSORBED,
        device=torch.device("cpu"),
        dtype=torch.float32,
        clock=clock,
    )


def tokens_of(built: RankModel, count: int) -> list[int]:
    runner = Runner(built.model, built.kv_cache, AttentionForm.ABSORBED)
    tokens = [9]
    for position in range(count):
        row = SampleRow(sampling=Sampling(), position=position + 1)
        piece = Piece(token_ids=tokens[-1:], start=position, pages=[3, 1], sample=row)
        (token,) = runner.step([piece], (1,))
        assert token is not None
        tokens.append(token.token_id)
    return tokens[1:]


def test_a_rank_comes_up_from_a_configuration_alone(folder: Path, group: EpGroup) -> None:
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    settings = WorkerSettings(model=folder, load_format="dummy", kv_pages=8, page_tokens=16)
    clock = StartClock()
    built = build(settings, group, clock)
    assert [phase for phase, _ in clock.seconds()] == [
        "python", "plan", "dispatchers", "load", "compile", "memory", "warm_up", "graphs"
    ]  # fmt: skip
    assert not built.model.experts.counts.any(), "warming up is nobody's traffic"
    assert built.graphs is None
    used = {term: (planned, taken) for term, planned, taken in built.memory}
    assert all(planned == taken for planned, taken in used.values())
    assert used["KV pages"][1] == built.kv_cache.nbytes
    tokens = tokens_of(built, 12)
    assert len(set(tokens)) > 2, "random weights say this and that"
    assert tokens == tokens_of(build(settings, group, StartClock()), 12)


def test_experts_in_one_call(folder: Path, group: EpGroup) -> None:
    """The same tokens, by sums of another order."""
    settings = WorkerSettings(model=folder, load_format="dummy", kv_pages=8, page_tokens=16)
    fused = settings.model_copy(update={"routed_experts": "fused"})
    built = build(fused, group, StartClock())
    assert all(moe.fused for moe in built.model.moe_layers)
    assert tokens_of(built, 3) == tokens_of(build(settings, group, StartClock()), 3)


def test_fingerprints_of_made_up_weights(folder: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_folder(folder)

    def fingerprint(settings: WorkerSettings) -> str:
        return kv_fingerprint(
            folder, config, dtype_name="float32", page_tokens=64,
            revision=weights_revision(settings),
        )  # fmt: skip

    dummy = WorkerSettings(model=folder, load_format="dummy")
    assert fingerprint(dummy) == fingerprint(WorkerSettings(model=folder, load_format="dummy"))
    on_gpu = WorkerSettings(model=folder, load_format="dummy", device="cuda:1")
    assert fingerprint(on_gpu) != fingerprint(dummy), "a GPU draws other numbers"
    other = WorkerSettings(model=config_folder(tmp_path / "plain", None), load_format="dummy")
    assert fingerprint(other) != fingerprint(dummy)
    assert weights_revision(WorkerSettings(model=folder)) is None


def test_a_plan_that_does_not_fit_ends_the_start_before_anything_is_loaded(
    folder: Path, group: EpGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = RankMemory(num_bytes=1 << 20)
    monkeypatch.setattr(RankMemory, "of", lambda settings, device: little)
    monkeypatch.setattr(rank_model, "load_model", lambda *_, **__: pytest.fail("it was loaded"))
    settings = WorkerSettings(model=folder, load_format="dummy")
    with pytest.raises(ValueError, match="needs .* GiB of the .* GiB"):
        build(settings, group, StartClock())


def test_every_length_and_every_kind_of_layer_is_warmed(folder: Path, group: EpGroup) -> None:
    settings = WorkerSettings(model=folder, load_format="dummy", kv_pages=8, page_tokens=16)
    built = build(settings, group, StartClock())
    config = built.model.config
    assert representatives(built.model) == [0, 1]
    assert config.num_dense_layers == 1
    for form in AttentionForm:
        built.kv_cache.zero_()
        warm_up(built.model, built.kv_cache, form, longest=20, num_ranks=1, on_gpu=True)
        assert built.kv_cache.isfinite().all()
    assert list(lengths_up_to(20)) == [1, 2, 4, 8, 16, 20]
    assert list(lengths_up_to(1)) == [1]


def test_terms_have_advice() -> None:
    names = {"weights", "dispatch", memory_plan.KV, memory_plan.GRAPHS, memory_plan.ACTIVATIONS}
    assert names <= set(memory_plan.ADVICE)
