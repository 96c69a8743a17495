"""What makes a group fit that does not: tried, not guessed.

Each dimension is a list of settings from mild to strong. The mildest of each that fits by itself
is proposed; where none does, the mildest pairs, then triples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from core.group_plan import Advice
from engine.kv.kv_memory import LEAST_PAGES
from engine.planning.planner import Planner
from engine.process.settings import WorkerSettings
from engine.start.start_plan import StartPlan
from model.checkpoint_formats import INT4_METHODS

LEAST_CHUNK, LEAST_RUNNING = 512, 8
MOST_AT_ONCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`setting` of a worker becomes `value`; without one, experts become int4. Of a `freed` value
    (0: as memory allows) the plan says what it came to."""

    setting: str = ""
    value: int = 0
    freed: bool = False

    def text(self, before: WorkerSettings, plan: StartPlan) -> str:
        if not self.setting:
            return "a w4afp8 checkpoint (ctl quantize)"
        now = getattr(before, self.setting)
        kv = plan.memory.kv
        after = {"kv_pages": kv.num_pages, "max_model_len": kv.max_model_len}
        value = after[self.setting] if self.freed else self.value
        if self.setting == "chunk_tokens":
            now = before.step_tokens
        return f"{self.setting.replace('_', '-')} {value} (now {now})"


def advice(planner: Planner) -> tuple[Advice, ...]:
    """Empty when nothing of what is tried helps."""
    ladders = list(dimensions(planner))
    for count in range(1, MOST_AT_ONCE + 1):
        found = [told for some in combinations(ladders, count) if (told := _mildest(planner, some))]
        if found:
            return tuple(found)
    return ()


def dimensions(planner: Planner) -> Iterator[Sequence[Change]]:
    settings, bounds = planner.settings, planner.question
    if planner.question.role == "prefill":
        least = max(LEAST_CHUNK, settings.page_tokens)
        yield _halves("chunk_tokens", settings.step_tokens, least)
    else:
        yield _halves("max_running", settings.max_running, LEAST_RUNNING)
    for name in ("kv_pages", "max_model_len"):
        if getattr(settings, name):
            yield [Change(setting=name, freed=True)]
    if settings.num_redundant_experts:
        yield [Change(setting="num_redundant_experts")]
    if planner.config.num_moe_layers and planner.quantization not in INT4_METHODS:
        yield [Change()]
    if 2 * settings.ranks <= bounds.most_ranks:
        # Groups of several nodes have full ones.
        yield _doubles("ranks", settings.ranks, bounds.most_ranks)
    elif settings.nodes < bounds.most_nodes:
        nodes = range(settings.nodes + 1, bounds.most_nodes + 1)
        yield [Change(setting="nodes", value=value) for value in nodes]


def _doubles(name: str, value: int, most: int) -> list[Change]:
    steps = []
    while (value := value * 2) <= most:
        steps.append(Change(setting=name, value=value))
    return steps


def _halves(name: str, value: int, least: int) -> list[Change]:
    steps = []
    while (value := value // 2) >= least:
        steps.append(Change(setting=name, value=value))
    return steps


def _mildest(planner: Planner, ladders: Sequence[Sequence[Change]]) -> Advice | None:
    if not all(ladders) or _plan(planner, [ladder[-1] for ladder in ladders]) is None:
        return None
    for changes in product(*ladders):
        plan = _plan(planner, changes)
        if plan is not None:
            texts = [change.text(planner.settings, plan) for change in changes]
            tokens = plan.memory.kv.num_pages * planner.settings.page_tokens
            return Advice(change=" and ".join(texts), kv_tokens=tokens)
    return None


def _plan(planner: Planner, changes: Sequence[Change]) -> StartPlan | None:
    """None where it does not fit, or only with next to nothing left for KV."""
    update = {change.setting: change.value for change in changes if change.setting}
    settings = planner.settings.model_copy(update=update)
    int4 = any(not change.setting for change in changes)
    try:
        plan = planner.plan(settings, int4=int4)
    except ValueError:
        return None
    return plan if plan.memory.kv.num_pages >= LEAST_PAGES else None
