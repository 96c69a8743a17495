"""Which processes make up a cluster on this machine, and how each is started. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from ctl.gpus import assign_devices, ranks_per_gpu
from ctl.ports import LOOPBACK
from ctl.process_spec import ProcessSpec, Role

WORKER_ROLES: tuple[Role, ...] = ("prefill", "decode")
ROLES: tuple[Role, ...] = ("gateway", "router", *WORKER_ROLES)

# For running requests, when everything is stopped. Workers are stopped behind the gateway, with
# requests of others only.
GATEWAY_GRACE_SECONDS = 30
WORKER_GRACE_SECONDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What the operator asked for. 0 or an empty text leaves a choice to the process itself;
    `settings` holds further flags of each role, by flag name without dashes."""

    model: Path
    served_model_name: str
    gateway_workers: int = 1
    prefill_workers: int = 1
    prefill_ranks: int = 1
    decode_workers: int = 1
    decode_ranks: int = 2
    port: int = 8000
    device: str = "cpu"
    dtype: str = "auto"
    kv_pages: int = 0
    chunk_tokens: int = 0
    max_model_len: int = 0
    max_running: int = 0
    threads: int = 0
    log_level: str = "info"
    otlp_endpoint: str = ""
    settings: Mapping[Role, Mapping[str, str]] = field(default_factory=dict)

    @property
    def router_port(self) -> int:
        return self.port + 1

    @property
    def first_worker_port(self) -> int:
        return self.port + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is to share out."""

    num_cores: int
    num_gpus: int = 0


def threads_per_rank(options: ClusterOptions, machine: Machine, role: Role) -> int:
    """Most compute threads of a rank: the cores, shared out to all ranks of its role.

    Roles do not share: a rank uses threads only for large passes, which decode has none of, and
    a prompt that arrives alone is to have the whole machine.
    """
    if options.threads:
        return options.threads
    if role == "prefill":
        num_ranks = options.prefill_workers * options.prefill_ranks
    else:
        num_ranks = options.decode_workers * options.decode_ranks
    return max(1, machine.num_cores // num_ranks)


def cluster(
    options: ClusterOptions, machine: Machine, worker_ports: Iterator[int]
) -> list[ProcessSpec]:
    """All processes. Takes two ports a worker and one for the router from `worker_ports`.

    Raises ValueError for an option that cannot be met, and for a setting of a flag that the
    layout itself decides.
    """
    workers = _workers(options, machine, worker_ports)
    router_address = f"{LOOPBACK}:{options.router_port}"
    router = _spec(
        options,
        "router",
        "router",
        "router",
        router_address,
        f"{LOOPBACK}:{next(worker_ports)}",
        {
            role: ",".join(worker.address for worker in workers if worker.role == role)
            for role in WORKER_ROLES
        },
    )
    gateway_address = f"{LOOPBACK}:{options.port}"
    gateway = _spec(
        options,
        "gateway",
        "gateway",
        "gateway",
        gateway_address,
        "",
        {
            "router": router_address,
            "workers": str(options.gateway_workers),
            "grace-seconds": str(GATEWAY_GRACE_SECONDS),
            **_model_flags(options),
        },
    )
    return [gateway, router, *workers]


def _workers(options: ClusterOptions, machine: Machine, ports: Iterator[int]) -> list[ProcessSpec]:
    ranks = [options.prefill_ranks] * options.prefill_workers
    ranks += [options.decode_ranks] * options.decode_workers
    if options.device == "cuda":
        devices = assign_devices(ranks, machine.num_gpus)
        sharers = ranks_per_gpu(ranks, devices)
    else:
        devices, sharers = [options.device] * len(ranks), [1] * len(ranks)
    flags = {**_model_flags(options), "dtype": options.dtype}
    for name in ("kv_pages", "chunk_tokens", "max_model_len", "max_running"):
        if value := getattr(options, name):
            flags[name.replace("_", "-")] = str(value)
    workers = []
    numbers = {role: count() for role in WORKER_ROLES}
    for index, device in enumerate(devices):
        role: Role = "prefill" if index < options.prefill_workers else "decode"
        name = f"{role}-{next(numbers[role])}"
        address, metrics = (f"{LOOPBACK}:{next(ports)}" for _ in range(2))
        own = {
            "ranks": str(ranks[index]),
            "device": device,
            "threads": str(threads_per_rank(options, machine, role)),
            "stop-grace-seconds": str(WORKER_GRACE_SECONDS),
        }
        if sharers[index] > 1:
            own["gpu-memory-share"] = f"{1 / sharers[index]:.3f}"
        workers.append(_spec(options, role, name, f"{role}_worker", address, metrics, flags | own))
    return workers


def _model_flags(options: ClusterOptions) -> dict[str, str]:
    return {"model": str(options.model), "served-model-name": options.served_model_name}


def _spec(
    options: ClusterOptions,
    role: Role,
    name: str,
    module: str,
    address: str,
    metrics_address: str,
    flags: dict[str, str],
) -> ProcessSpec:
    flags = {"name": name, "listen": address, **flags, "log-level": options.log_level}
    if options.otlp_endpoint:
        flags["otlp-endpoint"] = options.otlp_endpoint
    if metrics_address:
        flags["metrics-port"] = metrics_address.rpartition(":")[2]
    given = options.settings.get(role, {})
    if decided := sorted({"name", "listen", "metrics-port", "router", "ranks"} & set(given)):
        raise ValueError(f"{role}.{decided[0]} is decided by ctl up and cannot be set")
    spec = ProcessSpec(
        name=name,
        role=role,
        module=module,
        address=address,
        # The gateway serves its metrics where it serves everything else.
        metrics_address=metrics_address or address,
        probe="http" if role == "gateway" else "grpc",
        flags={**flags, **given},
        num_ranks=int(flags.get("ranks", 0)),
        device=flags.get("device", ""),
    )
    if spec.guards_all_paths:
        raise ValueError("gateway.guard-all-paths: ctl up has no key to ask whether it is ready")
    return spec


def parse_settings(texts: list[str]) -> dict[Role, dict[str, str]]:
    """ROLE.FLAG=VALUE texts by role. Raises ValueError for one of another form."""
    settings: dict[Role, dict[str, str]] = {}
    for text in texts:
        target, equals, value = text.partition("=")
        role_name, dot, flag = target.partition(".")
        role = next((role for role in ROLES if role == role_name), None)
        if role is None or not (equals and dot and flag):
            raise ValueError(f"{text!r} is not ROLE.FLAG=VALUE, ROLE one of {', '.join(ROLES)}")
        settings.setdefault(role, {})[flag.replace("_", "-")] = value
    return settings
