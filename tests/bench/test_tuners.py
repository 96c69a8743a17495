"""What the tuners of kernels try, choose and write; measuring needs a GPU."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from bench import tune_fp8_clusters, tune_fused_moe
from bench.compile_offline import MAX_SHARED_BYTES
from bench.kernel_cases import tuning
from bench.kernel_cases.tuning import write_section
from bench.tune_fp8_clusters import choice_of, rows_of, shapes_of
from bench.tune_fused_moe import best_pair, candidates
from kernels.build.fp8_gemm_blocks import Fp8Blocks, Fp8Choice, default_fp8_blocks
from kernels.build.fp8_gemm_clusters import ClusterBlocks
from kernels.build.tuned import Blocks, default_blocks, read_table
from kernels.gemm import fp8_gemm_choice

FACTS = {"capability": 90, "multiprocessors": 132, "memory_gib": 140}


@pytest.fixture(autouse=True)
def _on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "device_facts", lambda _: FACTS)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("dtype", tune_fused_moe.DTYPES)
def test_candidates_fit_and_suit_the_rows(dtype: torch.dtype, quick: bool) -> None:
    for rows in tune_fused_moe.ROWS:
        found = list(candidates(dtype, rows, quick=quick))
        assert found[0] == tune_fused_moe.default_cut(dtype, rows)
        assert len(set(found)) == len(found) <= (70 if quick else 180)
        for each in found:
            if isinstance(each, Fp8Blocks):
                shared = each.num_stages * each.stage_bytes
            else:
                shared = each.num_stages * each.block_k * (each.block_m + each.block_n)
            assert shared * dtype.itemsize <= MAX_SHARED_BYTES
        # A pair of one height is always possible.
        assert {each.block_m for each in found} <= {16, 32, 64, 128}


def test_the_best_pair_has_one_height() -> None:
    low, high = (
        Blocks(block_m=block_m, block_n=64, block_k=64, num_warps=4, num_stages=3)
        for block_m in (16, 64)
    )
    assert best_pair({low: 1.0, high: 5.0}, {low: 7.0, high: 2.0}) == (7.0, (high, high))


def test_sections_are_kept_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "NVIDIA_H200.json"
    assert read_table(path) == {}
    blocks = asdict(default_blocks(torch.bfloat16, 4))
    write_section(path, "fused_moe", {"bfloat16 e32 n4096 k7168": {"4": blocks}})
    cut = Fp8Blocks(
        block_m=16, block_n=64, halves=1, swapped=True, splits=2, num_warps=4, num_stages=4
    )
    choice = Fp8Choice(path="triton", blocks=cut)
    write_section(path, "fp8_gemm", {"dense n7168 k16384": {"16": choice.record()}})
    write_section(path, "fused_moe", {"bfloat16 e32 n7168 k2048": {"8": blocks}})
    table = read_table(path)
    assert table["device"] == FACTS
    assert set(table["fused_moe"]) == {"bfloat16 e32 n4096 k7168", "bfloat16 e32 n7168 k2048"}
    assert Fp8Choice.of_record(table["fp8_gemm"]["dense n7168 k16384"]["16"]) == choice
    assert json.loads(path.read_text()) == table
    path.write_text("[]")
    with pytest.raises(ValueError, match="no table"):
        read_table(path)


def test_what_was_tuned_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kernels.build import tuned

    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Test")
    wanted = default_blocks(torch.bfloat16, 1000)
    shapes = {"bfloat16 e8 n4096 k7168": {"4": asdict(wanted)}}
    write_section(tuned.table_path("NVIDIA Test"), "fused_moe", shapes)
    default = default_fp8_blocks(0, 64, 7168, 16384)
    choices = {
        "64": Fp8Choice(path="deep_gemm", blocks=default).record(),
        "128": Fp8Choice(path="triton", blocks=default).record(),
    }
    write_section(tuned.table_path("NVIDIA Test"), "fp8_gemm", {"dense n4096 k7168": choices})
    device = torch.device("cuda", 77)  # whose table nobody has read yet
    assert tuned.blocks_for(device, torch.bfloat16, 8, 4096, 7168, 3) == wanted
    assert tuned.blocks_for(device, torch.bfloat16, 9, 4096, 7168, 3) != wanted
    assert fp8_gemm_choice.fp8_blocks(device, 0, 64, 7168, 16384) == default
    assert fp8_gemm_choice.fp8_blocks(device, 0, 4096, 4096, 7168) == default
    assert fp8_gemm_choice.cluster_blocks(device, 1, 4096, 7168) is None
    paths = [fp8_gemm_choice.faster_path(device, 0, rows, 4096, 7168) for rows in (1, 96, 97, 999)]
    assert paths == ["deep_gemm", "triton", "triton", "triton"]


def test_clusters_have_room_for_all_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kernels.build import tuned

    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Test")
    default = default_fp8_blocks(0, 64, 7168, 16384)
    few, more = (
        ClusterBlocks(warpgroups=2, across=1, splits=splits, per_multiprocessor=1)
        for splits in (2, 4)
    )
    choices = {
        str(rows): Fp8Choice(path="deep_gemm", blocks=default, clusters=clusters).record()
        for rows, clusters in ((8, few), (32, more), (64, None))
    }
    write_section(tuned.table_path("NVIDIA Test"), "fp8_gemm", {"dense n7168 k16384": choices})
    device = torch.device("cuda", 78)
    found = [
        fp8_gemm_choice.cluster_blocks(device, rows, 7168, 16384) for rows in (1, 8, 9, 32, 33, 65)
    ]
    assert found == [few, few, more, more, None, None]


def test_the_cuda_kernel_is_kept_for_where_deep_gemm_is_missing() -> None:
    blocks = default_fp8_blocks(0, 64, 7168, 16384)
    clusters = ClusterBlocks(warpgroups=2, across=1, splits=4, per_multiprocessor=1)

    def choice(**paths: float) -> tuple[str, bool]:
        found = choice_of(paths, blocks, clusters)
        return found.path, found.clusters is not None

    assert choice(cuda=5.0, triton=9.0, deep_gemm=7.0) == ("cuda", True)
    assert choice(cuda=8.0, triton=9.0, deep_gemm=7.0) == ("deep_gemm", True)
    assert choice(cuda=9.0, triton=8.0, deep_gemm=7.0) == ("deep_gemm", False)
    assert choice(cuda=9.0, triton=6.0, deep_gemm=7.0) == ("triton", False)
    assert choice(cuda=5.0, triton=9.0) == ("cuda", True)
    # The best of many cuts is hardly better than DeepGEMM's only one.
    assert choice(cuda=6.95, triton=9.0, deep_gemm=7.0) == ("deep_gemm", True)
    assert rows_of([48, 64, 256]) == [1, 8, 16, 32, 48, 64, 96, 128]


def test_a_run_goes_on_with_the_shapes_that_are_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert shapes_of(["n2112", "n4096"]) == [(2112, 7168), (4096, 7168)]
    every = shapes_of([])
    assert {(2112, 7168), (7168, 2048), (7168, 16384)} < set(every)
    assert sorted(every) == sorted(shapes_of({f"n{n}" for n, _ in every}))
    with pytest.raises(SystemExit):
        tune_fp8_clusters.main(["n2112", "n99"])
    assert "no shape has n99" in capsys.readouterr().err
