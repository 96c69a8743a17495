"""Orders about experts to a rank's real loop: reports, moves, and requests that go on meanwhile."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.experts.rank_experts import CheckpointExperts
from engine.link.messages import ExpertReport, ExpertsMoved, MoveExperts, ReportExperts
from ep.placement.expert_slots import ExpertSlots
from model.config import ModelConfig
from tests.decode_worker.one_rank import OneRank, load_model, one_rank
from tests.tiny_checkpoint import make_tiny_checkpoint

PROMPT = [5, 6, 7, 8, 9]
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def rank(folder: Path, tmp_path: Path) -> Iterator[OneRank]:
    with one_rank(folder, tmp_path) as running:
        yield running


def report(rank: OneRank, number: int) -> ExpertReport:
    rank.send(ReportExperts(report_id=number))
    return answer(rank, ExpertReport, number)


def answer(rank: OneRank, kind: type, number: int) -> object:
    def found() -> list[object]:
        return [
            message
            for message in rank.heard
            if isinstance(message, kind)
            and number == getattr(message, "report_id", getattr(message, "move_id", None))
        ]

    rank.until(found)
    (message,) = found()
    return message


def move(rank: OneRank, number: int, layers: dict[int, tuple[int, ...]]) -> ExpertsMoved:
    rank.send(MoveExperts(move_id=number, layers=layers))
    moved = answer(rank, ExpertsMoved, number)
    assert isinstance(moved, ExpertsMoved)
    return moved


def test_counts_what_was_routed(rank: OneRank, folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    before = report(rank, 1)
    assert not np.frombuffer(before.tokens, dtype=np.int64).any()
    rank.submit("a", PROMPT, max_tokens=NUM_TOKENS)
    rank.run()
    tokens = np.frombuffer(report(rank, 2).tokens, dtype=np.int64)
    by_layer = tokens.reshape(config.num_moe_layers, config.num_experts).sum(axis=1)
    # The first token comes from prefill.
    assert by_layer.tolist() == [(NUM_TOKENS - 1) * config.experts_per_token] * len(by_layer)


def test_experts_move_under_a_request(rank: OneRank) -> None:
    undisturbed = rank.submit("undisturbed", PROMPT, max_tokens=NUM_TOKENS)
    rank.run()
    layers = report(rank, 1).physical_to_logical
    rng = random.Random(0)
    answered = rank.submit("disturbed", PROMPT, max_tokens=NUM_TOKENS)
    number = 1
    while not answered.over:
        number += 1
        shuffled = {
            layer: tuple(rng.sample(slots, len(slots))) for layer, slots in enumerate(layers)
        }
        moved = move(rank, number, shuffled)
        assert (moved.outcome, moved.placement_version) == ("done", number - 1)
    assert answered.tokens == undisturbed.tokens
    assert report(rank, number + 1).physical_to_logical == tuple(shuffled.values())


def test_refuses_what_cannot_be(rank: OneRank) -> None:
    (slots, *_) = report(rank, 1).physical_to_logical
    lacking = (slots[1], *slots[1:])
    for number, layers in ((2, {0: lacking}), (3, {99: slots}), (4, {0: slots[1:]})):
        moved = move(rank, number, layers)
        assert (moved.outcome, moved.placement_version) == ("refused", 0)
        assert moved.reason
    assert move(rank, 5, {0: slots}).outcome == "done"  # as it is already


def test_experts_of_the_checkpoint_are_those_of_the_model(folder: Path) -> None:
    config, model = ModelConfig.from_folder(folder), load_model(folder)
    reader = CheckpointExperts(folder, config, torch.device("cpu"), torch.float32)
    assert len(model.moe_layers) == config.num_moe_layers > 0
    for layer, moe in enumerate(model.moe_layers):
        slots = ExpertSlots(moe.experts.slot_tensors)
        for expert in range(config.num_experts):
            read, loaded = (torch.zeros(slots.slot_bytes, dtype=torch.uint8) for _ in range(2))
            reader.read(layer, expert, read)
            slots.read(expert, loaded)
            assert loaded.any()
            assert torch.equal(read, loaded)
