"""The paths that a rank names at start, on devices that are not here: a model of DeepSeek-V3's
widths without memory, with what would be installed and compiled there."""

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import kernels.attention
from bench.ranks.deepseek_v3_config import WeightFormat, write_config
from engine.start.kernel_paths import kernel_paths, token_counts
from kernels.attention import mla_decode_cuda
from kernels.build import cuda_build, paths, tuned
from model.batch import AttentionForm
from model.deepseek import DeepseekV3
from model.dummy_checkpoint import DummyCheckpoint
from model.moe import Moe
from tests.kernels.attention.test_mla_decode_flash import fake_flash_mla
from tests.model.test_dummy_checkpoint import INT4, config_folder, load

DECODE, PREFILL = AttentionForm.ABSORBED, AttentionForm.PLAIN
SMALLER = {"n_routed_experts": 16, "vocab_size": 1280}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
LIBRARIES = {"deep_gemm", "flash_mla", "triton"}
SOURCES = {source.stem for source in cuda_build.sources()}
Load = Callable[[WeightFormat, AttentionForm], DeepseekV3]
Device = Callable[..., None]


class Weightless(DummyCheckpoint):
    def raw(self, name: str) -> torch.Tensor:
        stored = self.stored[name]
        return torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Load:
    @cache
    def load_weightless(weights: WeightFormat, form: AttentionForm) -> DeepseekV3:
        folder = tmp_path_factory.mktemp(weights)
        write_config(folder, weights=weights, num_layers=4, sizes=SMALLER)
        model = DeepseekV3.load(
            folder, device="meta", dtype=torch.bfloat16, source=Weightless(folder), form=form,
            linear="plain" if weights == "bf16" else "fp8",
        )  # fmt: skip
        *dense, last = model.layers
        assert isinstance(last.mlp, Moe)
        as_on_a_gpu = replace(last.mlp, gate_weight=last.mlp.gate_weight.bfloat16())
        return replace(model, layers=(*dense, replace(last, mlp=as_on_a_gpu)))

    return load_weightless


def forget() -> None:
    for known in (paths._path_of, tuned._fp8_table, mla_decode_cuda._is_hopper):
        known.cache_clear()
    sys.modules.pop("kernels.attention.mla_decode_flash", None)
    vars(kernels.attention).pop("mla_decode_flash", None)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Makes `cuda` one with these packages, and these of our sources compiled."""

    def become(
        installed: Collection[str] = LIBRARIES,
        built: Collection[str] = SOURCES,
        *,
        capability: int = 9,
        name: str = "NVIDIA H200",
    ) -> None:
        forget()
        monkeypatch.delenv("EPSERVE_KERNELS", raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(paths, "find_spec", lambda name: name if name in installed else None)
        monkeypatch.setattr(cuda_build, "is_built", lambda source, _: source.stem in built)
        if "flash_mla" in installed:
            monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla(legacy=False))

    yield become
    forget()


def named(model: DeepseekV3, form: AttentionForm, **options: int) -> dict[str, str]:
    sizes = {"page_tokens": 64, "most_tokens": 192 if form is DECODE else 2048} | options
    return kernel_paths(model, torch.device("cuda"), form, **sizes)


def test_an_h200_with_all_there_is(deepseek: Load, device: Device) -> None:
    device()
    decode, prefill = (
        named(deepseek("fp8", DECODE), DECODE),
        named(deepseek("fp8", PREFILL), PREFILL),
    )
    assert decode == {
        "absorb": "cublas+cuda+triton",  # one launch makes the queries of up to 128 rows
        "combine": "triton",
        "fp8_gemm": "cuda+deep_gemm+triton",
        "fp8_grouped_gemm": "deep_gemm+triton",
        "gate": "triton",
        "head_linear": "cublas",
        "merge_states": "triton",
        "mla_decode": "cuda+flash_mla",
        "pack_tokens": "triton",
        "permute": "triton",
        "quantise": "triton",
        "rescale": "triton",
        "rms_norm": "triton",
        "rope_write": "triton",
        "router_gemm": "cuda+triton",
        "sample": "triton",
        "silu_mul": "triton",
    }
    others = {"absorb": "", "fp8_grouped_gemm": "deep_gemm", "mla_prefill": "cuda"}
    others["router_gemm"] = "cublas+cuda+triton"
    assert prefill == {name: path for name, path in (decode | others).items() if path}


@pytest.mark.parametrize(
    ("most", "absorb", "mla_decode"),
    [(32, "triton", "cuda"), (33, "cuda+triton", "cuda"), (128, "cuda+triton", "cuda")],
)
def test_few_rows_take_fewer_paths(
    deepseek: Load, device: Device, most: int, absorb: str, mla_decode: str
) -> None:
    device()
    found = named(deepseek("fp8", DECODE), DECODE, most_tokens=most)
    assert (found["absorb"], found["mla_decode"]) == (absorb, mla_decode)


def test_without_libraries_our_kernels_do_it_all(deepseek: Load, device: Device) -> None:
    device({"triton"})
    found = named(deepseek("fp8", DECODE), DECODE)
    assert found["fp8_gemm"] == "cuda+triton"
    assert found["fp8_grouped_gemm"] == "triton"
    assert found["mla_decode"] == "cuda"
    named_paths = "+".join(found.values()).split("+")
    assert set(named_paths) == {"cublas", "cuda", "triton"}


def test_without_a_compiler(deepseek: Load, device: Device) -> None:
    """Nothing of ours in CUDA; what was measured to be ours is Triton's then, also beside
    DeepGEMM."""
    device(built=())
    found = named(deepseek("fp8", DECODE), DECODE)
    assert "cuda" not in "+".join(found.values()).split("+")
    assert (found["mla_decode"], found["router_gemm"]) == ("flash_mla", "triton")
    assert found["absorb"] == "cublas+triton"
    prefill = named(deepseek("fp8", PREFILL), PREFILL)
    assert (prefill["mla_prefill"], prefill["mla_decode"]) == ("triton", "flash_mla")
    device({"triton"}, built=())
    assert named(deepseek("fp8", DECODE), DECODE)["mla_decode"] == "triton"


@pytest.mark.parametrize(
    ("missing", "operation", "form", "path"),
    [
        ("mla_decode", "mla_decode", DECODE, "flash_mla"),
        ("mla_prefill", "mla_prefill", PREFILL, "triton"),
        ("fp8_gemm", "fp8_gemm", DECODE, "deep_gemm+triton"),
        ("router_gemm", "router_gemm", DECODE, "triton"),
        ("absorb_pieces", "absorb", DECODE, "cublas+triton"),
    ],
)
def test_one_library_that_cannot_be_built(
    deepseek: Load, device: Device, missing: str, operation: str, form: AttentionForm, path: str
) -> None:
    device(built=SOURCES - {missing})
    assert named(deepseek("fp8", form), form)[operation] == path


def test_a_hopper_that_nobody_has_measured(deepseek: Load, device: Device) -> None:
    device(name="NVIDIA H100 of another kind")
    found = named(deepseek("fp8", DECODE), DECODE)
    assert found["fp8_gemm"] == found["fp8_grouped_gemm"] == "deep_gemm"


def test_another_gpu(deepseek: Load, device: Device) -> None:
    """Libraries for Hopper may be installed, and ours compiled."""
    device(capability=8, name="NVIDIA A100")
    found = named(deepseek("fp8", DECODE), DECODE)
    assert set("+".join(found.values()).split("+")) == {"cublas", "triton"}
    assert found["mla_decode"] == found["fp8_gemm"] == "triton"


def test_bf16_experts_and_sizes_that_only_triton_takes(deepseek: Load, device: Device) -> None:
    device()
    found = named(deepseek("bf16", DECODE), DECODE, page_tokens=16)
    assert found["mla_decode"] == found["grouped_linear"] == "triton"
    assert not {"fp8_gemm", "fp8_grouped_gemm", "fused_moe", "w4a8_grouped_gemm"} & set(found)
    assert found["absorb"] == "cublas+triton", "queries; values are not quantised"


@pytest.mark.parametrize("built", [SOURCES, ()])
def test_int4_experts(tmp_path: Path, device: Device, built: Collection[str]) -> None:
    model = load(config_folder(tmp_path, INT4))
    device(built=built)
    found = named(model, DECODE)
    assert found["w4a8_grouped_gemm"] == "cuda"
    assert found["mla_decode"] == "triton", "float32"
    assert "router_gemm" not in found
    device(capability=8)
    assert named(model, DECODE)["w4a8_grouped_gemm"] == "reference"


def test_the_fused_product(deepseek: Load, device: Device) -> None:
    device()
    model = deepseek("fp8", DECODE)
    *dense, last = model.layers
    assert isinstance(last.mlp, Moe)
    fused = replace(model, layers=(*dense, replace(last, mlp=replace(last.mlp, fused=True))))
    found = named(fused, DECODE)
    assert found["fused_moe"] == "triton"
    assert "fp8_grouped_gemm" not in found


@pytest.mark.parametrize("form", AttentionForm)
def test_references(
    deepseek: Load, device: Device, form: AttentionForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, and where they are asked for."""
    device()
    model = deepseek("fp8", form)
    on_cpu = kernel_paths(model, torch.device("cpu"), form, page_tokens=64, most_tokens=128)
    assert set(on_cpu.values()) == {"reference"}
    monkeypatch.setenv("EPSERVE_KERNELS", "reference")
    assert named(model, form) == on_cpu


def test_numbers_of_tokens_that_are_asked_for() -> None:
    assert token_counts(1) == [1]
    assert token_counts(256) == list(range(1, 257))
    assert token_counts(600)[255:] == [256, 320, 384, 448, 512, 576, 600]
