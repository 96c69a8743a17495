"""What a worker is told about where its experts are."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

import demo_model
from engine.process.settings import WorkerSettings
from engine.start.expert_placement import agreed_placement, starting_placement
from ep.placement.placement import Placement
from kernels.moe import w4a8_grouped_gemm_packing
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


class PairOfRanks:
    """Rank 1 of two, where rank 0 has told `other`; None: the same as this one."""

    size, rank = 2, 1

    def __init__(self, other: Sequence[int] | None = None) -> None:
        self._other = other
        self.told: Sequence[int] = ()

    def exchange(self, facts: Sequence[int]) -> list[Sequence[int]]:
        self.told = facts
        return [facts if self._other is None else self._other, facts]


def agreed(group: PairOfRanks, **settings: object) -> Placement:
    values = WorkerSettings.model_validate({"model": MODEL, **settings})
    return agreed_placement(values, ModelConfig.from_folder(MODEL), group)  # type: ignore[arg-type]


def test_ranks_that_agree_and_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = PairOfRanks()
    assert agreed(rank) == agreed(PairOfRanks(rank.told)) == Placement.trivial(3, 16, 2)
    with pytest.raises(ValueError, match="rank 0 of the group starts with another placement"):
        agreed(PairOfRanks(rank.told), num_redundant_experts=2)
    # One whose int4 experts would mean something else here.
    monkeypatch.setattr(w4a8_grouped_gemm_packing, "LAYOUT_VERSION", 1)
    with pytest.raises(ValueError, match="the version of epserve must be the same"):
        agreed(PairOfRanks(rank.told))
