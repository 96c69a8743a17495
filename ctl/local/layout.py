"""Which processes make up a cluster on this machine, and how each is started. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from core.address import parse_address
from ctl.base.flags import WORKER_ROLES, Role, parse_settings
from ctl.base.ports import LOOPBACK, PROXY_HOST
from ctl.local.cluster_options import ClusterOptions
from ctl.local.gpus import assign_devices, ranks_per_gpu
from ctl.local.process_spec import ProcessSpec

# For running requests, when everything is stopped. Workers are stopped after the gateway, when
# only requests of others are left.
GATEWAY_GRACE_SECONDS = 30
WORKER_GRACE_SECONDS = 3
# Flags that follow from the layout.
_DECIDED = frozenset({"name", "listen", "metrics-port", "router", "ranks"})


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
    num_ranks = options.prefill_workers * options.prefill_ranks
    if role == "decode":
        num_ranks = options.decode_workers * options.num_decode_ranks
    return max(1, machine.num_cores // num_ranks)


def cluster(
    options: ClusterOptions, machine: Machine, worker_ports: Iterator[int]
) -> list[ProcessSpec]:
    """All processes. Takes two ports a worker, and two a router but for the first one's own, from
    `worker_ports`.

    Raises ValueError for an option that cannot be met, and for a setting of a flag that the
    layout itself decides.
    """
    workers = _workers(options, machine, worker_ports)
    addresses: dict[str, str] = {
        role: _reached(options, (worker for worker in workers if worker.role == role))
        for role in WORKER_ROLES
    }
    routers = []
    for index in range(options.routers):
        name = "router" if options.routers == 1 else f"router-{index}"
        port = next(worker_ports) if index else options.router_port
        address, metrics_address = (f"{LOOPBACK}:{each}" for each in (port, next(worker_ports)))
        routers.append(_spec(options, "router", name, address, metrics_address, addresses))
    flags = {
        "router": _reached(options, routers),
        "workers": str(options.gateway_workers),
        "grace-seconds": str(GATEWAY_GRACE_SECONDS),
        **_model_flags(options),
    }
    # The gateway serves its metrics where it serves everything else.
    gateway = _spec(options, "gateway", "gateway", f"{LOOPBACK}:{options.port}", "", flags)
    return [gateway, *routers, *workers]


def _reached(options: ClusterOptions, specs: Iterable[ProcessSpec]) -> str:
    """Where others reach these."""
    addresses = [parse_address(spec.address) for spec in specs]
    return ",".join(
        str(each._replace(host=PROXY_HOST) if options.proxies else each) for each in addresses
    )


def _workers(options: ClusterOptions, machine: Machine, ports: Iterator[int]) -> list[ProcessSpec]:
    roles: list[Role] = ["prefill"] * options.prefill_workers
    roles += ["decode"] * options.decode_workers
    num_ranks = {"prefill": options.prefill_ranks, "decode": options.num_decode_ranks}
    ranks = [num_ranks[role] for role in roles]
    devices: list[str] = [options.device] * len(ranks)
    sharers = [1] * len(ranks)
    if options.device == "cuda":
        devices = assign_devices(ranks, machine.num_gpus)
        sharers = ranks_per_gpu(ranks, devices)
    common = {**_model_flags(options), "dtype": options.dtype}
    sizes = ("kv_pages", "chunk_tokens", "max_model_len", "max_running", "speculative_tokens")
    for name in sizes:
        if value := getattr(options, name):
            common[name.replace("_", "-")] = str(value)
    if options.speculative_tokens:
        common["speculative-method"] = options.speculative_method
    workers = []
    numbers: Counter[Role] = Counter()
    for index, role in enumerate(roles):
        name = f"{role}-{numbers[role]}"
        numbers[role] += 1
        flags = common | {
            "ranks": str(ranks[index]),
            "device": devices[index],
            "threads": str(threads_per_rank(options, machine, role)),
            "stop-grace-seconds": str(WORKER_GRACE_SECONDS),
        }
        if options.proxies:
            flags["advertise"] = PROXY_HOST
        if sharers[index] > 1:
            flags["gpu-memory-share"] = f"{1 / sharers[index]:.3f}"
        address, metrics_address = (f"{LOOPBACK}:{next(ports)}" for _ in range(2))
        workers.append(_spec(options, role, name, address, metrics_address, flags))
    return workers


def _model_flags(options: ClusterOptions) -> dict[str, str]:
    return {"model": str(options.model), "served-model-name": options.served_model_name}


def _spec(
    options: ClusterOptions,
    role: Role,
    name: str,
    address: str,
    metrics_address: str,
    flags: dict[str, str],
) -> ProcessSpec:
    flags = {"name": name, "listen": address, **flags, "log-level": options.log_level}
    if options.otlp_endpoint:
        flags["otlp-endpoint"] = options.otlp_endpoint
    if metrics_address:
        flags["metrics-port"] = metrics_address.rpartition(":")[2]
    given = parse_settings(options.settings or ())[role]
    if decided := sorted(_DECIDED & set(given)):
        raise ValueError(f"{role}.{decided[0]} is decided by ctl up and cannot be set")
    spec = ProcessSpec(
        name=name,
        role=role,
        address=address,
        metrics_address=metrics_address or address,
        flags=flags | given,
        num_ranks=int(flags.get("ranks", 0)),
        device=flags.get("device", ""),
    )
    if spec.guards_all_paths:
        raise ValueError("gateway.guard-all-paths: ctl up has no key to ask whether it is ready")
    return spec
