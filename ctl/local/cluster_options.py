"""What the operator asks `ctl up` for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ctl.base.cluster_access import ClusterAccess

DECODE_RANKS = 2
_MAX_GATEWAY_PORT = 65000  # leaves room for the router and the workers above it


def _at_least(least: int, help: str, **settings: Any) -> Any:  # noqa: ANN401 - as typer has it
    return typer.Option(min=least, help=help, **settings)


def _processes(help: str, **settings: Any) -> Any:  # noqa: ANN401 - as typer has it
    return typer.Option(min=1, max=64, help=help, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(ClusterAccess):
    """Each field is an option of `ctl up`. 0 or an empty text leaves a choice to the process
    itself."""

    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder; default: the demo model that ships")
    ] = None
    served_model_name: Annotated[
        str, typer.Option(help="Name that requests use; default: name of the folder")
    ] = ""
    gateway_workers: Annotated[int, _processes("Gateway processes that share its port")] = 1
    routers: Annotated[int, _processes("Routers that gateways share their requests out to")] = 1
    prefill_workers: Annotated[int, _processes("Prefill workers")] = 1
    prefill_ranks: Annotated[int, _processes("Ranks of each prefill worker")] = 1
    decode_workers: Annotated[int, _processes("Decode workers")] = 1
    decode_ranks: Annotated[
        int | None,
        _processes(
            f"Ranks of each decode worker; default: {DECODE_RANKS}, on cuda no more than GPUs",
            show_default=False,
        ),
    ] = None
    port: Annotated[
        int,
        typer.Option(
            min=1024,
            max=_MAX_GATEWAY_PORT,
            help="HTTP port of the gateway; the router takes the next one, workers free ones above",
        ),
    ] = 8000
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What ranks compute on")] = "cpu"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Of activations and KV; auto: float32 on cpu, bfloat16 on cuda"),
    ] = "auto"
    kv_pages: Annotated[int, _at_least(0, "KV pages a rank; 0: what memory allows")] = 0
    chunk_tokens: Annotated[
        int, _at_least(0, "Prompt tokens a prefill rank computes in a step; 0: default")
    ] = 0
    max_model_len: Annotated[
        int, _at_least(0, "Most tokens of a request; 0: what the model can")
    ] = 0
    max_running: Annotated[
        int, _at_least(0, "Requests in the batch of a decode rank; 0: default")
    ] = 0
    speculative_tokens: Annotated[
        int, _at_least(0, "Tokens that are drafted for each to come at most; 0: none")
    ] = 0
    speculative_method: Annotated[
        Literal["mtp", "ngram"],
        typer.Option(help="What drafts: the model's MTP layer, or looking up in prompt and output"),
    ] = "mtp"
    threads: Annotated[
        int, _at_least(0, "CPU threads a rank; 0: the cores, shared out to a role's ranks")
    ] = 0
    proxies: Annotated[
        bool,
        typer.Option(
            "--proxies",
            help="Processes reach each other through proxies, for ctl chaos to cut and slow down",
        ),
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Least level that is logged"),
    ] = "info"
    log_mib: Annotated[
        int, typer.Option(min=1, help="MiB of a process's log after which it begins anew")
    ] = 64
    log_files: Annotated[
        int,
        typer.Option(min=0, help="Earlier logs kept of each process: NAME.log.1, the latest, ..."),
    ] = 3
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            help="Collector that all processes send traces to (OTLP over gRPC): host:port"
        ),
    ] = ""
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any other flag of a role's processes: ROLE.FLAG=VALUE (decode.max-waiting=8)",
            show_default=False,
        ),
    ] = None

    @property
    def router_port(self) -> int:
        return self.port + 1

    @property
    def first_worker_port(self) -> int:
        return self.port + 2

    @property
    def num_decode_ranks(self) -> int:
        return self.decode_ranks or DECODE_RANKS
