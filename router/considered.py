"""What became of each worker when a pair was looked for."""

from dataclasses import dataclass, field

from router.scorers import Scored
from router.worker import Worker


@dataclass(slots=True)
class Considered:
    """`rejected` names the filter (`router.filters`, or "paired": left without a partner) that
    left a worker out; all others were scored."""

    rejected: list[tuple[Worker, str]] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
