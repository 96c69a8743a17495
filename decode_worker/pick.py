"""Which rank gets a new request."""

from collections.abc import Sequence
from typing import NamedTuple


class RankRoom(NamedTuple):
    """What the front has given a rank and not got back, and what it can hold.

    `num_open` counts requests, `num_tokens` their prompt and output so far; `kv_tokens` is the
    KV that the rank can hold now, quarantined pages left out. `chosen_at` grows with each
    choice and breaks ties: longest ago wins.
    """

    rank: int
    num_open: int
    num_tokens: int
    kv_tokens: int
    max_open: int
    max_running: int
    chosen_at: int


def pick_rank(rooms: Sequence[RankRoom], num_tokens: int) -> int | None:
    """The rank with most room after taking `num_tokens` more; None when all are full.

        load = (tokens after) / (KV tokens) + (requests after) / (largest batch)

    The first term is how near the rank is to preemption, the second how long its steps are.
    """
    free = [room for room in rooms if room.num_open < room.max_open]
    if not free:
        return None
    return min(free, key=lambda room: (_load(room, num_tokens), room.chosen_at)).rank


def _load(room: RankRoom, num_tokens: int) -> float:
    kv_share = (room.num_tokens + num_tokens) / max(room.kv_tokens, 1)
    return kv_share + (room.num_open + 1) / room.max_running
