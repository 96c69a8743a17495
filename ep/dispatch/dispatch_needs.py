"""What a model asks of whatever moves its tokens between ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchNeeds:
    """The same on all ranks.

    hidden          H, values a token
    itemsize        bytes a value, as the model computes
    slots_per_rank  experts that a rank holds in a layer, empty places included
    num_choices     K, experts a token
    step_tokens     of a rank at once, in the contiguous forms
    masked_tokens   of a rank at once, in the masked form; 0: there is no need of it
    """

    hidden: int
    itemsize: int
    slots_per_rank: int
    num_choices: int
    step_tokens: int
    masked_tokens: int = 0
