"""What a format of thoughts says of itself."""

from typing import NamedTuple


class ReasoningFormat(NamedTuple):
    """Thoughts stand between `opens` and `closes`, which are tokens; the prompt may have opened
    them already. `also_ends_at` ends them as well, and is a part of the answer."""

    name: str
    models: str
    opens: str
    closes: str
    also_ends_at: str | None = None
