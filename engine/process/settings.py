"""Settings of a worker, prefill or decode: one class, so that both are told the same things.

settings = WorkerSettings.parse(sys.argv[1:])       # the front
settings = WorkerSettings.model_validate(values)    # a rank, from `RankStart.settings`
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator
from pydantic_settings import NoDecode

from core.address import parse_address
from core.settings import PeerSettings, split_commas
from core.start_time import BESIDE_READING_SECONDS, start_seconds
from core.token_file import TokenFile
from engine.process.draft_count import MOST_REQUESTS


def _check_model(path: Path) -> Path:
    path = path.expanduser()
    if not (path / "config.json").is_file():
        raise ValueError("no model folder (it has no config.json)")
    return path.resolve()


def _check_file(path: Path | None) -> Path | None:
    if path is None:
        return None
    path = path.expanduser()
    if not path.is_file():
        raise ValueError("no such file")
    return path.resolve()


def _check_rendezvous(text: str) -> str:
    return str(parse_address(text)) if text else text


# 1,2,4 in flags and variables alike.
Sizes = Annotated[tuple[PositiveInt, ...], NoDecode, BeforeValidator(split_commas)]


class WorkerSettings(PeerSettings):
    """Everything a worker can be told. Fields of one role only say so."""

    model: Annotated[Path, AfterValidator(_check_model)] = Field(
        description="Checkpoint folder: config.json, safetensors, tokenizer"
    )
    served_model_name: str = Field(
        "", max_length=256, description="Name that requests use; default: name of the folder"
    )

    load_format: Literal["auto", "dummy"] = Field(
        "auto",
        description="dummy: random weights in place of the folder's, of which only config.json "
        "is read; to measure speed",
    )

    # ---- ranks
    ranks: int = Field(1, ge=1, le=64, description="Rank processes of this worker")
    nodes: int = Field(1, ge=1, le=512, description="Workers (nodes) that form one EP group")
    node_rank: int = Field(0, ge=0, description="Index of this worker among the nodes")
    rendezvous: Annotated[str, AfterValidator(_check_rendezvous)] = Field(
        "", description="host:port on node 0 where the EP group meets; one node: a free port"
    )
    group_token_file: TokenFile | None = Field(
        None,
        description="File with the word that ranks of an EP group of several nodes know each other "
        "by, the same on all of them; one node makes its own",
    )
    ep_backend: Literal["auto", "sockets", "gloo", "nccl"] = Field(
        "auto", description="What moves tensors between ranks; auto: nccl on cuda, else sockets"
    )
    ep_dispatcher: Literal["auto", "local", "collective", "deep_ep"] = Field(
        "auto",
        description="What moves tokens to their experts; auto: deep_ep where all ranks have it and "
        "reach each other directly, else collective; local for one rank",
    )
    num_redundant_experts: int = Field(
        0, ge=0, le=65536, description="Replicas of experts, in all ranks together, a layer"
    )
    expert_placement: Annotated[Path | None, AfterValidator(_check_file)] = Field(
        None, description="File that says which rank holds which experts; default: in turn"
    )
    shared_expert: Literal["beside", "folded"] = Field(
        "beside",
        description="Computed while tokens travel, or in one go with the routed ones, as one more",
    )
    routed_experts: Literal["dispatched", "fused"] = Field(
        "dispatched",
        description="Grouped products between dispatch and combine, or all in one call of our own: "
        "of one rank, not of int4",
    )
    expert_group: str = Field(
        "",
        max_length=256,
        description="Name of the EP group; default: the worker's, of several nodes the rendezvous",
    )
    expert_load_window_seconds: float = Field(
        60.0, gt=0, le=86400, description="Time over which the load of experts is looked at"
    )
    rebalance_interval_seconds: float = Field(
        0.0, ge=0, description="Experts are rebalanced by themselves this often at most, 0: never"
    )
    rebalance_threshold: float = Field(
        0.9, gt=0, le=1, description="... and only when the balancedness is below this"
    )
    rebalance_bytes_per_second: float = Field(
        1e9, ge=1e6, description="What a rank may send of experts that move"
    )
    step_timeout_seconds: float = Field(
        30.0,
        gt=0,
        description="A rank that keeps its EP group waiting this long is lost, and one that ends "
        "no step for this and stall-seconds: the worker is started anew",
    )
    stall_seconds: float = Field(
        3.0,
        gt=1,
        le=3600,
        description="More than any step takes: a worker with a rank that ends none for so long "
        "takes no requests until it goes on, and those that it has move",
    )
    device: str = Field(
        "cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda, or cuda:N for rank 0"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Of activations and KV; auto: float32 on cpu, bfloat16 on cuda"
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads a rank, 0: cores / ranks")
    start_timeout_seconds: float = Field(
        0.0,
        ge=0,
        description="A rank that is not ready by then has failed to start; 0: 600 s, and the time "
        "in which the model's files are read at 0.25 GB/s",
    )
    stop_grace_seconds: float = Field(
        3.0, ge=0, le=3600, description="On SIGTERM, time that open requests have to finish"
    )
    admin_token_file: TokenFile | None = Field(
        None,
        description="File with the word that calls which change this worker must carry as "
        "`authorization: Bearer WORD`, as for the router; read again when it changes; default: "
        "anybody may call",
    )
    run_dir: str = Field("", description="Folder for sockets; default: a new temporary one")

    # ---- KV pages
    page_tokens: int = Field(64, ge=1, le=1024, description="Tokens a KV page")
    kv_pages: int = Field(0, ge=0, description="KV pages a rank, 0: as many as make sense")
    kv_memory_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share for KV, when kv-pages is 0, of the memory (GPU or host) that weights, "
        "buffers and scratch leave; 0: 0.4 on cpu, else 0.9",
    )
    gpu_memory_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of its GPU's memory that a rank plans with: less than 1 where workers "
        "share a GPU (`ctl up` sees to it); never more than other processes leave of it",
    )
    max_model_len: int = Field(
        0, ge=0, description="Most tokens of a request, prompt and output; 0: what the model can"
    )
    transfer: Literal["nixl"] = Field("nixl", description="What moves KV pages between workers")

    kv_arrival_seconds: float = Field(
        5.0,
        gt=0,
        description="Decode: KV of which none comes for so long after prefill is given up",
    )
    quarantine_lease_seconds: float = Field(
        10.0,
        gt=0,
        description="Decode: pages of an unreachable prefill worker are held at least this long",
    )

    # ---- CUDA graphs
    cuda_graph: bool = Field(
        True, description="Decode, on cuda: steps are recorded once and launched as one"
    )
    cuda_graph_batch_sizes: Sizes = Field(
        (), description="Batch sizes that are recorded; default: 1, 2, 4, 8, 16, 24, ..."
    )
    cuda_graph_max_batch: int = Field(
        0,
        ge=0,
        le=4096,
        description="The largest of them, 0: max-running; larger steps are not recorded",
    )
    cuda_graph_prefill_tokens: int = Field(
        1024,
        ge=0,
        le=1024,
        description="Prefill, on cuda, of one rank: passes of up to so many tokens are recorded, "
        "0: none",
    )

    # ---- speculation
    speculative_tokens: int = Field(
        0,
        ge=0,
        le=5,
        description="Decode: tokens that are drafted for each to come, or fewer, where fewer pay; "
        "prefill: other than 0 where decode drafts, of whose MTP layer it computes the KV then",
    )
    speculative_method: Literal["mtp", "ngram"] = Field(
        "mtp",
        description="What drafts: the model's MTP layer, or looking up in prompt and output what "
        "followed the last tokens before; the same on prefill and decode",
    )

    # ---- load
    overlap_schedule: bool | None = Field(
        None,
        description="Decode: a step is planned while the one before it is computed; default: "
        "where that one is a recorded step, without drafts",
    )
    max_running: int = Field(64, ge=1, le=4096, description="Decode: requests in a rank's batch")
    max_waiting: int = Field(256, ge=0, description="Requests a rank may queue")
    chunk_tokens: int = Field(
        0, ge=0, description="Prefill: tokens a rank computes in a step, 0: 512 on cpu, else 2048"
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.node_rank >= self.nodes:
            raise ValueError(f"node-rank {self.node_rank} is not below nodes {self.nodes}")
        if self.nodes > 1 and not self.rendezvous:
            raise ValueError("several nodes need a rendezvous that all of them can reach")
        if self.expert_placement is not None and self.num_redundant_experts:
            raise ValueError("expert-placement has the replicas in it: no num-redundant-experts")
        if self.overlap_schedule and self.speculative_tokens:
            raise ValueError(
                f"no overlap-schedule with speculative-tokens {self.speculative_tokens}: a step is "
                "planned once it is known which drafts were right"
            )
        if self.chunk_tokens and self.chunk_tokens < self.page_tokens:
            raise ValueError(
                f"chunk-tokens {self.chunk_tokens} is less than a page of {self.page_tokens}"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name that requests must carry."""
        return self.served_model_name or self.model.name

    @property
    def dtype_name(self) -> str:
        """`dtype` with "auto" resolved."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def start_seconds(self) -> float:
        """`start_timeout_seconds` with 0 resolved. Made-up weights are not read."""
        if self.load_format == "dummy":
            return self.start_timeout_seconds or BESIDE_READING_SECONDS
        return self.start_timeout_seconds or start_seconds(self.model)

    @property
    def kv_fraction(self) -> float:
        """`kv_memory_fraction` with 0 resolved."""
        return self.kv_memory_fraction or (0.4 if self.device == "cpu" else 0.9)

    @property
    def graph_batch(self) -> int:
        """Requests of the largest recorded step of a decode rank."""
        return min(self.cuda_graph_max_batch or self.max_running, self.max_running)

    @property
    def running_tokens(self) -> int:
        """Of the largest step of a decode rank: a token and its drafts of each request."""
        drafting = min(self.max_running, MOST_REQUESTS)
        return max(self.max_running, drafting * (1 + self.speculative_tokens))

    @property
    def drafts_by_mtp(self) -> bool:
        return self.speculative_tokens > 0 and self.speculative_method == "mtp"

    @property
    def drafts_by_lookup(self) -> bool:
        return self.speculative_tokens > 0 and self.speculative_method == "ngram"

    @property
    def step_tokens(self) -> int:
        """`chunk_tokens` with 0 resolved: enough to keep the device busy, little enough that a
        request does not wait long for the step before its own."""
        return self.chunk_tokens or max(512 if self.device == "cpu" else 2048, self.page_tokens)

    @property
    def expert_group_name(self) -> str:
        """The same on all nodes of the group; "" where nothing has a name."""
        return self.expert_group or (self.rendezvous if self.nodes > 1 else self.name)

    @property
    def group_size(self) -> int:
        """Ranks of the EP group, over all nodes."""
        return self.nodes * self.ranks

    def device_of(self, local_rank: int) -> str:
        """Device of a rank: cpu, or the cuda device `local_rank` after the first one."""
        if self.device == "cpu":
            return "cpu"
        _, _, first = self.device.partition(":")
        return f"cuda:{int(first or 0) + local_rank}"
