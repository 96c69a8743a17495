"""`ctl up`: the whole cluster on this machine."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer

from core.errors import CheckpointError
from ctl import flags
from ctl.checkpoint import check_model_folder, demo_model_folder
from ctl.gpus import count_gpus
from ctl.layout import WORKER_ROLES, ClusterOptions, Machine, cluster, parse_settings
from ctl.output import make_console
from ctl.ports import free_ports, is_free
from ctl.process_spec import ProcessSpec
from ctl.supervision import Limits
from ctl.supervisor import Supervisor
from ctl.terminal import Terminal

_DEMO_NAME = "demo"
_DECODE_RANKS = 2
# Behind their graces: a gateway ends its responses and its processes.
_GATEWAY_END_SECONDS = 3.5
_END_SECONDS = 0.5


def up(
    model: flags.Model = None,
    served_model_name: flags.ServedModelName = "",
    gateway_workers: flags.GatewayWorkers = 1,
    prefill_workers: flags.PrefillWorkers = 1,
    prefill_ranks: flags.PrefillRanks = 1,
    decode_workers: flags.DecodeWorkers = 1,
    decode_ranks: flags.DecodeRanks = None,
    port: flags.Port = 8000,
    device: flags.Device = "cpu",
    dtype: flags.Dtype = "auto",
    log_dir: flags.LogDir = Path("logs"),
    kv_pages: flags.KvPages = 0,
    chunk_tokens: flags.ChunkTokens = 0,
    max_model_len: flags.MaxModelLen = 0,
    max_running: flags.MaxRunning = 0,
    threads: flags.Threads = 0,
    log_level: flags.LogLevel = "info",
    otlp_endpoint: flags.OtlpEndpoint = "",
    ready_timeout: flags.ReadyTimeout = 600.0,
    settings: flags.Settings = None,
) -> None:
    """Starts gateway, router, prefill and decode workers here, and keeps them running."""
    num_gpus = count_gpus() if device == "cuda" else 0
    if device == "cuda" and num_gpus == 0:
        raise typer.BadParameter("no GPU found (nvidia-smi -L)", param_hint="--device")
    try:
        told = parse_settings(settings or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    made_up = all(told.get(role, {}).get("load-format") == "dummy" for role in WORKER_ROLES)
    folder, name = _model(model, served_model_name, with_weights=not made_up)
    if decode_ranks is None:
        decode_ranks = min(_DECODE_RANKS, num_gpus) if device == "cuda" else _DECODE_RANKS
    try:
        options = ClusterOptions(
            model=folder,
            served_model_name=name,
            gateway_workers=gateway_workers,
            prefill_workers=prefill_workers,
            prefill_ranks=prefill_ranks,
            decode_workers=decode_workers,
            decode_ranks=decode_ranks,
            port=port,
            device=device,
            dtype=dtype,
            kv_pages=kv_pages,
            chunk_tokens=chunk_tokens,
            max_model_len=max_model_len,
            max_running=max_running,
            threads=threads,
            log_level=log_level,
            otlp_endpoint=otlp_endpoint,
            settings=told,
        )
        specs = _layout(options, num_gpus)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(run(specs, options, log_dir, ready_timeout))


def run(
    specs: Sequence[ProcessSpec],
    options: ClusterOptions,
    log_dir: Path,
    ready_timeout_seconds: float,
) -> int:
    """Runs the processes until the operator has had enough; returns the exit status."""
    log_folder = log_dir.expanduser().resolve()
    try:
        log_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{log_folder}: {error.strerror}"
        raise typer.BadParameter(reason, param_hint="--log-dir") from error
    # Sockets of all processes: theirs to fill, ours to remove, also when they were killed.
    run_folder = tempfile.mkdtemp(prefix="epserve-")
    environment = {"TMPDIR": run_folder}
    if options.device == "cpu":
        # KV travels on this machine only: what moves it need not listen to others.
        environment["UCX_NET_DEVICES"] = os.environ.get("UCX_NET_DEVICES", "lo")
    try:
        terminal = Terminal(make_console(lasting=True), specs, options, log_folder)
        terminal.begin()
        supervisor = Supervisor(
            [spec.with_environment(**environment) for spec in specs],
            log_folder,
            terminal,
            limits=stop_limits(specs),
            ready_timeout_seconds=ready_timeout_seconds,
        )
        return asyncio.run(supervisor.run())
    finally:
        shutil.rmtree(run_folder, ignore_errors=True)


def stop_limits(specs: Sequence[ProcessSpec]) -> Limits:
    """Times that are enough for all graces."""
    gateways = [spec.grace_seconds for spec in specs if spec.role == "gateway"]
    others = [spec.grace_seconds for spec in specs if spec.role != "gateway"]
    return Limits(
        front_seconds=max(gateways, default=0.0) + _GATEWAY_END_SECONDS,
        kill_after_seconds=max(others, default=0.0) + _END_SECONDS,
    )


def _model(model: Path | None, served_model_name: str, *, with_weights: bool) -> tuple[Path, str]:
    """Folder and name of the model, or exit status 2 with the reason."""
    try:
        folder = demo_model_folder() if model is None else model.expanduser().resolve()
        check_model_folder(folder, with_weights=with_weights)
    except CheckpointError as error:
        raise typer.BadParameter(error.message, param_hint="--model") from error
    return folder, served_model_name or (_DEMO_NAME if model is None else folder.name)


def _layout(options: ClusterOptions, num_gpus: int) -> list[ProcessSpec]:
    """The processes, on free ports. Raises ValueError for what cannot be."""
    for port, role in ((options.port, "gateway"), (options.router_port, "router")):
        if not is_free(port):
            raise ValueError(f"port {port} of the {role} is in use; choose another with --port")
    machine = Machine(num_cores=len(os.sched_getaffinity(0)), num_gpus=num_gpus)
    return cluster(options, machine, free_ports(options.first_worker_port))
