"""Rate limits of API keys: a bucket of requests and one of tokens for each.

A bucket holds what a minute allows and fills evenly. A request takes one request with its headers,
its prompt's tokens before it waits for room (given back if it is not admitted), and each token of
the output as it comes: output may overdraw the bucket, and the next request waits for that.
"""

from typing import NamedTuple

from core.clock import Clock
from core.errors import RateLimited
from gateway.limits.bucket_memory import BucketMemory, Levels

MINUTE_SECONDS = 60.0
UNLIMITED = float("inf")

Headers = list[tuple[bytes, bytes]]


class Limits(NamedTuple):
    """Of one key; 0: without limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0


class RateLimiter:
    """The buckets of all keys, by the keys' names."""

    def __init__(self, memory: BucketMemory, clock: Clock) -> None:
        self._memory = memory
        self._clock = clock

    def take_request(self, key: str, limits: Limits) -> None:
        """Counts one request. Raises RateLimited when there is none left, or when tokens are
        overdrawn: whatever the prompt is, it would be refused."""
        if not any(limits):
            return
        with self._memory.locked():
            levels = self._levels(key, limits)
            if limits.tokens_per_minute and levels.tokens <= 0:
                raise _refusal("tokens", limits.tokens_per_minute, 1 - levels.tokens)
            if limits.requests_per_minute and levels.requests < 1:
                raise _refusal("requests", limits.requests_per_minute, 1 - levels.requests)
            self._memory.write(key, levels._replace(requests=levels.requests - 1))

    def take_prompt(self, key: str, limits: Limits, num_tokens: int) -> None:
        """Counts a prompt. Raises RateLimited when the bucket has not so many; a prompt that
        is larger than the bucket needs a full one."""
        if not limits.tokens_per_minute:
            return
        with self._memory.locked():
            levels = self._levels(key, limits)
            needed = min(num_tokens, limits.tokens_per_minute)
            # Levels are fractions: a bucket that misses a millionth of a token is full.
            if levels.tokens < needed - 1e-6:
                raise _refusal("tokens", limits.tokens_per_minute, needed - levels.tokens)
            self._memory.write(key, levels._replace(tokens=levels.tokens - num_tokens))

    def take_output(self, key: str, limits: Limits, num_tokens: int) -> None:
        """Counts tokens that were generated already; below 0: gives back those of a prompt that
        was not admitted."""
        if not limits.tokens_per_minute:
            return
        with self._memory.locked():
            levels = self._levels(key, limits)
            self._memory.write(key, levels._replace(tokens=levels.tokens - num_tokens))

    def headers(self, key: str, limits: Limits) -> Headers:
        """`x-ratelimit-*` as OpenAI's API has them; none for what has no limit."""
        if not any(limits):
            return []
        with self._memory.locked():
            levels = self._levels(key, limits)
        headers: Headers = []
        for kind, limit, left in (
            ("requests", limits.requests_per_minute, levels.requests),
            ("tokens", limits.tokens_per_minute, levels.tokens),
        ):
            if limit:
                reset = (limit - left) / limit * MINUTE_SECONDS
                headers += [
                    (f"x-ratelimit-limit-{kind}".encode(), str(limit).encode()),
                    (f"x-ratelimit-remaining-{kind}".encode(), str(max(0, int(left))).encode()),
                    (f"x-ratelimit-reset-{kind}".encode(), f"{max(0.0, reset):.3f}s".encode()),
                ]
        return headers

    def _levels(self, key: str, limits: Limits) -> Levels:
        """The levels now."""
        now = self._clock.now()
        most_requests, most_tokens = (float(limit) or UNLIMITED for limit in limits)
        levels = self._memory.read(key)
        if levels is None:
            return Levels(most_requests, most_tokens, now)
        minutes = max(0.0, now - levels.at_seconds) / MINUTE_SECONDS
        return Levels(
            _filled(levels.requests, most_requests, minutes),
            _filled(levels.tokens, most_tokens, minutes),
            now,
        )


def _filled(left: float, most: float, minutes: float) -> float:
    return most if most == UNLIMITED else min(most, left + most * minutes)


def _refusal(kind: str, limit: int, missing: float) -> RateLimited:
    seconds = missing / limit * MINUTE_SECONDS
    return RateLimited(
        f"Rate limit reached: {limit} {kind} per minute. Please try again in {seconds:.3f}s.",
        retry_after_seconds=seconds,
    )
