"""What one Assign call asks for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """`prefix_hashes[i]` covers the first i + 1 full pages of the prompt; `excluded` holds
    epochs of workers that have failed this request. Higher `priority` is placed first; among
    equal ones who first asked longest ago, `waited_seconds` before this call. What
    it may still wait for room is shorter by `searched_seconds`.
    `traced_id` is the id that log lines of the request carry."""

    request_id: str
    model: str
    num_prompt_tokens: int
    prefix_hashes: tuple[int, ...] = ()
    excluded: frozenset[str] = frozenset()
    priority: int = 0
    waited_seconds: float = 0.0
    searched_seconds: float = 0.0
    traced_id: str = ""
