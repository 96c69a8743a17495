"""How long a start may take, by the size of the model.

A limit for ranks that hang: one that dies is noticed at once.
"""

from pathlib import Path

# Of one node, from a disk that many nodes share and that is slow at that.
SLOW_BYTES_PER_SECOND = 0.25e9
# Interpreters, groups, compilation with empty caches, warming up, recording.
BESIDE_READING_SECONDS = 600.0


def start_seconds(model: Path) -> float:
    """Enough for a worker with this folder. What cannot be seen counts as nothing: ranks say what
    is wrong with it."""
    try:
        num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    except OSError:
        num_bytes = 0
    return BESIDE_READING_SECONDS + num_bytes / SLOW_BYTES_PER_SECOND
