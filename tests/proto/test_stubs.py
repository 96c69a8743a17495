"""The committed stubs are what the contracts generate, byte for byte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_stubs_are_fresh_and_generation_is_stable(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="development extra")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        subprocess.run(
            [str(ROOT / "scripts" / "proto"), str(tmp_path / name)],
            check=True,
            timeout=60,
            env={**os.environ, "PYTHON": sys.executable},
        )
    committed = sorted((ROOT / "proto").glob("*_pb2*"))
    generated = sorted((tmp_path / "first" / "proto").iterdir())
    assert [path.name for path in committed] == [path.name for path in generated]
    assert len(committed) == 4 * len(list((ROOT / "proto").glob("*.proto")))
    for path in committed:
        first = (tmp_path / "first" / "proto" / path.name).read_bytes()
        assert first == path.read_bytes(), f"{path.name} is stale: run scripts/proto"
        assert first == (tmp_path / "second" / "proto" / path.name).read_bytes()


def test_enums_have_an_unspecified_zero_and_packages_a_version() -> None:
    from proto import generate_pb2, router_pb2, worker_pb2

    for module in (generate_pb2, router_pb2, worker_pb2):
        assert module.DESCRIPTOR.package.endswith(".v1")
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_finish_reasons_equal_those_of_the_rank_messages() -> None:
    from engine.link.messages import Finish
    from proto.generate_pb2 import FinishReason

    names = {value: name.removeprefix("FINISH_REASON_") for name, value in FinishReason.items()}
    assert {finish.value for finish in Finish} == set(names)
    assert names[Finish.STOP] == "STOP"
    assert names[Finish.LENGTH] == "LENGTH"
