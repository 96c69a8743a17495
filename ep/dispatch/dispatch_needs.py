"""What a model asks of whatever moves its tokens between ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchNeeds:
    """The same on all ranks.

    hidden          H, values a token
    itemsize        bytes a value, as the model computes
    slots_per_rank  experts that a rank holds in a layer, empty places included
    num_choices     K, experts a token
    step_tokens     of a rank in a step at most
    masked_tokens   of a rank at once, in the masked form; 0: there is no need of it
    masked_only     whether that form will do for all steps, the longer ones in parts: no
                    dispatcher has to have the others
    part_tokens     of a rank at once, in the other forms; 0: a whole step
    row_cap         rows of all experts of a rank at once, in the aligned form; 0: any number
    """

    hidden: int
    itemsize: int
    slots_per_rank: int
    num_choices: int
    step_tokens: int
    masked_tokens: int = 0
    masked_only: bool = False
    part_tokens: int = 0
    row_cap: int = 0

    @property
    def most_tokens(self) -> int:
        """Of a rank at once, in the contiguous and the aligned form."""
        return self.part_tokens or self.step_tokens

    def most_rows(self, num_ranks: int) -> int:
        """Of all experts of a rank at once, in the aligned form, however tokens are routed."""
        here = min(self.num_choices, self.slots_per_rank)
        worst = num_ranks * self.most_tokens * here
        return min(self.row_cap or worst, worst)
