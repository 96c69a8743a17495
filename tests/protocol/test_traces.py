"""Faults of the product that were found by exploring, each with its shortest trace."""

from tests.protocol.explorer import replay
from tests.protocol.pair import Pair
from tests.protocol.world import Bounds


def outcomes(bounds: Bounds, trace: str) -> list[str]:
    """How the requests have ended after the steps of `trace`, a line each."""
    world = replay(lambda: Pair(bounds), trace.strip().splitlines())
    world.check()
    told = [client.outcome for client in world.clients]
    world.close()
    return told


def test_who_has_grown_too_long_for_its_prefill_worker_may_go_elsewhere() -> None:
    """Request 1 is put back with three tokens, which are more than its prefill worker can hold: it
    was told INVALID_ARGUMENT, in mid-stream."""
    bounds = Bounds(
        num_requests=2, num_prompt_tokens=1, max_tokens=4, decode_pages=3, prefill_pages=1
    )
    trace = """
request 0 comes
request 1 comes
a step of decode-1
decode-1 hears its rank
prefill-1 is asked Prefill decode-1-0-2
prefill-1 is asked Prefill decode-1-0-1
a step of prefill-1
KV 1 of prefill-1 lands
a step of prefill-1
KV 2 of prefill-1 lands
prefill-1 hears its rank
decode-1 hears the answer to Prefill decode-1-0-2
a step of decode-1
decode-1 hears the answer to Prefill decode-1-0-1
a step of decode-1
a step of decode-1
a step of decode-1
a step of decode-1
a step of decode-1
decode-1 hears its rank
prefill-1 is asked Prefill decode-1-0-3
decode-1 hears the answer to Prefill decode-1-0-3
a step of decode-1
decode-1 hears its rank
"""
    assert outcomes(bounds, trace) == ["ok", "UNAVAILABLE"]
