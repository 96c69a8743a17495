"""Tensors of an HF-layout folder: one safetensors file, or several with an index.

Headers are read first and held against what the architecture needs, so that everything that is
missing, left over or misshapen is named before a byte of weight is loaded.
"""

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from core.errors import CheckpointError
from kernels.gemm.block_dequantise import BLOCK, block_dequantise
from model.config import ModelConfig, quantization_of_folder
from model.w4afp8 import GROUP, INT4_TYPES, int4_problem, is_routed_weight
from model.weights.file_reader import FileReader, Reading
from model.weights.int4 import dequantise_int4
from model.weights.packed_int4 import SYMMETRIC, unpacked
from model.weights.read_ahead import ReadAhead, Run
from model.weights.stored import DTYPES, FLOAT_TYPES, FP8_TYPE, SCALE_TYPES, stored_tensors
from model.weights.tensor_names import (
    ORDER_SUFFIX,
    SCALE_SUFFIX,
    ZERO_SUFFIX,
    Shapes,
    layer_prefix,
    main_tensors,
    mtp_tensors,
    weight_of,
)

NUM_NAMED = 5  # tensors named in an error message; the rest are counted
# What is not read: buffers that older writers stored, and scales for a KV cache or an attention in
# FP8, of engines that have these; here latents are in the type that the model computes with.
IGNORED = (".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale")


class Checkpoint:
    """Read access to the tensors of a folder. A context manager: files are closed at the end.
    `bytes_read` counts what was read of tensors, as stored, of `bytes_planned`."""

    bytes_read = 0
    bytes_planned = 0

    def __init__(self, folder: str | Path, device: str | torch.device = "cpu") -> None:
        """Reads the headers; tensors will be on `device`. CheckpointError for an unreadable folder,
        index or file."""
        self.folder = Path(folder)
        quantization = quantization_of_folder(self.folder)
        self.stored = unpacked(stored_tensors(self.folder), quantization)
        self._reader = FileReader(torch.device(device))
        self._ahead = ReadAhead(self._start, self._run_of)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()

    def read_ahead(self, names: Collection[str]) -> None:
        """From now on these are read before they are asked for, each once and in this order."""
        self.bytes_planned = sum(map(self.num_bytes, names))
        self._ahead.plan(names)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor, from FP8 blocks or int4 groups where it is stored so."""
        if name not in self.stored:
            raise CheckpointError(f"{self.folder}: missing tensor {name}")
        if self.is_fp8(name):
            return block_dequantise(*self.read_fp8(name), dtype)
        if not self.is_int4(name):
            return self.raw(name).to(dtype)
        if is_routed_weight(name):
            raise CheckpointError(f"{self.folder}: {name} is int4, unlike others of its layer")
        values, scales = self.raw(name).view(torch.int8), self.raw(name + SCALE_SUFFIX)
        return dequantise_int4(values, scales, self._zero_points(name)).to(dtype)

    def num_bytes(self, name: str) -> int:
        """As stored."""
        begin, end = self.stored[name].offsets
        return end - begin

    def is_int4(self, name: str) -> bool:
        """Whether a matrix is."""
        return name.endswith(".weight") and self.stored[name].dtype in INT4_TYPES

    def is_fp8(self, name: str) -> bool:
        return name in self.stored and self.stored[name].dtype == FP8_TYPE

    def read_fp8(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, K] float8_e4m3fn and [ceil(N / 128), ceil(K / 128)] float32 scales, as stored."""
        return self.raw(name), self.raw(name + SCALE_SUFFIX).float()

    def read_int4(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, K / 2] int8 and [N, K / 128] scales of a routed expert's matrix, as stored."""
        if not self.is_int4(name):
            raise CheckpointError(f"{self.folder}: {name} is not int4, unlike others of its layer")
        self.check_symmetric(name)
        return self.raw(name), self.raw(name + SCALE_SUFFIX)

    def check_symmetric(self, name: str) -> None:
        """CheckpointError when int4 values have other zero points than the products know."""
        zero_points = self._zero_points(name)
        if zero_points is not None and bool((zero_points != SYMMETRIC).any()):
            raise CheckpointError(
                f"{self.folder}: {name} is int4 with zero points (asymmetric), of which there are "
                "no products of experts; take a symmetric checkpoint, or have ctl quantize make "
                "one of the model in FP8 or BF16"
            )

    def _zero_points(self, name: str) -> torch.Tensor | None:
        """[N, K / 128] uint8 of a packed matrix, or None where values are signed.
        CheckpointError when its columns are not in order."""
        if name + ORDER_SUFFIX in self.stored:
            groups = self.raw(name + ORDER_SUFFIX)
            in_order = torch.arange(len(groups), device=groups.device) // GROUP
            if not torch.equal(groups, in_order.to(groups.dtype)):
                raise CheckpointError(
                    f"{self.folder}: {name} is int4 with columns out of order (act-order, g_idx), "
                    "which is not supported; take a checkpoint that was made without (desc_act: "
                    "false), or have ctl quantize make one of the model in FP8 or BF16"
                )
        return self.raw(name + ZERO_SUFFIX) if name + ZERO_SUFFIX in self.stored else None

    def raw(self, name: str) -> torch.Tensor:
        """As it is stored, waited for. CheckpointError when the file cannot be read."""
        stored = self.stored[name]
        if stored.dtype not in DTYPES:
            raise CheckpointError(f"{self.folder}: {name} has dtype {stored.dtype}")
        data = self._ahead.take(name)
        self.bytes_read += data.nbytes
        return stored.arrange(data.view(DTYPES[stored.dtype]), stored.shape)

    def _run_of(self, name: str) -> Run:
        """Single numbers stay on the host, which looks at them. Of experts' matrices others are
        made."""
        stored = self.stored[name]
        is_number = not stored.shape
        return Run(
            stored.file,
            *stored.offsets,
            on_host=is_number,
            may_join=not is_number and is_routed_weight(weight_of(name)),
            alignment=DTYPES[stored.dtype].itemsize if stored.dtype in DTYPES else 1,
        )

    def _start(self, run: Run) -> Reading:
        return self._reader.start(run.file, run.begin, run.num_bytes, on_host=run.on_host)

    def check(self, config: ModelConfig) -> None:
        """CheckpointError that names missing, unexpected and misshapen tensors, and experts that
        cannot be computed with; and an MTP layer that is wanted and not there, or not whole."""
        needed = main_tensors(config)
        if config.mtp != "none":
            self.check_mtp(config)
        optional: Shapes = {}
        for depth in range(self.num_mtp_layers(config)):
            for shapes in mtp_tensors(config, depth):
                optional |= shapes
        if config.tie_word_embeddings:
            optional["lm_head.weight"] = needed["model.embed_tokens.weight"]
        known = needed | optional
        missing = [name for name in needed if name not in self.stored]
        unexpected = [
            name
            for name in self.stored
            if weight_of(name) not in known and not name.endswith(IGNORED)
        ]
        wrong = [
            problem
            for name, shape in known.items()
            if name in self.stored and (problem := self._problem(name, shape))
        ]
        self._report(missing=missing, unexpected=unexpected, wrong=wrong)
        # One stands for all here; each is looked at when it is read.
        experts = (name for name in needed if is_routed_weight(name) and self.is_int4(name))
        for name in itertools.islice(experts, 1):
            self.check_symmetric(name)

    def num_mtp_layers(self, config: ModelConfig) -> int:
        """As config.json says, or more: some writers leave the number out, not the tensors."""
        is_mtp = (
            f"{layer_prefix(config.num_layers + depth)}.eh_proj.weight" in self.stored
            for depth in itertools.count()
        )
        return max(config.num_mtp_layers, len([*itertools.takewhile(bool, is_mtp)]))

    def check_mtp(self, config: ModelConfig) -> None:
        """CheckpointError unless MTP layer 0 is whole."""
        if not self.num_mtp_layers(config):
            raise CheckpointError(
                f"{self.folder}: no MTP layer, without which speculative-tokens must be 0 or "
                "speculative-method ngram"
            )
        needed, _ = mtp_tensors(config, 0)
        self._report(missing=[name for name in needed if name not in self.stored])

    def _problem(self, name: str, shape: tuple[int, ...]) -> str:
        """What is wrong with a stored tensor, or nothing."""
        stored = self.stored[name]
        scale = self.stored.get(name + SCALE_SUFFIX)
        if len(shape) == 2 and self.is_int4(name) and (not scale or scale.dtype in SCALE_TYPES):
            groups = None if scale is None else scale.shape
            problem = int4_problem(name, stored.shape, groups, shape)
            return problem or self._packing_problem(name, shape)
        if stored.shape != shape:
            return f"{name} is {list(stored.shape)}, not {list(shape)}"
        if stored.dtype in FLOAT_TYPES and scale is None:
            return ""
        if stored.dtype != FP8_TYPE:
            return f"{name} has dtype {stored.dtype}"
        if scale is None:
            return f"{name} is FP8 without {name + SCALE_SUFFIX}"
        blocks = tuple(-(-size // BLOCK) for size in shape)
        if scale.shape != blocks or scale.dtype not in SCALE_TYPES:
            return (
                f"{name + SCALE_SUFFIX} is {scale.dtype} {list(scale.shape)}, "
                f"not floats {list(blocks)}"
            )
        return ""

    def _packing_problem(self, name: str, shape: tuple[int, ...]) -> str:
        """What is wrong with what else there is of a packed int4 matrix, or nothing."""
        rows, columns = shape
        for suffix, wanted in ((ZERO_SUFFIX, (rows, columns // GROUP)), (ORDER_SUFFIX, (columns,))):
            stored = self.stored.get(name + suffix)
            if stored is not None and stored.shape != wanted:
                return f"{name + suffix} is {list(stored.shape)}, not {list(wanted)}"
        return ""

    def _report(self, **problems: Sequence[str]) -> None:
        parts = []
        for kind, items in problems.items():
            if items:
                more = f" and {len(items) - NUM_NAMED} more" if len(items) > NUM_NAMED else ""
                listed = ", ".join(sorted(items)[:NUM_NAMED])
                parts.append(f"{len(items)} {kind}: {listed}{more}")
        if parts:
            raise CheckpointError(f"{self.folder}: tensors do not fit; " + "; ".join(parts))
