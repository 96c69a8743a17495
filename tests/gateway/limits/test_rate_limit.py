"""Buckets on a clock that is turned by hand."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from core.clock import ManualClock
from core.errors import RateLimited
from gateway.limits.bucket_memory import NUM_SLOTS, BucketMemory, Levels
from gateway.limits.rate_limit import Limits, RateLimiter

REPOSITORY = Path(__file__).resolve().parents[3]


def limiter() -> tuple[RateLimiter, ManualClock]:
    clock = ManualClock(1000.0)
    return RateLimiter(BucketMemory(), clock), clock


def test_requests_a_minute() -> None:
    limits, (limit, clock) = Limits(requests_per_minute=3), limiter()
    for _ in range(3):
        limit.take_request("a", limits)
    with pytest.raises(RateLimited) as raised:
        limit.take_request("a", limits)
    assert raised.value.retry_after_seconds == pytest.approx(20)
    assert raised.value.status.code == "rate_limit_exceeded"
    limit.take_request("b", limits)  # another key is another bucket
    clock.advance(19)
    with pytest.raises(RateLimited):
        limit.take_request("a", limits)
    clock.advance(1.001)
    limit.take_request("a", limits)
    clock.advance(3600)  # a bucket holds no more than a minute's
    for _ in range(3):
        limit.take_request("a", limits)
    with pytest.raises(RateLimited):
        limit.take_request("a", limits)


def test_output_may_overdraw_and_is_paid_back() -> None:
    limits, (limit, clock) = Limits(tokens_per_minute=600), limiter()
    limit.take_prompt("a", limits, 500)
    limit.take_output("a", limits, 400)
    with pytest.raises(RateLimited) as raised:
        limit.take_request("a", limits)
    clock.advance(raised.value.retry_after_seconds or 0)
    limit.take_request("a", limits)
    with pytest.raises(RateLimited):
        limit.take_prompt("a", limits, 2)
    clock.advance(0.1)
    limit.take_prompt("a", limits, 2)


def test_a_prompt_larger_than_the_bucket_needs_a_full_one() -> None:
    limits, (limit, clock) = Limits(tokens_per_minute=100), limiter()
    limit.take_prompt("a", limits, 250)
    clock.advance(60)
    with pytest.raises(RateLimited):
        limit.take_prompt("a", limits, 250)
    clock.advance(90.0)
    limit.take_prompt("a", limits, 250)


def test_headers() -> None:
    limits, (limit, clock) = Limits(60, 6000), limiter()
    limit.take_request("a", limits)
    limit.take_prompt("a", limits, 100)
    assert dict(limit.headers("a", limits)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1.000s",
        b"x-ratelimit-limit-tokens": b"6000",
        b"x-ratelimit-remaining-tokens": b"5900",
        b"x-ratelimit-reset-tokens": b"1.000s",
    }
    assert limit.headers("a", Limits()) == []
    clock.advance(5)
    assert (b"x-ratelimit-remaining-tokens", b"6000") in limit.headers("a", limits)


@pytest.mark.parametrize("seed", range(4))
def test_never_more_than_a_minute_and_the_rate(seed: int) -> None:
    """Whatever the pattern: what passes within any time is bounded by bucket + rate * time."""
    rng = random.Random(seed)
    limits, (limit, clock) = Limits(requests_per_minute=120), limiter()
    passed: list[float] = []
    for _ in range(2000):
        clock.advance(rng.choice([0, 0, 0, 0.01, 0.3, 4]))
        try:
            limit.take_request("a", limits)
            passed.append(clock.now())
        except RateLimited:
            pass
    assert len(passed) > 200
    for first in range(0, len(passed), 7):
        for last in range(first, len(passed), 11):
            seconds = passed[last] - passed[first]
            assert last - first + 1 <= 120 + 2 * seconds + 1e-3


def test_slots_are_found_again_in_a_full_table() -> None:
    memory = BucketMemory()
    names = [f"key-{number}" for number in range(NUM_SLOTS // 2)]
    for number, name in enumerate(names):
        memory.write(name, Levels(number, 0, 0))
    for number, name in enumerate(names):
        found = memory.read(name)
        assert found is not None
        assert found.requests == number
    assert memory.read("unknown") is None


def test_processes_share_one_bucket(tmp_path: Path) -> None:
    """Four processes take at once: together they get what the bucket holds."""
    code = (
        "import sys; from pathlib import Path\n"
        "from core.clock import ManualClock; from core.errors import RateLimited\n"
        "from gateway.limits.bucket_memory import BucketMemory\n"
        "from gateway.limits.rate_limit import Limits, RateLimiter\n"
        "limit = RateLimiter(BucketMemory(Path(sys.argv[1])), ManualClock(7.0)); n = 0\n"
        "for _ in range(3000):\n"
        "    try: limit.take_request('a', Limits(requests_per_minute=5000)); n += 1\n"
        "    except RateLimited: pass\n"
        "print(n)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "buckets")]
    processes = [
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert sum(int(process.communicate(timeout=60)[0]) for process in processes) == 5000
