"""From a question of `ctl plan` to its answer."""

from dataclasses import replace

from core.group_plan import GroupPlan, GroupQuestion
from engine.planning.changes import advice
from engine.planning.host_needs import host_needs
from engine.planning.planner import Planner
from engine.process.settings import WorkerSettings
from engine.start.memory_plan import DoesNotFit
from model.weights.dummy_checkpoint import DummyCheckpoint


def answer(question: GroupQuestion) -> GroupPlan:
    """SystemExit, with what is wrong on stderr, for flags that a worker would refuse;
    CheckpointError for a model that none would load."""
    settings = WorkerSettings.parse(question.flags)
    planner = Planner(question, settings)
    told = GroupPlan(
        name=question.name,
        role=question.role,
        gpu=question.gpu,
        model=settings.model_name,
        model_format=planner.quantization,
        from_headers=not isinstance(planner.source, DummyCheckpoint),
        nodes=settings.nodes,
        ranks=settings.ranks,
        slots=planner.slots(settings),
        max_running=settings.max_running,
        page_tokens=settings.page_tokens,
        model_max_len=planner.config.max_position,
        host=host_needs(planner),
    )
    try:
        return _decided(planner, told)
    except DoesNotFit as error:
        return replace(
            _dispatched(planner, told),
            problem=str(error),
            memory_bytes=error.memory_bytes,
            terms=error.terms,
            advice=advice(planner) if question.most_ranks else (),
        )
    except ValueError as error:
        return replace(told, problem=str(error))


def _decided(planner: Planner, told: GroupPlan) -> GroupPlan:
    memory = planner.plan(planner.settings, int4=planner.question.int4).memory
    return replace(
        _dispatched(planner, told),
        memory_bytes=memory.memory_bytes,
        terms=memory.terms,
        kv_pages=memory.kv.num_pages,
        kv_tokens=memory.kv.num_pages * planner.settings.page_tokens,
        max_model_len=memory.kv.max_model_len,
    )


def _dispatched(planner: Planner, told: GroupPlan) -> GroupPlan:
    needs, choice = planner.dispatch(planner.settings)
    return replace(
        told,
        dispatcher=choice.name,
        dispatcher_reason=choice.reason,
        step_tokens=needs.step_tokens,
        part_tokens=needs.part_tokens,
    )
