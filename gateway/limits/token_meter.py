"""The tokens of one request, counted against the limits of who asked."""

from gateway.cluster.run import RequestRun
from gateway.limits.api_keys import Client
from gateway.limits.rate_limit import RateLimiter

# Output is counted in steps of so many tokens, not one by one.
STEP_TOKENS = 16


class TokenMeter:
    """`client` None: no limits."""

    def __init__(self, limiter: RateLimiter, client: Client | None, run: RequestRun) -> None:
        limits = client.limits if client is not None else None
        self._client = client if limits is not None and limits.tokens_per_minute else None
        self._limiter = limiter
        self._run = run
        self._num_counted = 0
        self._num_reserved = 0  # of the prompts, while the request is not admitted

    def begin(self) -> None:
        """Counts the prompts. Raises RateLimited when that is too much now."""
        if self._client is not None:
            num_tokens = self._run.usage().prompt_tokens
            self._limiter.take_prompt(self._client.name, self._client.limits, num_tokens)
            self._num_reserved = num_tokens

    def note_admitted(self) -> None:
        """The prompts stay counted from now on, whatever becomes of the request."""
        self._num_reserved = 0

    def note(self, num_least: int = STEP_TOKENS) -> None:
        """Counts what has come since the last time, if that is at least so much."""
        if self._client is None:
            return
        num_new = self._run.num_output_tokens - self._num_counted
        if num_new >= num_least:
            self._num_counted += num_new
            self._limiter.take_output(self._client.name, self._client.limits, num_new)

    def end(self) -> None:
        """Counts what is left; gives the prompts back that were not admitted."""
        self.note(1)
        if self._client is not None and self._num_reserved:
            self._limiter.take_output(self._client.name, self._client.limits, -self._num_reserved)
            self._num_reserved = 0
