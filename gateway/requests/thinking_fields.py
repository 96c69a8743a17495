"""The fields by which a client chooses whether, and how much, the model thinks."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from core.errors import InvalidRequest
from gateway.requests.request_body import ClosedModel, RequestModel

# What templates call the choice to think: DeepSeek-V3.1 and Kimi; others.
THINKING_SWITCHES = ("thinking", "enable_thinking")
NO_THOUGHTS = ("none", "minimal")
BUDGET_NAMES = ("thinking_budget", "thinking_token_budget", "max_thinking_tokens")

Budget = Annotated[int, Field(ge=0, lt=2**31)]


class Thinking(ClosedModel):
    """As DeepSeek's API has it, for models that can do both; with Anthropic's budget."""

    type: Literal["enabled", "disabled"]
    budget_tokens: Budget | None = None


class ThinkingFields(RequestModel):
    """Part of the body of a chat request. All of them mean the same to a template, whichever
    name that has for it."""

    chat_template_kwargs: dict[str, Any] | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | None = Field(None, min_length=1, max_length=32)
    thinking_budget: Budget | None = Field(None, validation_alias=AliasChoices(*BUDGET_NAMES))

    @property
    def budget(self) -> tuple[str, int | None]:
        """The field that bounds the tokens of thoughts, and by how many; None: no bound.

        Raises InvalidRequest where two contradict each other."""
        of_thinking = self.thinking.budget_tokens if self.thinking is not None else None
        if self.thinking_budget is None:
            return "thinking.budget_tokens", of_thinking
        if of_thinking not in (None, self.thinking_budget):
            raise InvalidRequest(
                "thinking_budget and thinking.budget_tokens contradict each other",
                param="thinking_budget",
            )
        return "thinking_budget", self.thinking_budget

    @property
    def thinking_choice(self) -> tuple[str, bool | None]:
        """The field that chooses, and whether it is for thoughts; None: nothing is said.

        Raises InvalidRequest where two contradict each other."""
        choices: dict[str, bool] = {}
        if self.thinking is not None:
            choices["thinking"] = self.thinking.type == "enabled"
        for name in THINKING_SWITCHES:
            value = (self.chat_template_kwargs or {}).get(name)
            if isinstance(value, bool):
                choices["chat_template_kwargs"] = value
        if self.reasoning_effort is not None:
            choices["reasoning_effort"] = self.reasoning_effort not in NO_THOUGHTS
        if len(set(choices.values())) > 1:
            names = " and ".join(choices)
            raise InvalidRequest(f"{names} contradict each other", param=[*choices][-1])
        # An effort says the most: whether there are levels is seen with it.
        return next(reversed(choices.items()), ("thinking", None))

    @property
    def wants_thoughts(self) -> bool | None:
        """None: as the template decides."""
        return self.thinking_choice[1]

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """The client's own, and its choice by all the names that templates have for it."""
        chosen: dict[str, Any] = {}
        if self.wants_thoughts is not None:
            chosen = dict.fromkeys(THINKING_SWITCHES, self.wants_thoughts)
        if self.reasoning_effort is not None:
            chosen["reasoning_effort"] = self.reasoning_effort
        return (self.chat_template_kwargs or {}) | chosen
