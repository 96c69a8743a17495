"""What a rank computes with, made in one go from settings: without a GPU, and without a
checkpoint."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from engine.process.fingerprint import kv_fingerprint
from engine.process.settings import WorkerSettings
from engine.sampling.sampler import SampleRow
from engine.sampling.sampling_params import Sampling
from engine.start import memory_plan, rank_model
from engine.start.model_loading import weights_revision
from engine.start.rank_memory import RankMemory
from engine.start.rank_model import Prepared, RankModel
from engine.start.start_clock import StartClock
from engine.start.warm_up import batches, lengths_up_to, representatives, warm_up
from engine.step.runner import Runner
from engine.step.sequence_chunk import SequenceChunk
from ep.group.group import EpGroup
from ep.placement.placement import Placement
from model.batch import AttentionForm
from model.config import ModelConfig
from model.moe.moe import Moe
from tests.ep.thread_ranks import Meeting, on_all_ranks
from tests.model.weights.test_dummy_checkpoint import FP8, config_folder


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
        chunk = SequenceChunk(token_ids=tokens[-1:], start=position, pages=[3, 1], sample=row)
        (token,) = runner.step([chunk], (1,))
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
    assert representatives(built.model) == [0, 1, 2]
    assert config.num_dense_layers == 1
    for form in AttentionForm:
        built.kv_cache.zero_()
        warm_up(built.model, built.kv_cache, form, longest=20, num_ranks=1, on_gpu=True)
        assert built.kv_cache.isfinite().all()
    assert list(lengths_up_to(20)) == [1, 2, 4, 8, 16, 20]
    assert list(lengths_up_to(1)) == [1]


def test_prompts_are_warmed_alone_and_together() -> None:
    def shapes(form: AttentionForm, lengths: Sequence[int]) -> list[tuple[int, int, int]]:
        """(prompts, tokens of each, tokens in front of them)."""
        return [
            (len(chunks), len(chunks[0].token_ids), chunks[0].start)
            for chunks in batches(form, lengths, range(8))
        ]

    assert shapes(AttentionForm.ABSORBED, [1, 2, 3]) == [(1, 1, 0), (2, 1, 0), (3, 1, 0)]
    alone = [(1, 1, 0), (1, 8, 0), (1, 50, 0)]
    together = [(1, 16, 0), (1, 1, 16), (2, 16, 0), (2, 1, 16), (3, 16, 0), (3, 1, 16)]
    assert shapes(AttentionForm.PLAIN, [1, 8, 50]) == alone + together


def test_the_layer_in_front_of_the_last_is_warmed_with_all_tokens(
    folder: Path, group: EpGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one goes on with the rows that are sampled."""
    settings = WorkerSettings(model=folder, load_format="dummy", kv_pages=8, page_tokens=16)
    built = build(settings, group, StartClock())
    forward, seen = Moe.forward_parts, set()

    def noted(moe: Moe, x: torch.Tensor, *rest: object) -> object:
        seen.add(len(x))
        return forward(moe, x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Moe, "forward_parts", noted)
    form = AttentionForm.PLAIN
    warm_up(built.model, built.kv_cache, form, longest=20, num_ranks=1, on_gpu=True)
    assert {2, 4, 8, 16, 20} <= seen


def test_terms_have_advice() -> None:
    names = {"weights", "dispatch", memory_plan.KV, memory_plan.GRAPHS, memory_plan.ACTIVATIONS}
    assert names <= set(memory_plan.ADVICE)


@pytest.mark.parametrize("differ", ["files", "replicas", "drafts"])
def test_ranks_that_place_experts_differently_do_not_start(
    folder: Path, tmp_path: Path, differ: str
) -> None:
    """Of the same shape, so that nothing else shows it."""
    config = ModelConfig.from_folder(folder)
    in_turn = Placement.trivial(config.num_moe_layers, config.num_experts, 2)
    swapped = (1, 0, *range(2, config.num_experts))
    files = [tmp_path / f"{rank}.json" for rank in range(2)]
    for file, placement in zip(files, (in_turn, in_turn.with_layers({0: swapped})), strict=True):
        file.write_text(placement.as_json())

    def prepare(group: EpGroup, _meeting: Meeting) -> Prepared:
        own = {"expert_placement": files[group.rank]}
        if differ == "replicas":
            own = {"num_redundant_experts": 1 + group.rank}
        elif differ == "drafts":
            own = {"speculative_tokens": 1 + group.rank}
        settings = WorkerSettings(model=folder, load_format="dummy", kv_pages=8, **own)
        return Prepared.agree(
            settings,
            config,
            group,
            form=AttentionForm.ABSORBED,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )

    with pytest.raises(ValueError, match="starts with another placement"):
        on_all_ranks(2, prepare)
