"""Writes packed_by_others.safetensors: one matrix as the formats' own packages pack it.

    pip download --no-deps autoawq==0.2.9 auto-gptq==0.7.1 compressed-tensors==0.20.0
    PYTHONPATH=FOLDER python tests/model/weights/pack_by_others.py     # FOLDER: all three unpacked

Values, zero points (unsigned) and scales [32, 2] of `values` [32, 256] are kept beside what is
packed, under METHOD.KIND., once with zero points of 8 only and once with others.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

ROWS, COLUMNS, GROUP = 32, 256, 128
FILE = Path(__file__).with_name("packed_by_others.safetensors")


def module_of(name: str, path: str) -> Any:  # noqa: ANN401 - a module that is not installed
    """One file of a package; the rest of it wants libraries that packing does not."""
    (file,) = (one for folder in sys.path if (one := Path(folder, path)).is_file())
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stub(name: str, **names: Any) -> None:  # noqa: ANN401 - whatever is imported from it
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__.update(names)


def by_awq(linear: torch.nn.Linear, scales: torch.Tensor, zeros: torch.Tensor) -> Any:  # noqa: ANN401 - tensors
    stub("awq.utils.module", try_import=lambda _: (None, ""))
    stub("awq.utils.utils", get_best_device=lambda: "cpu")
    stub("awq.utils.packing_utils", dequantize_gemm=None)
    for name in ("awq", "awq.utils"):
        stub(name)
    gemm = module_of("awq_gemm", "awq/modules/linear/gemm.py")
    return gemm.WQLinear_GEMM.from_linear(
        linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
    ).state_dict()


def by_gptq(linear: torch.nn.Linear, scales: torch.Tensor, zeros: torch.Tensor) -> Any:  # noqa: ANN401 - tensors
    qlinear = module_of("qlinear_cuda", "auto_gptq/nn_modules/qlinear/qlinear_cuda.py")
    packed = qlinear.QuantLinear(4, GROUP, COLUMNS, ROWS, bias=False)
    packed.pack(linear, scales, zeros.clone())
    return packed.state_dict()


def by_compressed_tensors(
    linear: torch.nn.Linear, scales: torch.Tensor, zeros: torch.Tensor
) -> Any:  # noqa: ANN401 - tensors
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    is_symmetric = bool((zeros == 8).all())
    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=is_symmetric, strategy="group", group_size=GROUP
    )
    tensors = {
        "weight": linear.weight.data,
        "weight_scale": scales,
        "weight_zero_point": (zeros - 8).to(torch.int8),
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return PackedQuantizationCompressor.compress(tensors, scheme)


def main() -> None:
    rng = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (ROWS, COLUMNS), generator=rng)
    scales = (0.01 + 0.02 * torch.rand(ROWS, COLUMNS // GROUP, generator=rng)).half()
    kept = {"values": values.to(torch.uint8), "scales": scales}
    for kind in ("symmetric", "asymmetric"):
        zeros = torch.full((ROWS, COLUMNS // GROUP), 8)
        if kind == "asymmetric":
            zeros = torch.randint(1, 16, zeros.shape, generator=rng)
        kept[f"zeros.{kind}"] = zeros.to(torch.uint8)
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        spread = [one.repeat_interleave(GROUP, dim=1) for one in (zeros, scales.float())]
        linear.weight.data = (values - spread[0]) * spread[1]
        for method, pack in {
            "awq": by_awq, "gptq": by_gptq, "compressed-tensors": by_compressed_tensors,
        }.items():  # fmt: skip
            packed = pack(linear, scales.float(), zeros)
            for name, value in packed.items():
                is_scale = "scale" in name
                kept[f"{method}.{kind}.{name}"] = value.half() if is_scale else value
    save_file({name: value.contiguous().clone() for name, value in kept.items()}, FILE)


if __name__ == "__main__":
    main()
