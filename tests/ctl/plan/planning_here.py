"""Plans without a process for each, which would import torch anew every time."""

from collections.abc import Sequence

import pytest

import ctl.local.plan_first
import ctl.plan.layouts
import ctl.plan.plan
from core.group_plan import GroupPlan, GroupQuestion
from engine.planning.answer import answer


def plan_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all that asks for plans."""

    def ask(questions: Sequence[GroupQuestion]) -> list[GroupPlan]:
        return [answer(question) for question in questions]

    for asker in (ctl.local.plan_first, ctl.plan.layouts, ctl.plan.plan):
        monkeypatch.setattr(asker, "ask", ask)
