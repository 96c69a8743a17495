"""Sampling parameters of requests that do not name them."""

from dataclasses import dataclass
from pathlib import Path

from model.config import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """OpenAI's defaults; a folder's generation_config.json may set others."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of_model(cls, folder: Path) -> "SamplingDefaults":
        """What generation_config.json says; an explicit `do_sample: false` means greedy.

        Raises CheckpointError for values of the wrong type.
        """
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        fields = Fields.read(path)
        greedy = not fields.flag("do_sample", True)
        return cls(
            temperature=0.0 if greedy else fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            top_k=fields.count("top_k", 0, least=0),
            min_p=fields.number("min_p", 0.0),
        )
