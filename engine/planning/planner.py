"""Plans an EP group, and variants of it, as its ranks would at their start."""

from copy import copy
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import torch

from core.group_plan import GroupQuestion
from core.memory_term import MemoryTerm
from engine.process.settings import WorkerSettings
from engine.start.expert_placement import starting_placement
from engine.start.model_loading import model_config
from engine.start.rank_memory import RankMemory
from engine.start.start_plan import FORMS, StartPlan, dispatch_needs, weight_terms
from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher_choice import Choice, RankFacts, choose
from model.config import ModelConfig, quantization_of_folder
from model.w4afp8 import INT4_TYPES, is_routed_weight
from model.weights.checkpoint import Checkpoint
from model.weights.dummy_checkpoint import DummyCheckpoint
from model.weights.stored import INDEX, SINGLE
from model.weights.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Planner:
    """Of one group. Variants are other settings, or `int4`: experts as `ctl quantize` makes
    them."""

    def __init__(self, question: GroupQuestion, settings: WorkerSettings) -> None:
        """CheckpointError for a folder that is not what its configuration says."""
        self.question = question
        self.settings = settings
        self.device = torch.device(settings.device_of(0))
        self.dtype = DTYPES[settings.dtype_name]
        self.form = FORMS[question.role]
        self.config = model_config(settings, self.form)
        is_dummy = settings.load_format == "dummy" or not has_weights(settings.model)
        self.source = opened(settings.model, self.config, dummy=is_dummy)
        self._slots = cache(self._count_slots)
        self._terms = cache(self._weigh)

    @property
    def quantization(self) -> str:
        """`quant_method` of config.json; "" without one."""
        return str(quantization_of_folder(self.settings.model).get("quant_method", ""))

    def plan(self, settings: WorkerSettings, *, int4: bool = False) -> StartPlan:
        """ValueError for what cannot start, `DoesNotFit` among them."""
        gpu = self.question.gpu
        slots = self.slots(settings)
        return StartPlan.of(
            settings,
            self.config,
            form=self.form,
            weights=self._terms(slots, int4),
            slots_per_rank=slots,
            itemsize=self.dtype.itemsize,
            memory=RankMemory.of_gpu(
                settings.gpu_memory_share, gpu.total_bytes, gpu.free_bytes, reserved_bytes=0
            ),
            choose=lambda needs: self._choose(settings, needs),
        )

    def dispatch(self, settings: WorkerSettings) -> tuple[DispatchNeeds, Choice]:
        """What a plan begins with, also one that does not fit. ValueError where what is wanted
        cannot be had."""
        slots = self.slots(settings)
        needs = dispatch_needs(settings, self.config, slots, self.form, self.dtype.itemsize)
        return needs, self._choose(settings, needs)

    def slots(self, settings: WorkerSettings) -> int:
        """Experts of a layer on a rank."""
        return self._slots(settings.group_size, settings.num_redundant_experts)

    def _choose(self, settings: WorkerSettings, needs: DispatchNeeds) -> Choice:
        return choose(settings.ep_dispatcher, needs, rank_facts(self.question, settings))

    def _count_slots(self, num_ranks: int, num_redundant: int) -> int:
        told = self.settings.model_copy(update={"num_redundant_experts": num_redundant})
        return starting_placement(told, self.config, num_ranks).slots_per_rank

    def _weigh(self, slots: int, int4: bool) -> tuple[MemoryTerm, ...]:
        source = int4_twin(self.source) if int4 else self.source
        weights = Weights(checkpoint=source, device=self.device, dtype=self.dtype, form=self.form)
        return weight_terms(self.settings, self.config, weights, slots)


def rank_facts(question: GroupQuestion, settings: WorkerSettings) -> list[RankFacts]:
    """What ranks of alike nodes would say of themselves, whose GPUs reach each other directly."""
    return [
        RankFacts(
            installed=question.has_deep_ep,
            hopper=question.gpu.is_hopper,
            host=node,
            device=rank,
            peers=(1 << settings.ranks) - 1,
            rdma=question.has_rdma,
        )
        for node in range(settings.nodes)
        for rank in range(settings.ranks)
    ]


@lru_cache(maxsize=2)
def opened(folder: Path, config: ModelConfig, *, dummy: bool) -> Checkpoint:
    """The headers of the folder's weights; `dummy`: those that config.json stands for."""
    source = DummyCheckpoint(folder) if dummy else Checkpoint(folder)
    source.check(config)
    return source


def has_weights(folder: Path) -> bool:
    """An index alone is none: it has no shapes."""
    is_there = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    return is_there and any(folder.glob("*.safetensors"))


def int4_twin(source: Checkpoint) -> Checkpoint:
    """What `ctl quantize` would make of it; for its headers only."""
    twin = copy(source)
    twin.stored = {
        name: replace(stored, dtype=INT4_TYPES[0], shape=(stored.shape[0], stored.shape[1] // 2))
        if is_routed_weight(name)
        else stored
        for name, stored in source.stored.items()
    }
    return twin
