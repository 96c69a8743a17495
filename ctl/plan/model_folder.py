"""A folder with the config.json of the model that is meant, also where the model is elsewhere."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from core.errors import CheckpointError
from model.known_models import known_config


@contextmanager
def model_folder(path: str) -> Iterator[Path]:
    """`path` itself where it is here; else one made for the model of its name. CheckpointError
    where neither is possible."""
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        yield folder.resolve()
        return
    fields = known_config(path)
    if folder.exists() or fields is None:
        raise CheckpointError(
            f"{path} has no config.json here, and by name only DeepSeek-V3, V3.1, R1 and "
            "Kimi-K2-Instruct are known (-BF16, -FP8, -W4AFP8 behind it)"
        )
    with TemporaryDirectory(prefix="epserve-plan-") as made:
        (Path(made) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        yield Path(made)
