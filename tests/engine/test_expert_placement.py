"""What a worker is told about where its experts are."""

import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

import demo_model
from engine.expert_placement import starting_placement
from engine.settings import WorkerSettings
from ep.placement import Placement
from model.config import ModelConfig

MODEL = Path(demo_model.__file__).parent / "checkpoint"


def started(num_ranks: int, **settings: object) -> Placement:
    values = WorkerSettings.model_validate({"model": MODEL, **settings})
    again = WorkerSettings.model_validate(values.model_dump(mode="json"))  # as ranks are told
    return starting_placement(again, ModelConfig.from_folder(MODEL), num_ranks)


def test_experts_in_turn_with_replicas_of_the_first() -> None:
    assert started(4) == Placement.trivial(3, 16, 4)
    placement = started(4, num_redundant_experts=4)
    assert placement == Placement.trivial(3, 16, 4, 4)
    assert placement.local_experts(0, 3) == (15, 0, 1, 2, 3)


def test_a_dumped_placement(tmp_path: Path) -> None:
    dumped = Placement.trivial(3, 16, 2, 2).with_layers({1: (*range(16), 5, 5)})
    file = tmp_path / "placement.json"
    file.write_text(dumped.as_json())
    assert started(2, expert_placement=file) == dumped


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "placement.json: no expert placement"),
        ("[", "placement.json: "),
        (Placement.trivial(3, 16, 4).as_json(), "is for 4 ranks, here are 2"),
        (Placement.trivial(3, 8, 2).as_json(), "is for 8 experts a layer, here are 16"),
        (Placement.trivial(58, 16, 2).as_json(), "is for 58 MoE layers, here are 3"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "placement.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        started(2, expert_placement=file)


def test_settings_that_contradict_or_name_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="no such file"):
        started(2, expert_placement=tmp_path / "nowhere.json")
    file = shutil.copy(MODEL / "config.json", tmp_path)
    with pytest.raises(ValidationError, match="no num-redundant-experts"):
        started(2, expert_placement=file, num_redundant_experts=1)
