"""`ctl up`: the whole cluster on this machine."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from core.address import Address, parse_address
from core.start_time import start_seconds
from ctl.base.checkpoint import check_model_folder, demo_model_folder
from ctl.base.cluster_access import RUN_FOLDER_PREFIX, make_token
from ctl.base.flags import WORKER_ROLES, parse_settings
from ctl.base.host import Host
from ctl.base.options import with_options
from ctl.base.output import make_console
from ctl.base.ports import LOOPBACK, free_ports, is_free
from ctl.local.cluster_options import DECODE_RANKS, ClusterOptions
from ctl.local.flags_check import check_flags
from ctl.local.gpus import count_gpus
from ctl.local.layout import Machine, cluster
from ctl.local.log_files import LogFiles
from ctl.local.plan_first import fits
from ctl.local.process_spec import ProcessSpec
from ctl.local.proxies import proxies
from ctl.local.readiness import until_silent, wait_until_ready
from ctl.local.supervision import Limits
from ctl.local.supervisor import Supervisor
from ctl.local.terminal import Terminal
from ctl.plan.asking import explained_errors
from ctl.plan.cards import own_cards
from rpc.cluster_credentials import load

_DEMO_NAME = "demo"
# After their graces: a gateway ends its responses and its processes.
_GATEWAY_END_SECONDS = 3.5
_END_SECONDS = 0.5
_WORKER_MARGIN_SECONDS = 30.0


@with_options(ClusterOptions)
def up(
    options: ClusterOptions,
    log_dir: Annotated[Path, typer.Option(help="Folder for the logs, one a process")] = Path(
        "logs"
    ),
    ready_timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Seconds after which a cluster that is not up is given up; default: 630, and the "
            "time in which the model's files are read at 0.25 GB/s",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Starts gateway, router, prefill and decode workers here, and keeps them running."""
    num_gpus = 0
    if options.device == "cuda":
        num_gpus = count_gpus()
        if num_gpus == 0:
            raise typer.BadParameter("no GPU found (nvidia-smi -L)", param_hint="--device")
        ranks = options.decode_ranks or min(DECODE_RANKS, num_gpus)
        options = replace(options, decode_ranks=ranks)
    with explained_errors():
        options = _with_model(options)
        specs = _layout(options, num_gpus)
        if options.settings:
            check_flags(specs, options.environment())
        if num_gpus and not _fits(specs):
            raise typer.Exit(1)
    assert options.model is not None
    # Workers give up first, and say which of their ranks is late.
    seconds = ready_timeout or start_seconds(options.model) + _WORKER_MARGIN_SECONDS
    raise typer.Exit(run(specs, options, log_dir, seconds))


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
    with TemporaryDirectory(prefix=RUN_FOLDER_PREFIX, ignore_cleanup_errors=True) as run_folder:
        if options.cluster_token_file is None:
            router = f"{LOOPBACK}:{options.router_port}"
            options = replace(options, cluster_token_file=make_token(run_folder, router))
        try:
            credentials = load(options)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        environment = {"TMPDIR": run_folder, **options.environment()}
        if options.device == "cpu":
            # KV travels on this machine only: what moves it need not listen to others.
            environment["UCX_NET_DEVICES"] = os.environ.get("UCX_NET_DEVICES", "lo")
        terminal = Terminal(make_console(lasting=True, markup=True), specs, options, log_folder)
        terminal.begin()
        supervisor = Supervisor(
            [replace(spec, environment=environment) for spec in specs],
            LogFiles(
                log_folder,
                [spec.name for spec in specs],
                max_bytes=options.log_mib * 2**20,
                num_earlier=options.log_files,
            ),
            terminal,
            limits=replace(stop_limits(specs), ready_seconds=ready_timeout_seconds),
            probe=partial(wait_until_ready, credentials=credentials),
            until_silent=partial(until_silent, credentials=credentials),
        )
        addresses = {
            spec.name: parse_address(spec.address) for spec in specs if spec.role != "gateway"
        }
        return asyncio.run(_supervise(supervisor, run_folder, addresses if options.proxies else {}))


async def _supervise(
    supervisor: Supervisor, run_folder: str, proxied: Mapping[str, Address]
) -> int:
    async with AsyncExitStack() as stack:
        if proxied:
            try:
                await stack.enter_async_context(proxies(Path(run_folder), proxied))
            except OSError as error:
                raise typer.BadParameter(str(error), param_hint="--proxies") from error
        return await supervisor.run()


def stop_limits(specs: Sequence[ProcessSpec]) -> Limits:
    """Times that are enough for all graces."""
    gateways = [spec.grace_seconds for spec in specs if spec.role == "gateway"]
    others = [spec.grace_seconds for spec in specs if spec.role != "gateway"]
    return Limits(
        front_seconds=max(gateways, default=0.0) + _GATEWAY_END_SECONDS,
        kill_after_seconds=max(others, default=0.0) + _END_SECONDS,
    )


def _with_model(options: ClusterOptions) -> ClusterOptions:
    """With folder and name of the model. Raises CheckpointError for one that cannot be served."""
    settings = parse_settings(options.settings or ())
    made_up = all(settings[role].get("load-format") == "dummy" for role in WORKER_ROLES)
    folder = options.model.expanduser().resolve() if options.model else demo_model_folder()
    check_model_folder(folder, with_weights=not made_up)
    name = folder.name if options.model else _DEMO_NAME
    return replace(options, model=folder, served_model_name=options.served_model_name or name)


def _fits(specs: Sequence[ProcessSpec]) -> bool:
    """True also where the GPUs do not tell what memory they have: ranks will see."""
    gpus = own_cards(Host(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return not gpus or fits(specs, gpus, make_console(stderr=True))


def _layout(options: ClusterOptions, num_gpus: int) -> list[ProcessSpec]:
    """The processes, on free ports. Raises ValueError for what cannot be."""
    for port, role in ((options.port, "gateway"), (options.router_port, "router")):
        if not is_free(port):
            raise ValueError(f"port {port} of the {role} is in use; choose another with --port")
    machine = Machine(num_cores=len(os.sched_getaffinity(0)), num_gpus=num_gpus)
    return cluster(options, machine, free_ports(options.first_worker_port))
