"""Tables of block sizes: cards without one take that of the most similar card, and say so."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.build import tuned

# (compute capability, multiprocessors, GiB) as the driver tells them, and the table to take
CARDS = {
    "NVIDIA H100 80GB HBM3": (90, 132, 79, "NVIDIA_H100_80GB_HBM3"),
    "NVIDIA H100 PCIe": (90, 114, 79, "NVIDIA_H100_80GB_HBM3"),
    "NVIDIA H100 NVL": (90, 132, 93, "NVIDIA_H100_80GB_HBM3"),
    "NVIDIA H800": (90, 132, 79, "NVIDIA_H100_80GB_HBM3"),
    "NVIDIA H20": (90, 78, 95, "NVIDIA_H100_80GB_HBM3"),
    "NVIDIA H20-3e": (90, 78, 140, "NVIDIA_H200"),
    "NVIDIA H200": (90, 132, 140, "NVIDIA_H200"),
    "NVIDIA H200 NVL": (90, 132, 140, "NVIDIA_H200"),
    "NVIDIA A100-SXM4-80GB": (80, 108, 79, None),
    "NVIDIA B200": (100, 148, 179, None),
}


@pytest.mark.parametrize("section", ["fp8_gemm", "fused_moe"])
@pytest.mark.parametrize("card", CARDS)
def test_each_card_takes_the_table_of_its_like(
    card: str, section: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capability, multiprocessors, gib, stem = CARDS[card]
    properties = SimpleNamespace(
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=multiprocessors,
        total_memory=int((gib + 0.3) * 2**30),
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with caplog.at_level(logging.INFO):
        found = tuned._section(section, torch.device("cuda"))
    if stem is None:
        assert found == {}
        assert f"no {section} block sizes were tuned for this device" in caplog.text
        return
    assert found == json.loads((tuned.FOLDER / f"{stem}.json").read_text())[section]
    is_own = stem == card.replace(" ", "_")
    assert caplog.text == "" if is_own else f"{section} block sizes of {stem} count" in caplog.text


def test_a_section_that_the_own_table_lacks_comes_from_the_nearest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Own")
    facts = {"capability": 90, "multiprocessors": 132, "memory_gib": 79}
    monkeypatch.setattr(tuned, "device_facts", lambda _: facts)
    own = {"device": facts, "fused_moe": {"own": {}}}
    other = {"device": facts | {"memory_gib": 140}, "fused_moe": {}, "fp8_gemm": {"other": {}}}
    (tmp_path / "NVIDIA_Own.json").write_text(json.dumps(own))
    (tmp_path / "NVIDIA_Other.json").write_text(json.dumps(other))
    assert tuned._section("fused_moe", torch.device("cuda")) == {"own": {}}
    assert tuned._section("fp8_gemm", torch.device("cuda")) == {"other": {}}
