"""The options of `ctl up`, one type each."""

from pathlib import Path
from typing import Annotated, Literal

import typer

_MAX_PROCESSES = 64
_MAX_GATEWAY_PORT = 65000  # leaves room for the router and the workers above it

Model = Annotated[
    Path | None, typer.Option(help="Checkpoint folder; default: the demo model that ships")
]
ServedModelName = Annotated[
    str, typer.Option(help="Name that requests use; default: name of the folder")
]
GatewayWorkers = Annotated[
    int, typer.Option(min=1, max=_MAX_PROCESSES, help="Gateway processes that share its port")
]
PrefillWorkers = Annotated[int, typer.Option(min=1, max=_MAX_PROCESSES, help="Prefill workers")]
PrefillRanks = Annotated[
    int, typer.Option(min=1, max=_MAX_PROCESSES, help="Ranks of each prefill worker")
]
DecodeWorkers = Annotated[int, typer.Option(min=1, max=_MAX_PROCESSES, help="Decode workers")]
DecodeRanks = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=_MAX_PROCESSES,
        help="Ranks of each decode worker; default: 2, on cuda no more than GPUs",
        show_default=False,
    ),
]
Port = Annotated[
    int,
    typer.Option(
        min=1024,
        max=_MAX_GATEWAY_PORT,
        help="HTTP port of the gateway; the router takes the next one, workers free ones above",
    ),
]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="What ranks compute on")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="Of activations and KV; auto: float32 on cpu, bfloat16 on cuda"),
]
LogDir = Annotated[Path, typer.Option(help="Folder for the logs, one a process")]
KvPages = Annotated[int, typer.Option(min=0, help="KV pages a rank; 0: what memory allows")]
ChunkTokens = Annotated[
    int, typer.Option(min=0, help="Prompt tokens a prefill rank computes in a step; 0: default")
]
MaxModelLen = Annotated[
    int, typer.Option(min=0, help="Most tokens of a request; 0: what the model can")
]
MaxRunning = Annotated[
    int, typer.Option(min=0, help="Requests in the batch of a decode rank; 0: default")
]
Threads = Annotated[
    int, typer.Option(min=0, help="CPU threads a rank; 0: the cores, shared out to a role's ranks")
]
OtlpEndpoint = Annotated[
    str,
    typer.Option(help="Collector that all processes send traces to (OTLP over gRPC): host:port"),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(help="Least level that is logged")
]
ReadyTimeout = Annotated[
    float, typer.Option(min=1, help="Seconds after which a cluster that is not up is given up")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any other flag of a role's processes: ROLE.FLAG=VALUE (decode.max-waiting=8)",
        show_default=False,
    ),
]
