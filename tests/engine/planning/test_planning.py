"""A plan without GPUs is that of the ranks; what it advises fits, and nothing milder does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.errors import CheckpointError
from core.group_plan import Gpu, GroupPlan, GroupQuestion
from engine.planning.answer import answer
from engine.planning.host_needs import read_bytes
from engine.planning.planner import Planner, rank_facts
from engine.process.settings import WorkerSettings
from engine.start.memory_plan import KV
from engine.start.model_loading import model_config
from engine.start.rank_memory import RankMemory
from engine.start.rank_model import Prepared
from engine.start.start_plan import FORMS
from ep.dispatch import dispatchers
from ep.group.group import EpGroup
from model.known_models import WeightFormat, full_size_config
from tests.ep.thread_ranks import Meeting, on_all_ranks
from tests.tiny_checkpoint import make_tiny_checkpoint

GIB = 1 << 30


def gpu(gib: float) -> Gpu:
    return Gpu(name="any", total_bytes=int(gib * GIB), free_bytes=int(gib * GIB))


def question(folder: Path, *flags: str, gib: float = 139.7, role: str = "decode") -> GroupQuestion:
    return GroupQuestion(
        name=role,
        role="decode" if role == "decode" else "prefill",
        flags=("--model", str(folder), "--device", "cuda", *flags),
        gpu=gpu(gib),
    )


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_folder(tmp_path_factory.mktemp("v3"), "fp8")


def config_folder(folder: Path, weights: WeightFormat) -> Path:
    (folder / "config.json").write_text(json.dumps(full_size_config(weights)))
    return folder


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_plan_is_what_ranks_decide(
    full_size: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks agree on theirs on this machine, told that it has GPUs."""
    flags = ("--ranks", "2", "--max-running", "16", "--num-redundant-experts", "4")
    flags += ("--speculative-tokens", "2")
    asked = question(full_size, *flags, gib=400, role=role)
    settings = WorkerSettings.parse(asked.flags)
    facts = rank_facts(asked, settings)
    memory = RankMemory.of_gpu(1.0, asked.gpu.total_bytes, asked.gpu.free_bytes, 0)
    monkeypatch.setattr(RankMemory, "of", lambda settings, device: memory)
    config = model_config(settings, FORMS[role])

    def prepare(group: EpGroup, _meeting: Meeting) -> Prepared:
        monkeypatch.setattr(dispatchers, "own_facts", lambda device: facts[0])
        return Prepared.agree(
            settings.model_copy(update={"load_format": "dummy"}),
            config,
            group,
            form=FORMS[role],
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
        )

    told = answer(asked)
    for prepared in on_all_ranks(2, prepare):
        assert isinstance(prepared, Prepared)
        plan = prepared.plan
        assert told.terms == plan.memory.terms
        assert told.kv_pages == plan.memory.kv.num_pages
        assert (told.dispatcher, told.slots) == (plan.choice.name, plan.needs.slots_per_rank)
        assert told.step_tokens == plan.needs.step_tokens


def test_advice_is_the_mildest_that_fits(full_size: Path) -> None:
    """Of chunks: twice as long ones do not fit."""
    flags = ("--ranks", "8", "--nodes", "2", "--rendezvous", "a:1")
    too_long = question(full_size, *flags, "--chunk-tokens", "262144", gib=79.1, role="prefill")
    refused = answer(too_long)
    assert refused.problem
    (chunks,) = (each for each in refused.advice if each.change.startswith("chunk-tokens"))
    tokens = int(chunks.change.split()[1])

    def with_chunks(tokens: int) -> GroupPlan:
        told = ("--chunk-tokens", str(tokens))
        return answer(question(full_size, *flags, *told, gib=79.1, role="prefill"))

    assert with_chunks(tokens).kv_tokens == chunks.kv_tokens
    milder = with_chunks(2 * tokens)
    assert milder.problem or milder.kv_pages < 256


def test_two_changes_where_one_is_not_enough(full_size: Path) -> None:
    refused = answer(question(full_size, "--ranks", "1", gib=79.1))
    assert refused.advice
    assert all(" and " in each.change for each in refused.advice)
    assert "a w4afp8 checkpoint (ctl quantize) and ranks 8 (now 1)" in [
        each.change for each in refused.advice
    ]


def test_what_was_asked_for_outright_is_cut_to_what_fits(full_size: Path) -> None:
    flags = ("--ranks", "8", "--kv-pages", "1000000", "--max-model-len", "100000")
    refused = answer(question(full_size, *flags))
    (pages,) = (each for each in refused.advice if each.change.startswith("kv-pages"))
    number = int(pages.change.split()[1])
    again = answer(question(full_size, *flags[:2], "--kv-pages", str(number)))
    assert not again.problem
    assert again.kv_tokens == pages.kv_tokens == 64 * number


def test_nothing_is_advised_where_nothing_helps(full_size: Path) -> None:
    refused = answer(replace(question(full_size, gib=12), most_nodes=1))
    assert refused.problem
    assert refused.advice == ()


def test_look_ups_need_no_mtp_layer_and_no_kv(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "tiny")
    flags = ("--speculative-tokens", "2")
    with pytest.raises(CheckpointError, match="speculative-method ngram"):
        answer(question(tmp_path / "tiny", *flags))
    told = answer(question(tmp_path / "tiny", *flags, "--speculative-method", "ngram"))
    plain = answer(question(tmp_path / "tiny"))
    assert not told.problem
    kv = [[term for term in plan.terms if term.name == KV] for plan in (told, plain)]
    assert kv[0] == kv[1] != []
    assert told.kv_pages == plain.kv_pages


def test_headers_of_weights_are_read_where_they_are(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "tiny")
    asked = question(tmp_path / "tiny")
    told = answer(asked)
    assert told.from_headers
    assert not told.problem
    assert told.dispatcher == "local"
    files = (tmp_path / "tiny").glob("*.safetensors")
    stored = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    planner = Planner(asked, WorkerSettings.parse(asked.flags))
    assert 0 < read_bytes(planner) <= stored
    assert told.host is not None
    assert told.host.read_bytes == read_bytes(planner)


def test_a_node_reads_its_experts_and_what_all_ranks_have(full_size: Path) -> None:
    def read(*flags: str) -> int:
        host = answer(question(full_size, "--ranks", "8", *flags, "--rendezvous", "a:1")).host
        assert host is not None
        return host.read_bytes

    one, two, four = (read("--nodes", str(nodes)) for nodes in (1, 2, 4))
    assert one == pytest.approx(671e9, rel=0.01)
    assert one - two == pytest.approx(2 * (two - four), rel=1e-6), "routed experts are halved"
    assert read("--num-redundant-experts", "32") == one, "a replica is read once"
