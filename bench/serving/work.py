"""What the benchmark and its transformers process tell each other, as JSON. Torch-free."""

import msgspec


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """`generate` prompts get `output_tokens` each; `prefill` prompts are only prefilled."""

    model: str
    output_tokens: int
    generate: list[list[int]]
    prefill: list[list[int]]


class Prefilled(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one prompt."""

    num_tokens: int
    prefill_seconds: float
    step_seconds: float  # one decoding step after it


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    generate_seconds: float  # for all prompts
    token_ids: list[list[int]]
    prefill: list[Prefilled]
