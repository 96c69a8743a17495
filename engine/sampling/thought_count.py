"""How many tokens a sequence has thought, for a request that bounds them."""

from engine.sampling.sampling_params import ThoughtBudget


class ThoughtCount:
    """Follows the output from its first token. Only its first thoughts are bounded: marks behind
    them are text."""

    def __init__(self, budget: ThoughtBudget) -> None:
        self._budget = budget
        self._num_tokens = 0
        self._is_open = budget.is_open
        self._is_over = False
        self._is_first = True

    @property
    def forced(self) -> tuple[int, ...]:
        """The token that must come next, if one must."""
        budget = self._budget
        is_due = self._is_open and self._num_tokens >= budget.max_tokens
        return budget.close_token_ids[:1] if is_due else ()

    def add(self, token_id: int) -> None:
        """The next output token."""
        is_first, self._is_first = self._is_first, False
        opens = token_id == self._budget.open_token_id
        if not self._is_open:
            self._is_open = opens and not self._is_over
        elif token_id in self._budget.close_token_ids:
            self._is_open, self._is_over = False, True
        elif not (opens and is_first):  # opened by the prompt, and again by the model
            self._num_tokens += 1
