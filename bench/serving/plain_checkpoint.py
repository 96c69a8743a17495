"""A copy of a checkpoint folder as it was before it was quantised to block FP8: BF16, or FP32."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.weights.checkpoint import Checkpoint
from model.weights.stored import SINGLE
from model.weights.tensor_names import SCALE_SUFFIX

# The balancing bias of a gate decides between experts whose scores hardly differ.
EXACT_SUFFIX = "e_score_correction_bias"


def write_plain(folder: Path, output: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """`output` is made, with everything beside the weights as it is; not of int4 experts.

    CheckpointError for a folder that cannot be read, OSError for one that cannot be written.
    """
    output.mkdir(parents=True)
    for file in folder.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, output)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    (output / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    with Checkpoint(folder) as checkpoint:
        plain = {
            name: checkpoint.read(name, torch.float32 if name.endswith(EXACT_SUFFIX) else dtype)
            for name in checkpoint.stored
            if not name.endswith(SCALE_SUFFIX)
        }
    save_file(plain, output / SINGLE, metadata={"format": "pt"})
    return output
