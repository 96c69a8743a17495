"""Whether a model folder can be served, seen before anything is started."""

import json
from importlib.util import find_spec
from pathlib import Path

from core.errors import CheckpointError
from model.config import ModelConfig
from model.tokenizer_file import tokenizer_problem

_INDEX = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"


def demo_model_folder() -> Path:
    """Where the checkpoint that ships lies."""
    spec = find_spec("demo_model")
    if spec is None or spec.origin is None:
        raise CheckpointError("demo_model is not installed; name a checkpoint with --model")
    return Path(spec.origin).with_name("checkpoint")


def check_model_folder(folder: Path, *, with_weights: bool = True) -> ModelConfig:
    """The model's config, if the folder has all that every process needs of it; without weights
    where the workers make them up.

    Raises CheckpointError with the reason. Tensors are not looked at: the ranks do that.
    """
    if not folder.exists():
        raise CheckpointError(f"there is no folder {folder}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: not a checkpoint folder")
    config = ModelConfig.from_folder(folder)
    if problem := tokenizer_problem(folder):
        raise CheckpointError(f"{folder}: {problem}")
    for name in weight_files(folder) if with_weights else ():
        weights = folder / name
        if not weights.is_file():
            raise CheckpointError(f"{folder}: {name} is missing, though {_INDEX} names it")
        with weights.open("rb") as stream:
            if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise CheckpointError(f"{weights} is a Git LFS pointer: run git lfs pull")
    return config


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files, from the index where there is one."""
    index = folder / _INDEX
    if not index.is_file():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise CheckpointError(f"{folder} has no *.safetensors file")
        return names
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
