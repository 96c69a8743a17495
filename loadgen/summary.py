"""Figures of a run: percentiles of latencies, throughput, errors."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loadgen.load import Outcome

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy does. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent}")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


class Figure(NamedTuple):
    """One number of a run."""

    metric: str
    unit: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A whole run. `latencies` in seconds, by name and then "mean", "p50" and so on, are of the
    requests that succeeded; none did: no latencies."""

    seconds: float
    num_requests: int
    errors: Counter[str]
    num_prompt_tokens: int
    num_output_tokens: int
    latencies: dict[str, dict[str, float]]

    @property
    def num_errors(self) -> int:
        return self.errors.total()

    def figures(self) -> list[Figure]:
        """Everything as single numbers, for records."""
        succeeded = self.num_requests - self.num_errors
        throughput = [
            Figure("output_throughput", "tokens/s", self.num_output_tokens / self.seconds),
            Figure("prompt_throughput", "tokens/s", self.num_prompt_tokens / self.seconds),
            Figure("request_throughput", "requests/s", succeeded / self.seconds),
            Figure("num_requests", "requests", self.num_requests),
            Figure("num_errors", "requests", self.num_errors),
            Figure("duration", "s", self.seconds),
        ]
        return throughput + [
            Figure(f"{name}_{at}", "s", value)
            for name, values in self.latencies.items()
            for at, value in values.items()
        ]


def summarize(outcomes: Sequence[Outcome], seconds: float) -> Summary:
    """The figures of a run that took `seconds`."""
    good = [outcome for outcome in outcomes if not outcome.error]
    several = [outcome for outcome in good if outcome.num_output_tokens > 1]
    gaps = [gap for outcome in good for gap in outcome.inter_token_seconds]
    latencies = {
        "ttft": [outcome.ttft_seconds for outcome in good],
        "itl": gaps,
        "tpot": [outcome.tpot_seconds for outcome in several],
        "e2e": [outcome.e2e_seconds for outcome in good],
    }
    return Summary(
        seconds=seconds,
        num_requests=len(outcomes),
        errors=Counter(outcome.error for outcome in outcomes if outcome.error),
        num_prompt_tokens=sum(outcome.num_prompt_tokens for outcome in good),
        num_output_tokens=sum(outcome.num_output_tokens for outcome in good),
        latencies={name: _spread(values) for name, values in latencies.items() if values},
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    percentiles = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {"mean": sum(values) / len(values), **percentiles}
