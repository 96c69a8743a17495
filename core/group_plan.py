"""What `ctl plan` asks the process that plans (engine/planning), and what that answers; JSON."""

from dataclasses import dataclass
from typing import Literal

from core.memory_term import MemoryTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`total_bytes` as CUDA tells them, `free_bytes` what other processes leave of them."""

    name: str
    total_bytes: int
    free_bytes: int
    is_hopper: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupQuestion:
    """An EP group whose nodes are all alike.

    flags          of `python -m {role}_worker` on its first node, --nodes among them
    has_deep_ep    whether DeepEP is installed
    has_rdma       whether GPUs can send to other nodes by themselves
    int4           whether experts are as `ctl quantize` would make them, not as they are
    most_ranks     of a node, that may be proposed; most_nodes likewise; 0: nothing is proposed
    """

    name: str
    role: Literal["prefill", "decode"]
    flags: tuple[str, ...]
    gpu: Gpu
    has_deep_ep: bool = True
    has_rdma: bool = True
    int4: bool = False
    most_ranks: int = 8
    most_nodes: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change after which the group fits, and what it then has room for."""

    change: str
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """Of a pod or node: `memory_bytes`, shared memory among them. Of a checkpoint of
    `checkpoint_bytes` it reads `read_bytes` at its first start, which in the page cache, beside
    those, make another one quick."""

    cpus: int
    memory_bytes: int
    shared_memory_bytes: int
    read_bytes: int
    checkpoint_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """`problem` is why the group cannot start, "" when it can; then numbers of KV are 0 and
    `advice` says what helps, each entry by itself.

    model_format   what is served: "fp8", "w4afp8" or "" for weights without quantisation
    from_headers   whether headers of weights were read, not config.json alone
    slots          experts of a layer on a rank, replicas and empty places counted
    step_tokens    of a rank in the largest step; part_tokens: of it at once between ranks, 0: all
    """

    name: str
    role: str
    gpu: Gpu
    model: str
    model_format: str
    from_headers: bool
    nodes: int
    ranks: int
    problem: str = ""
    memory_bytes: int = 0
    terms: tuple[MemoryTerm, ...] = ()
    dispatcher: str = ""
    dispatcher_reason: str = ""
    slots: int = 0
    step_tokens: int = 0
    part_tokens: int = 0
    max_running: int = 0
    kv_pages: int = 0
    page_tokens: int = 0
    kv_tokens: int = 0
    max_model_len: int = 0
    model_max_len: int = 0
    advice: tuple[Advice, ...] = ()
    host: HostNeeds | None = None
