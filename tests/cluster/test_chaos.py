"""Faults of all kinds under load: every stream is as its undisturbed twin, and nothing is left.

The whole soak is `make soak`. A seed that fails is kept in tests/scenarios/chaos, from the faults
that led to what was wrong, and is played here from then on.
"""

from pathlib import Path

import pytest

from bench.chaos import SCENARIOS, main
from bench.records import read

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SEED = 410
NUM_FAULTS = 10
LOAD = ("--streams", "6", "--tokens", "120")


def test_a_slice_of_the_soak(tmp_path: Path) -> None:
    slice_of = ["--seed", str(SEED), "--faults", str(NUM_FAULTS), "--rate", "1", *LOAD]
    assert main([*slice_of, "--record", "--results", str(tmp_path)]) == 0
    found = {record.metric: record.value for record in read(tmp_path / "chaos.jsonl")}
    assert sum(found[name] for name in found if name.startswith("faults: ")) == NUM_FAULTS
    assert found["streams"] >= 6
    for what in ("lost", "repeated", "different", "leaked", "not_recovered"):
        assert found[what] == 0


@pytest.mark.slow
@pytest.mark.parametrize("scenario", sorted(SCENARIOS.glob("*.txt")), ids=lambda file: file.stem)
def test_a_scenario(scenario: Path) -> None:
    assert main(["--scenario", str(scenario), *LOAD]) == 0
